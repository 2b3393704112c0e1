"""The KL to the reference policy as a penalty on the reward of each sampled token (k1 in the reward).

beta * (log pi - log ref), measured before credit and detached: it flows through returns and baselines like any reward,
and its expected gradient is that of the reverse KL. Observations are in none of it: only action tokens are scored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from palestra.rl.algorithms.base import Credit, Float64
from palestra.rl.batch import Batch, pack
from palestra.rl.kl import reward_penalties
from palestra.rl.objective import Objective
from palestra.rollout.types import Float32, Group


class HasReference(Protocol):
    """The learner, as far as penalties ask."""

    def sampled_logprobs(self, batch: Batch) -> Float32: ...

    def reference_logprobs(self, batch: Batch) -> Float32:
        """As `sampled_logprobs`, of the reference policy."""
        ...


def measure_penalties(
    learner: HasReference, groups: Sequence[Group], coefficient: float, tokens_per_micro_batch: int, *, ranks: int = 1
) -> tuple[tuple[Float64 | None, ...], ...]:
    """[group][trajectory] streams of `coefficient` * (log pi - log ref), [sampled_tokens]; None without a verdict."""
    batch = everything(groups, tokens_per_micro_batch, ranks=ranks)
    penalties = reward_penalties(learner.sampled_logprobs(batch), learner.reference_logprobs(batch), coefficient)
    return as_streams(groups, batch, penalties)


def everything(groups: Sequence[Group], tokens_per_micro_batch: int, *, ranks: int = 1) -> Batch:
    """Rows of every judged trajectory, whatever its group teaches: to measure with, not to learn from."""
    credits = [
        Credit(tuple(np.ones(t.sampled_tokens) if t.valid else None for t in group.trajectories)) for group in groups
    ]
    return pack(groups, credits, tokens_per_micro_batch, Objective(), ranks=ranks)


def as_streams(groups: Sequence[Group], batch: Batch, values: Float64) -> tuple[tuple[Float64 | None, ...], ...]:
    """Values [N] in the row order of `everything(groups)`, sorted back to [group][trajectory] streams."""
    order = np.argsort(batch.actions().sample, kind="stable")  # samples are numbered in the order of the groups
    values, start = values[order], 0
    streams = []
    for group in groups:
        of_group: list[Float64 | None] = []
        for trajectory in group.trajectories:
            stop = start + (trajectory.sampled_tokens if trajectory.valid else 0)
            of_group.append(values[start:stop] if trajectory.valid else None)
            start = stop
        streams.append(tuple(of_group))
    return tuple(streams)
