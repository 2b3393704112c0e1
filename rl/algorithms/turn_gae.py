"""GAE over turns (ArCHer, arXiv:2402.19446; Turn-PPO, arXiv:2512.17008): one value, one advantage per turn.

The state before a turn is valued where its first token is predicted, so V has read everything observed up to then; the
critic learns at those tokens alone. delta_k = r_k + gamma V_{k+1} - V_k over turns, the outcome on the last one, and
the turn's tokens all get A_k. An episode that a budget cut is continued by V of its last state. Differs from the
papers: the critic is a linear head on the policy's body, and advantages are whitened over the step's action tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from palestra.envs.errors import ConfigError
from palestra.rl.algorithms.base import Float64, divides
from palestra.rl.algorithms.with_critic import WithCritic
from palestra.rl.gae import gae
from palestra.rl.objective import Objective
from palestra.rl.turns import turns_of
from palestra.rl.valued import Bootstrap, Valued


@dataclass(frozen=True, slots=True)
class TurnGAE(WithCritic):
    """Groups of one will do: turns are compared with what the critic expects of them."""

    objective: Objective = Objective()
    gamma: float = 0.99
    """Discount per turn."""
    lam: float = 0.9
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
        table = turns_of(one.trajectory, one.penalties)
        first = np.unique(table.of_token, return_index=True)[1]  # [K]: where each turn begins
        advantages, targets = gae(
            table.rewards, one.values[first], gamma=self.gamma, lam=self.lam, bootstrap=one.bootstrap
        )
        returns = np.full(len(one.values), np.nan)  # nothing is asked of the critic inside a turn
        returns[first] = targets
        return table.laid_out(advantages), returns
