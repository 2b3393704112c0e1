"""Leave-one-out mean and spread: each attempt is measured against the other attempts alone (NeMo-RL's option for GRPO).

A_i = (r_i - mean of the others) / (std of the others + eps), and not divided where the others are all the same. A lone
success among failures keeps 1, where GRPO (arXiv:2402.03300) gives it 2.47 in eight. Differs from its source: the
spread test is on the rewards themselves and statistics are in float64. A float32 E[x^2] - E[x]^2 leaves a residue where
the others are equal, and dividing by it turns 0.7 into thousands.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from palestra.rl.algorithms.base import (
    Credit,
    Float64,
    PerGroup,
    compares,
    constant,
    divides,
    per_trajectory,
    rewards_of,
)
from palestra.rl.objective import Objective
from palestra.rollout.types import Group


@dataclass(frozen=True, slots=True)
class LooStd(PerGroup):
    """LooStd().advantages(rewards 1, 0, 0, 0) credits 1, and -0.577 to each failure."""

    objective: Objective = Objective()
    ddof: int = 1
    """Degrees of freedom taken from the number of the others in their variance."""
    eps: float = 1e-6
    """Added to the standard deviation."""

    def __post_init__(self) -> None:
        divides(self.ddof, self.eps)

    def check(self, group_size: int) -> None:
        """Raise ConfigError for groups of one."""
        compares("loo_std", group_size)

    def advantages(self, group: Group) -> Credit:
        """Against the valid others, each trajectory counted once."""
        return per_trajectory(group, loo_std_advantages(rewards_of(group), self.ddof, self.eps).tolist())


def loo_std_advantages(rewards: Float64, ddof: int, eps: float) -> Float64:
    """[G] from [G]; NaN stays NaN, constant groups and single valid members are exactly 0."""
    valid = rewards[~np.isnan(rewards)]
    if constant(valid):
        return np.where(np.isnan(rewards), np.nan, 0.0)
    result = np.full(rewards.shape, np.nan)
    for place, index in enumerate(np.flatnonzero(~np.isnan(rewards))):
        others = np.delete(valid, place)
        gain = float(rewards[index]) - float(others.mean())
        result[index] = gain if constant(others) else gain / (float(others.std(ddof=ddof)) + eps)
    return result
