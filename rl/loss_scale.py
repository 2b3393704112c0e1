"""Loss scaling for float16, whose small gradients would be rounded to 0 and large ones to infinity.

The loss is multiplied by `value` before the backward and gradients are divided by it after. A gradient that is not
finite is not applied: the scale is halved and the same batch is computed again, so no batch is lost and every update
makes exactly one version. After `growth_updates` updates in a row without that, the scale is doubled. All ranks see the
same norm of all gradients, so all of them decide the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from palestra.envs.errors import IntegrityError


@dataclass(slots=True)
class LossScale:
    """The scale in force. The numbers are those of torch.amp.GradScaler."""

    value: float = 65536.0
    growth_updates: int = 2000
    smallest: float = 1.0
    good: int = 0  # updates since the scale last changed
    overflows: int = 0  # in the life of this learner

    def overflowed(self, update: int) -> None:
        """Halve. Raises IntegrityError when the smallest scale overflows too: then it is not for want of range."""
        self.overflows += 1
        if self.value <= self.smallest:
            raise IntegrityError(
                f"update {update}: gradients are not finite in float16 even at a loss scale of {self.value:g}; the "
                "weights were left as they are. Use bfloat16 or float32; look at log_rho_abs_max of the steps before"
            )
        self.value, self.good = max(self.smallest, self.value / 2), 0

    def worked(self) -> None:
        """Count an update; double when it is time."""
        self.good += 1
        if self.good >= self.growth_updates:
            self.value, self.good = 2 * self.value, 0

    def tensor(self) -> Tensor:
        """What a checkpoint keeps: the scale and how long it has worked, [2]."""
        return torch.tensor([self.value, self.good], dtype=torch.float64)

    def restore(self, kept: Tensor) -> None:
        """Go on from what `tensor` gave."""
        self.value, self.good = float(kept[0]), int(kept[1])
