"""MaxRL (arXiv:2602.02710): divide by the group's mean, so that the rarest successes count most.

A_i = (r_i - mean) / mean, and 0 where the mean is 0 or less. With outcomes 0 and 1 it follows the gradient of the log
of the success rate, cut off at order G - 1: between reinforcement (G = 2) and maximum likelihood. Rewards are expected
to be 0 or more; where a group's mean is negative there is nothing to divide by, and the group teaches nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from palestra.rl.algorithms.base import (
    SPREAD,
    Credit,
    Float64,
    PerGroup,
    compares,
    per_trajectory,
    rewards_of,
    takes_no_penalties,
)
from palestra.rl.algorithms.center import centred
from palestra.rl.objective import Objective
from palestra.rollout.types import Group


@dataclass(frozen=True, slots=True)
class MaxRL(PerGroup):
    """MaxRL().advantages(rewards 1, 0, 0, 0) credits 3, -1, -1, -1."""

    objective: Objective = Objective()

    def __post_init__(self) -> None:
        takes_no_penalties("maxrl", self.objective)

    def check(self, group_size: int) -> None:
        """Raise ConfigError for groups of one."""
        compares("maxrl", group_size)

    def advantages(self, group: Group) -> Credit:
        """Relative to the mean of the valid trajectories, each counted once."""
        return per_trajectory(group, maxrl_advantages(rewards_of(group)).tolist())


def maxrl_advantages(rewards: Float64) -> Float64:
    """[G] from [G]; NaN stays NaN, constant groups and groups whose mean is not positive are exactly 0."""
    judged = ~np.isnan(rewards)
    mean = float(rewards[judged].mean()) if judged.any() else 0.0
    return centred(rewards) / mean if mean > SPREAD else np.where(judged, 0.0, np.nan)
