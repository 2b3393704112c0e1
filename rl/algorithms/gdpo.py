"""GDPO (arXiv:2601.05242): several objectives, each normalised in its group before they are added up.

A verdict's parts are the objectives, under their names. Of each, A_k = (r_k - mean) / (std + eps) in the group; then
the weighted sum over objectives; then minus the mean over all trajectories of the step, and over their spread. Adding
first and normalising afterwards, as GRPO does, gives the same advantage to different mixtures of parts. Differs from
the paper: statistics in float64 over valid trajectories; a group in which no objective differs stays exactly 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from palestra.envs.errors import ConfigError, IntegrityError
from palestra.envs.types import Scored
from palestra.rl.algorithms.base import (
    Credit,
    Float64,
    Measured,
    compares,
    constant,
    divides,
    per_trajectory,
    takes_no_penalties,
)
from palestra.rl.algorithms.grpo import grpo_advantages
from palestra.rl.objective import Objective
from palestra.rollout.types import Group


@dataclass(frozen=True, slots=True)
class GDPO:
    """GDPO(objectives={"correct": 1.0, "brief": 0.5}). The value of the verdict itself is not looked at."""

    objective: Objective = Objective()
    objectives: Mapping[str, float] = field(default_factory=dict)
    """Weight of each part of a verdict, by its name."""
    ddof: int = 1
    """Degrees of freedom taken from the number of rewards in their variance: 1 (sample) or 0 (population)."""
    eps: float = 1e-4
    """Added to each standard deviation."""

    def __post_init__(self) -> None:
        divides(self.ddof, self.eps)
        takes_no_penalties("gdpo", self.objective)
        if not self.objectives or not all(np.isfinite(weight) for weight in self.objectives.values()):
            raise ConfigError(
                f"algorithm.objectives is {dict(self.objectives)}; gdpo needs the parts of a verdict that it should "
                "learn from, with finite weights: objectives = { correct = 1.0, brief = 0.5 }"
            )

    def check(self, group_size: int) -> None:
        """Raise ConfigError for groups of one."""
        compares("gdpo", group_size)

    def credit(self, groups: Sequence[Group], measured: Measured | None = None) -> list[Credit]:
        """Over the valid trajectories. Raises ConfigError when a verdict lacks an objective."""
        parts = [_parts(group, self.objectives) for group in groups]
        values = gdpo_advantages(parts, list(self.objectives.values()), self.ddof, self.eps)
        return [per_trajectory(group, value.tolist()) for group, value in zip(groups, values, strict=True)]


def gdpo_advantages(groups: Sequence[Float64], weights: Sequence[float], ddof: int, eps: float) -> list[Float64]:
    """[G] of each group from its [G, objectives]; a row of NaN stays NaN, groups without any difference exactly 0."""
    sums = [
        sum(
            (weight * grpo_advantages(parts[:, k], "group", ddof, eps) for k, weight in enumerate(weights)),
            start=np.zeros(len(parts)),
        )
        for parts in groups
    ]
    if not sums:
        return []
    everything = np.concatenate([total[~np.isnan(total)] for total in sums])
    if constant(everything):
        return [np.where(np.isnan(total), np.nan, 0.0) for total in sums]
    mean, spread = float(everything.mean()), float(everything.std(ddof=ddof)) + eps
    # an all-zero group is one that cannot be compared, and the mean of the others is no reason to push it
    return [(total - mean) / spread if np.nan_to_num(total).any() else total for total in sums]


def _parts(group: Group, objectives: Mapping[str, float]) -> Float64:
    """[G, objectives]; a row of NaN for a trajectory without a verdict."""
    table = np.full((len(group.trajectories), len(objectives)), np.nan)
    for row, trajectory in zip(table, group.trajectories, strict=True):
        if not isinstance(trajectory.verdict, Scored):
            continue
        found = trajectory.verdict.parts
        if missing := sorted(objectives.keys() - found.keys()):
            raise ConfigError(
                f"algorithm.objectives names {missing[0]!r}, but the verdict of trajectory {trajectory.id} has "
                f"{', '.join(sorted(found)) or 'no parts'}; name parts that the verifier gives to every episode"
            )
        row[:] = [found[name] for name in objectives]
        if not np.isfinite(row).all():
            raise IntegrityError(f"trajectory {trajectory.id}: the verdict has parts {dict(found)}; all must be finite")
    return table
