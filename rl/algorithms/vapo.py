"""VAPO (arXiv:2504.05118): PPO with one lambda for the policy and another for the critic.

Critic targets use lambda = 1, the whole return, so the critic never learns from its own errors; the policy's lambda is
1 - 1 / (alpha l) with l the trajectory's sampled tokens, so that an advantage reaches as far as the episode is long
(`lam` fixes it instead). Differs from the paper: only decoupled, length-adaptive GAE and clip-higher with a token mean,
which are this project's defaults; no imitation term on right answers, and a critic that starts at 0 instead of from
pretraining, which is what the first updates are for.
"""

from __future__ import annotations

from dataclasses import dataclass

from palestra.envs.errors import ConfigError
from palestra.rl.algorithms.base import Float64, divides
from palestra.rl.algorithms.with_critic import WithCritic
from palestra.rl.gae import adaptive_lambda
from palestra.rl.objective import Objective
from palestra.rl.token_gae import DiscountPer, token_gae
from palestra.rl.valued import Bootstrap, Valued

CRITIC_LAM = 1.0


@dataclass(frozen=True, slots=True)
class VAPO(WithCritic):
    """alpha 0.5 and 4 sampled tokens: lambda 0.5."""

    objective: Objective = Objective()
    gamma: float = 1.0
    discount_per: DiscountPer = "token"
    alpha: float = 0.05
    lam: float | None = None
    """The policy's lambda for every length; None: adaptive."""
    bootstrap: Bootstrap = "budgets"
    ddof: int = 1
    eps: float = 1e-8
    value_learning_rate: float = 1e-3
    value_coefficient: float = 0.5
    value_clip: float = 0.2
    """0: no clipping."""
    value_trunk_gradient: bool = False

    def __post_init__(self) -> None:
        divides(self.ddof, self.eps)
        if not (0 < self.gamma <= 1 and self.alpha > 0 and (self.lam is None or 0 <= self.lam <= 1)):
            raise ConfigError(
                f"algorithm.gamma is {self.gamma}, alpha {self.alpha} and lam {self.lam}; use 0 < gamma <= 1, alpha "
                "above 0, and 0 <= lam <= 1 or none"
            )
        _ = self.critic  # refused now, not when it is made

    def _scheme(self, one: Valued) -> tuple[Float64, Float64]:
        lam = adaptive_lambda(self.alpha, len(one.values)) if self.lam is None else self.lam
        return token_gae(one, self.gamma, self.discount_per, lam, CRITIC_LAM)
