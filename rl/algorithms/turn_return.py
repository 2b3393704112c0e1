"""Return to go per turn: a turn is credited with what was earned from it on, not with what came before it.

G_k = r_k + gamma G_{k+1} over turns, the outcome on the last one; A_k = G_k - b_k, where b_k is the mean of the other
attempts' return at turn k, or at their last turn where they had ended by then, or what they earned in all where they
ended before a turn. b_k knows nothing of the attempt that it is taken off, so it turns the gradient nowhere, late turns
included: with gamma 1 and token losses summed it is exact. With gamma 1 and no turn rewards this is RLOO. The discount
is per turn, as in arXiv:2512.17008, never per token: a long turn is no more distant than a short one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from palestra.rl.algorithms.base import Credit, Float64, Measured, compares
from palestra.rl.objective import Objective
from palestra.rl.returns import reward_to_go
from palestra.rl.turns import compared, credit_of, tables_of
from palestra.rollout.types import Group

Baseline = Literal["leave_one_out", "mean"]


@dataclass(frozen=True, slots=True)
class TurnReturn:
    """Rewards 0, 1 and 0, 0 of two attempts' turns, gamma 1: 1, 1 and -1, -1."""

    objective: Objective = Objective()
    gamma: float = 1.0
    """Discount per turn."""
    turn_baseline: Baseline = "leave_one_out"

    def check(self, group_size: int) -> None:
        """Raise ConfigError for groups of one."""
        compares("turn_return", group_size)

    def credit(self, groups: Sequence[Group], measured: Measured | None = None) -> list[Credit]:
        """Each group's by itself, over its judged trajectories."""
        credits = []
        for index, group in enumerate(groups):
            tables = tables_of(group, measured, index)
            judged = [table for table in tables if table is not None]
            returns = [reward_to_go(table.rewards, self.gamma) for table in judged]
            totals = [table.total for table in judged]
            credits.append(credit_of(tables, turn_return_advantages(returns, self.turn_baseline, totals)))
        return credits


def turn_return_advantages(
    returns: Sequence[Float64], baseline: Baseline, totals: Sequence[float] | None = None
) -> list[Float64]:
    """[K] from [K] for each trajectory of a group; attempts that earned the same in every turn get exactly 0.

    `totals`: what each attempt earned in all, which is what one that ended before a turn is compared with.
    """
    there = [i for i, table in enumerate(returns) if table.size or totals is not None]
    advantages = [np.zeros_like(table) for table in returns]
    for turn in range(max((table.size for table in returns), default=0)):
        at_turn = np.array([_reached(returns[i], turn, 0.0 if totals is None else totals[i]) for i in there])
        for i, value in zip(there, compared(at_turn, baseline), strict=True):
            if turn < returns[i].size:
                advantages[i][turn] = value
    return advantages


def _reached(returns: Float64, turn: int, total: float) -> float:
    """The return at a turn, at the last one where there was no such turn, and in all where there was none."""
    return float(returns[min(turn, returns.size - 1)]) if returns.size else total
