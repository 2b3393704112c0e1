"""RLOO (arXiv:2402.14740): each attempt is compared with the mean of the others.

A_i = r_i - mean of r_j, j != i = G / (G - 1) (r_i - mean). With token losses summed and trajectories averaged on-policy
this is exactly the policy gradient, for every group size from 2 on, and its scale does not depend on the group size.
What is left out is a whole trajectory, never one row or one token of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from palestra.rl.algorithms.base import Credit, Float64, PerGroup, compares, constant, per_trajectory, rewards_of
from palestra.rl.objective import Objective
from palestra.rollout.types import Group


@dataclass(frozen=True, slots=True)
class RLOO(PerGroup):
    """The default. RLOO().advantages(rewards 1, 0, 0.5) credits 0.75, -0.75, 0."""

    objective: Objective = Objective()

    def check(self, group_size: int) -> None:
        """Raise ConfigError for groups of one."""
        compares("rloo", group_size)

    def advantages(self, group: Group) -> Credit:
        """Leave-one-out advantages over the valid trajectories, each counted once."""
        return per_trajectory(group, rloo_advantages(rewards_of(group)).tolist())


def rloo_advantages(rewards: Float64) -> Float64:
    """[G] from [G]; NaN stays NaN, constant groups and single valid members are exactly 0."""
    valid = rewards[~np.isnan(rewards)]
    if constant(valid):
        return np.where(np.isnan(rewards), np.nan, 0.0)
    centred: Float64 = rewards - float(valid.mean())
    return centred * float(valid.size / (valid.size - 1))
