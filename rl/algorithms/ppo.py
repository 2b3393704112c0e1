"""PPO (arXiv:1707.06347) with GAE (arXiv:1506.02438) over action tokens and a value head on the policy's body.

delta_t = r_t + gamma V_{t+1} - V_t, where t + 1 is the next token that the policy samples: observations are skipped,
not zeroed, so exactly one gamma lambda lies between two actions and V_{t+1} has read what was observed. A turn's own
reward is on its last token, the outcome on the trajectory's last; a KL in the reward is on every token. An episode that
a budget cut is continued by V of its last state. Differs from the paper: the value head is linear and, unless
`value_trunk_gradient` is set, does not train the body; one optimiser step per batch unless more are asked for; gamma
may be per turn, since gamma per token makes long trajectories worthless.
"""

from __future__ import annotations

from dataclasses import dataclass

from palestra.envs.errors import ConfigError
from palestra.rl.algorithms.base import Float64, divides
from palestra.rl.algorithms.with_critic import WithCritic
from palestra.rl.objective import Objective
from palestra.rl.token_gae import DiscountPer, token_gae
from palestra.rl.valued import Bootstrap, Valued


@dataclass(frozen=True, slots=True)
class PPO(WithCritic):
    """Groups of one will do: attempts are compared with what the critic expects of them."""

    objective: Objective = Objective()
    gamma: float = 1.0
    discount_per: DiscountPer = "token"
    """What gamma counts: sampled tokens, or turns (1 inside a turn)."""
    lam: float = 0.95
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
        if not (0 < self.gamma <= 1 and 0 <= self.lam <= 1):
            raise ConfigError(f"algorithm.gamma is {self.gamma} and lam {self.lam}; use 0 < gamma <= 1, 0 <= lam <= 1")
        _ = self.critic  # refused now, not when it is made

    def _scheme(self, one: Valued) -> tuple[Float64, Float64]:
        return token_gae(one, self.gamma, self.discount_per, self.lam, self.lam)
