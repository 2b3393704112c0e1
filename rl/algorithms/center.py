"""Centre only: each attempt is compared with the mean of its group, itself included.

A_i = r_i - mean = (G - 1) / G of RLOO (arXiv:2402.14740), so the same direction with a scale that grows with the group
size. What Dr. GRPO (arXiv:2503.20783) does to advantages, without its constant normaliser.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from palestra.rl.algorithms.base import Credit, Float64, PerGroup, compares, constant, per_trajectory, rewards_of
from palestra.rl.objective import Objective
from palestra.rollout.types import Group


@dataclass(frozen=True, slots=True)
class Center(PerGroup):
    """Center().advantages(rewards 1, 0, 0.5) credits 0.5, -0.5, 0."""

    objective: Objective = Objective()

    def check(self, group_size: int) -> None:
        """Raise ConfigError for groups of one."""
        compares("center", group_size)

    def advantages(self, group: Group) -> Credit:
        """Centred advantages over the valid trajectories, each counted once."""
        return per_trajectory(group, centred(rewards_of(group)).tolist())


def centred(rewards: Float64) -> Float64:
    """[G] from [G]; NaN stays NaN, constant groups and single valid members are exactly 0."""
    valid = rewards[~np.isnan(rewards)]
    if constant(valid):
        return np.where(np.isnan(rewards), np.nan, 0.0)
    result: Float64 = rewards - float(valid.mean())
    return result
