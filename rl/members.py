"""One sample as a member of a packed row: its ids, where its action tokens are predicted, and those tokens gathered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from palestra.envs.errors import IntegrityError
from palestra.rollout.types import Sample

Int = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Actions:
    """Gathered action tokens, [N] each. turn, sample, trajectory and group say which tokens belong together."""

    targets: NDArray[np.int64]  # the sampled ids
    sampling_logprobs: NDArray[np.float32]  # of the policy that sampled, tempered
    temperature: NDArray[np.float32]
    version: Int  # of the weights that sampled
    turn: Int  # within the trajectory
    sample: Int  # numbered over the batch
    trajectory: Int  # numbered over the batch
    group: Int  # numbered over the batch
    advantages: NDArray[np.float64]
    weights: NDArray[np.float64]  # w of the weight path, for the whole optimiser step
    returns: NDArray[np.float64]  # what a critic should have said; NaN: nothing is asked of it here
    old_values: NDArray[np.float64]  # what it did say when the batch was frozen
    value_weights: NDArray[np.float64]  # as `weights`, counted over the tokens that have a return

    def __len__(self) -> int:
        return len(self.targets)


@dataclass(frozen=True, slots=True)
class Streams:
    """What tokens are credited with, [n] float64 each; NaN in the critic's where it is not asked."""

    advantages: NDArray[np.float64]
    returns: NDArray[np.float64]
    old_values: NDArray[np.float64]

    def part(self, start: int, stop: int) -> Streams:
        """Those of the tokens from `start` to `stop`."""
        return Streams(self.advantages[start:stop], self.returns[start:stop], self.old_values[start:stop])


@dataclass(frozen=True, slots=True)
class Member:
    """One sample, cut after its last predictor: ids [L] int64, predictors [N] int64 into ids, actions [N]."""

    ids: NDArray[np.int64]
    predictors: NDArray[np.int64]
    actions: Actions
    trained: bool


@dataclass(frozen=True, slots=True)
class Numbers:
    """Who a member belongs to, numbered over the batch."""

    sample: int
    trajectory: int
    group: int
    trained: bool  # False: it only counts in the denominators


def member_of(sample: Sample, streams: Streams, numbers: Numbers, name: str) -> Member:
    """A sample with at least one sampled token; `streams` have one value for each of them.

    Raises IntegrityError, calling the sample by `name`, when a token cannot be trained on.
    """
    where = np.flatnonzero(sample.sampled)
    if where[0] == 0:
        raise IntegrityError(f"{name}: token 0 is sampled, but nothing stands before it to predict it")
    logprobs, temperature = sample.logprobs[where], sample.temperature[where]
    bad = ~(np.isfinite(logprobs) & np.isfinite(temperature) & (temperature > 0))
    if bad.any():
        first = int(np.argmax(bad))
        raise IntegrityError(
            f"{name}, token {where[first]}: log-probability {logprobs[first]} at temperature "
            f" {temperature[first]}; the engine must report both, finite, for each token that it samples, "
            "and training rollouts need a temperature above 0"
        )
    zeros = np.zeros(len(where), np.int32)
    actions = Actions(
        targets=sample.ids[where].astype(np.int64),
        sampling_logprobs=logprobs,
        temperature=temperature,
        version=sample.version[where],
        turn=sample.turn[where].astype(np.int32),
        sample=zeros + np.int32(numbers.sample),
        trajectory=zeros + np.int32(numbers.trajectory),
        group=zeros + np.int32(numbers.group),
        advantages=streams.advantages,
        weights=np.zeros(len(where)),
        returns=streams.returns,
        old_values=streams.old_values,
        value_weights=np.zeros(len(where)),
    )
    # what follows the last predictor predicts nothing that is trained: the last sampled token included
    return Member(sample.ids[: where[-1]].astype(np.int64), where - 1, actions, numbers.trained)


def join_actions(parts: Sequence[Actions]) -> Actions:
    """Concatenate in order; of nothing, empty arrays."""
    if not parts:
        return _no_actions()
    return Actions(*(np.concatenate([getattr(part, f.name) for part in parts]) for f in fields(Actions)))


def _no_actions() -> Actions:
    index, number = np.zeros(0, np.int32), np.zeros(0, np.float32)
    none = np.zeros(0, np.float64)
    ids = np.zeros(0, np.int64)
    return Actions(ids, number, number, index, index, index, index, index, none, none, none, none, none)
