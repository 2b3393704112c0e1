"""Dr. GRPO (arXiv:2503.20783): GRPO without the division by the spread and without the division by length.

A_i = r_i - mean; token losses are summed, divided by one constant (the generation budget) and averaged over
trajectories. That is (G - 1) / G of RLOO, so a gradient without bias in its direction.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from palestra.rl.aggregation import Aggregation
from palestra.rl.algorithms.base import Credit, PerGroup, compares, per_trajectory, rewards_of
from palestra.rl.algorithms.grpo import grpo_advantages
from palestra.rl.objective import Objective
from palestra.rollout.types import Group


@dataclass(frozen=True, slots=True)
class DrGRPO(PerGroup):
    """`objective.aggregation` is the constant normaliser; `with_horizon` sets its constant."""

    objective: Objective

    @classmethod
    def with_horizon(cls, horizon: int, objective: Objective | None = None) -> DrGRPO:
        """`horizon`: tokens that a trajectory may sample at most, the constant that losses are divided by."""
        norm = Aggregation("seq-mean-token-sum-norm", horizon)
        return cls(replace(objective or Objective(), aggregation=norm))

    def check(self, group_size: int) -> None:
        """Raise ConfigError for groups of one."""
        compares("dr_grpo", group_size)

    def advantages(self, group: Group) -> Credit:
        """Centred advantages over the valid trajectories, each counted once."""
        return per_trajectory(group, grpo_advantages(rewards_of(group), "none", 1, 0.0).tolist())
