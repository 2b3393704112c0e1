"""GRPO (arXiv:2402.03300): centre on the group's mean and divide by a spread.

The group's own spread re-weights tasks by 1 / std, so it is not an unbiased gradient: easy and hard tasks count up to
several times as much as medium ones. Use it as a curriculum. The spread of all rewards of the step (arXiv:2508.08221)
divides every task by the same number, and `std="none"` by none. Differs from the paper: statistics in float64 over
valid trajectories, constant groups exactly 0 whatever `eps`, and the objective is this project's default (token-mean,
separate clip bounds) unless another is given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from palestra.rl.algorithms.base import (
    Credit,
    Float64,
    Measured,
    compares,
    constant,
    divides,
    penalised,
    per_trajectory,
    rewards_of,
)
from palestra.rl.algorithms.center import centred
from palestra.rl.objective import Objective
from palestra.rollout.types import Group

Std = Literal["group", "batch", "none"]


@dataclass(frozen=True, slots=True)
class GRPO:
    """A_i = (r_i - mean) / (std + eps). GRPO().advantages(rewards 1, 0, 0, 1) credits +-0.866."""

    objective: Objective = Objective()
    std: Std = "group"
    ddof: int = 1
    """Degrees of freedom taken from the number of rewards in their variance: 1 (sample) or 0 (population)."""
    eps: float = 1e-6
    """Added to the standard deviation."""

    def __post_init__(self) -> None:
        divides(self.ddof, self.eps)

    def check(self, group_size: int) -> None:
        """Raise ConfigError for groups of one."""
        compares("grpo", group_size)

    def advantages(self, group: Group) -> Credit:
        """The credit of a step of this one group."""
        return self.credit([group])[0]

    def credit(self, groups: Sequence[Group], measured: Measured | None = None) -> list[Credit]:
        """Normalised advantages over the valid trajectories, each counted once."""
        groups = penalised(groups, measured)
        values = grpo_step([rewards_of(group) for group in groups], self.std, self.ddof, self.eps)
        return [per_trajectory(group, value.tolist()) for group, value in zip(groups, values, strict=True)]


def grpo_step(rewards: Sequence[Float64], std: Std, ddof: int, eps: float) -> list[Float64]:
    """[G] from [G] for each group of a step; with "batch" the spread is of all their rewards together."""
    if std != "batch":
        return [grpo_advantages(group, std, ddof, eps) for group in rewards]
    if not rewards:
        return []
    everything = np.concatenate([group[~np.isnan(group)] for group in rewards])
    if constant(everything):
        return [centred(group) for group in rewards]  # exactly 0, each of them
    spread = float(everything.std(ddof=ddof)) + eps
    return [centred(group) / spread for group in rewards]


def grpo_advantages(rewards: Float64, std: Literal["group", "none"], ddof: int, eps: float) -> Float64:
    """[G] from [G]; NaN stays NaN, constant groups and single valid members are exactly 0."""
    valid = rewards[~np.isnan(rewards)]
    if std == "none" or constant(valid):
        return centred(rewards)
    return centred(rewards) / (float(valid.std(ddof=ddof)) + eps)
