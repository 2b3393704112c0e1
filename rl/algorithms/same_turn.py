"""Return to go per turn, compared with that of the other attempts at the same turn.

A_k = G_k - mean of the others' G_k, over the trajectories of the group that have a turn k: they are alike in how far
they have come, so less of the spread between early and late turns is left in the advantage than with one baseline for
all turns. A turn that only one attempt has reached is compared with nobody, and gets exactly 0. Several
implementations use such a baseline (arXiv:2512.17008 has one discount per turn as here); a lone turn with its raw
return is the usual fault.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from palestra.rl.algorithms.base import Credit, Float64, Measured, compares
from palestra.rl.algorithms.turn_return import Baseline
from palestra.rl.objective import Objective
from palestra.rl.returns import reward_to_go
from palestra.rl.turns import compared, credit_of, tables_of
from palestra.rollout.types import Group


@dataclass(frozen=True, slots=True)
class SameTurn:
    """Returns 0.8, 1 and 0.2 of two attempts' turns: 0.6, 0 and -0.6."""

    objective: Objective = Objective()
    gamma: float = 1.0
    """Discount per turn."""
    turn_baseline: Baseline = "leave_one_out"

    def check(self, group_size: int) -> None:
        """Raise ConfigError for groups of one."""
        compares("same_turn_baseline", group_size)

    def credit(self, groups: Sequence[Group], measured: Measured | None = None) -> list[Credit]:
        """Each group's by itself, over its judged trajectories."""
        credits = []
        for index, group in enumerate(groups):
            tables = tables_of(group, measured, index)
            returns = [reward_to_go(table.rewards, self.gamma) for table in tables if table is not None]
            credits.append(credit_of(tables, same_turn_advantages(returns, self.turn_baseline)))
        return credits


def same_turn_advantages(returns: Sequence[Float64], baseline: Baseline) -> list[Float64]:
    """[K] from [K] for each trajectory of a group."""
    advantages = [np.zeros_like(table) for table in returns]
    for turn in range(max((table.size for table in returns), default=0)):
        there = [i for i, table in enumerate(returns) if table.size > turn]
        at_turn = compared(np.array([returns[i][turn] for i in there]), baseline)
        for i, value in zip(there, at_turn, strict=True):
            advantages[i][turn] = value
    return advantages
