"""Outcome and turn reward side by side (MT-GRPO, arXiv:2505.11821).

The outcome and the reward of each of the first turns are normalised over the group by themselves, so that neither
rescales the other: A_k = A_turn(k) + lambda A_outcome for the first `credited_turns` turns, A_outcome for later ones.
The paper has two turns, the first of which earns its own reward; `credited_turns` is how many do. Differs from it:
statistics in float64 over judged attempts, those that have the turn; all alike, or one alone: exactly 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from palestra.envs.errors import ConfigError
from palestra.rl.algorithms.base import Credit, Float64, Measured, compares, divides
from palestra.rl.algorithms.grpo import grpo_advantages
from palestra.rl.objective import Objective
from palestra.rl.turns import credit_of, tables_of
from palestra.rollout.types import Group

Std = Literal["group", "none"]


@dataclass(frozen=True, slots=True)
class OutcomeTurn:
    """Needs an environment that rewards turns; without turn rewards the first turns get lambda of the outcome's."""

    objective: Objective = Objective()
    outcome_weight: float = 0.5
    """lambda: of the outcome's advantage in turns that are credited with their own reward as well."""
    credited_turns: int = 1
    std: Std = "group"
    ddof: int = 1
    eps: float = 1e-6

    def __post_init__(self) -> None:
        divides(self.ddof, self.eps)
        if self.std not in ("group", "none"):
            raise ConfigError(f'algorithm.std is "{self.std}", but outcome_turn knows "group" and "none"')

    def check(self, group_size: int) -> None:
        """Raise ConfigError for groups of one."""
        compares("outcome_turn", group_size)

    def credit(self, groups: Sequence[Group], measured: Measured | None = None) -> list[Credit]:
        """Each group's by itself. A KL in the reward counts as a part of the outcome."""
        credits = []
        for index, group in enumerate(groups):
            tables = tables_of(group, measured, index)
            judged = [(table, t) for table, t in zip(tables, group.trajectories, strict=True) if table is not None]
            own = [np.array([turn.reward for turn in trajectory.turns]) for _, trajectory in judged]
            outcomes = np.array([table.total - float(mine.sum()) for (table, _), mine in zip(judged, own, strict=True)])
            credits.append(credit_of(tables, self.advantages(outcomes, own)))
        return credits

    def advantages(self, outcomes: Float64, turn_rewards: Sequence[Float64]) -> list[Float64]:
        """[K] for each trajectory, from its outcome [G] and its turns' own rewards [K]."""
        of_outcome = grpo_advantages(outcomes, self.std, self.ddof, self.eps)
        found = [np.full(own.size, value) for own, value in zip(turn_rewards, of_outcome, strict=True)]
        for turn in range(self.credited_turns):
            there = [i for i, own in enumerate(turn_rewards) if own.size > turn]
            at_turn = np.array([turn_rewards[i][turn] for i in there])
            for i, value in zip(there, grpo_advantages(at_turn, self.std, self.ddof, self.eps), strict=True):
                found[i][turn] = value + self.outcome_weight * of_outcome[i]
        return found
