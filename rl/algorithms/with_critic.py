"""What algorithms with a value head share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from palestra.rl.algorithms.base import Credit, Float64, Measured
from palestra.rl.critic import CriticSettings
from palestra.rl.valued import Bootstrap, Valued, credit_by
from palestra.rollout.types import Group


class WithCritic(ABC):
    """The value head's settings, and the credit of a step from a scheme for one trajectory.

    A subclass is a frozen dataclass that has the fields below.
    """

    __slots__ = ()

    bootstrap: Bootstrap
    ddof: int
    eps: float
    value_learning_rate: float
    value_coefficient: float
    value_clip: float
    value_trunk_gradient: bool

    @property
    def critic(self) -> CriticSettings:
        """The value head that this algorithm needs. Raises ConfigError."""
        return CriticSettings(
            self.value_learning_rate, self.value_coefficient, self.value_clip or None, self.value_trunk_gradient
        )

    def check(self, group_size: int) -> None:  # noqa: B027 - any size will do, so nothing to override
        """Nothing to refuse: a critic needs no siblings to compare with."""

    def credit(self, groups: Sequence[Group], measured: Measured | None = None) -> list[Credit]:
        """Whitened advantages and plain returns of the judged trajectories. Raises IntegrityError."""
        return credit_by(self._scheme, groups, measured, self.bootstrap, (self.ddof, self.eps, "add"))

    @abstractmethod
    def _scheme(self, one: Valued) -> tuple[Float64, Float64]:
        """Advantages and returns of one trajectory's sampled tokens; NaN where nothing is asked of the critic."""
