"""What the critic says of a step's states, measured before credit.

The state after a trajectory's last token, observations included, is scored by the same pass: a copy of the trajectory
is packed with one more token to predict there. Nothing predicts that token; only the hidden state before it is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from palestra.rl.algorithms.base import Credit, Float64
from palestra.rl.batch import Batch, pack
from palestra.rl.objective import Objective
from palestra.rollout.types import Float32, Group, Sample, Trajectory

Values = tuple[tuple[Float64 | None, ...], ...]
LastValues = tuple[tuple[float | None, ...], ...]


class HasValues(Protocol):
    """The learner, as far as values ask."""

    def values(self, batch: Batch) -> Float32:
        """[N] in row order: V of the state before each action token of the batch."""
        ...


def measure_values(
    learner: HasValues,
    groups: Sequence[Group],
    tokens_per_micro_batch: int,
    *,
    ranks: int = 1,
    longest: int | None = None,
) -> tuple[Values, LastValues]:
    """V before each sampled token and after the last, laid out as `Measured` wants; None without a verdict.

    `longest`: tokens of context that the policy may have; None: no bound. What an episode that filled it observed last
    may reach beyond; the state at its end is what the policy could have seen.
    """
    longer = [replace(g, trajectories=tuple(_with_end(t, longest) for t in g.trajectories)) for g in groups]
    credits = [
        Credit(tuple(np.ones(t.sampled_tokens) if t.valid and t.samples else None for t in group.trajectories))
        for group in longer
    ]
    batch = pack(longer, credits, tokens_per_micro_batch, Objective(), ranks=ranks)
    # samples are numbered in the order of the groups, and the tokens of each are in their order
    order = np.argsort(batch.actions().sample, kind="stable")
    scored = learner.values(batch).astype(np.float64)[order]
    values: list[tuple[Float64 | None, ...]] = []
    last_values: list[tuple[float | None, ...]] = []
    start = 0
    for credit in credits:
        streams: list[Float64 | None] = []
        for stream in credit.advantages:
            stop = start + (0 if stream is None else len(stream))
            streams.append(None if stream is None else scored[start:stop])
            start = stop
        values.append(tuple(None if stream is None else stream[:-1] for stream in streams))
        last_values.append(tuple(None if stream is None else float(stream[-1]) for stream in streams))
    return tuple(values), tuple(last_values)


def _with_end(trajectory: Trajectory, longest: int | None) -> Trajectory:
    """The trajectory with a token to predict behind its last one; without rows there is no state to speak of."""
    if not (trajectory.valid and trajectory.samples):
        return trajectory
    *before, last = trajectory.samples
    needed = 1 + int(np.flatnonzero(last.sampled).max(initial=-1))
    kept = slice(len(last) if longest is None else max(longest, needed))
    end = Sample(
        ids=np.append(last.ids[kept], np.int32(0)),  # unread: it is predicted, and never an input
        sampled=np.append(last.sampled[kept], True),
        logprobs=np.append(last.logprobs[kept], np.float32(0.0)),
        temperature=np.append(last.temperature[kept], np.float32(1.0)),
        version=np.append(last.version[kept], np.int32(0)),
        turn=np.append(last.turn[kept], np.int16(len(trajectory.turns))),
    )
    return replace(trajectory, samples=(*before, end))
