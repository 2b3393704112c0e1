"""OPO (arXiv:2505.23585): the baseline of least variance, if a gradient is as large as its trajectory is long.

A_i = r_i - sum_j l_j r_j / sum_j l_j, where l is the number of tokens that the policy sampled. Differs from the paper:
the objective is this project's default unless another is given (the paper is exactly on-policy: one update per batch,
which is the default here, and no KL). It is not RLOO with other weights: the attempt itself is in its baseline.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from palestra.rl.algorithms.base import Credit, Float64, PerGroup, compares, constant, per_trajectory, rewards_of
from palestra.rl.objective import Objective
from palestra.rollout.types import Group


@dataclass(frozen=True, slots=True)
class OPO(PerGroup):
    """OPO().advantages(rewards 1, 0 of 3 and 1 tokens) credits 0.25, -0.75."""

    objective: Objective = Objective()

    def check(self, group_size: int) -> None:
        """Raise ConfigError for groups of one."""
        compares("opo", group_size)

    def advantages(self, group: Group) -> Credit:
        """Against the length-weighted mean of the valid trajectories."""
        lengths = np.array([trajectory.sampled_tokens for trajectory in group.trajectories], dtype=np.float64)
        return per_trajectory(group, opo_advantages(rewards_of(group), lengths).tolist())


def opo_advantages(rewards: Float64, lengths: Float64) -> Float64:
    """[G] from [G] rewards and [G] lengths in sampled tokens; NaN stays NaN, constant groups are exactly 0."""
    judged = ~np.isnan(rewards)
    total = float(lengths[judged].sum())
    if constant(rewards[judged]) or not total:
        return np.where(judged, 0.0, np.nan)
    result: Float64 = rewards - float(rewards[judged] @ lengths[judged]) / total
    return result
