"""Trajectories with turns for the tests of credit per turn and with a critic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from learning_support import sample, trajectory
from palestra.rollout.types import Finish, TerminatedBy, Trajectory, Turn


def turn(index: int, tokens: int, reward: float = 0.0, state: str | None = None) -> Turn:
    """A decision of `tokens` sampled tokens in row 0."""
    return Turn(index, 0, 1, tokens, Finish.STOP, "", (), 1, 0.0, 0.0, reward=reward, state=state)


def played(
    name: str,
    lengths: Sequence[int],
    reward: float | None,
    *,
    rewards: Sequence[float] | None = None,
    states: Sequence[str | None] | None = None,
    ended: TerminatedBy = TerminatedBy.DONE,
) -> Trajectory:
    """An episode of turns of these lengths, an observed token before each of them."""
    mask, turns = [], []
    for index, length in enumerate(lengths):
        mask += [0] + [1] * length
        turns += [-1] + [index] * length
    made = trajectory(name, [sample([5] * len(mask), mask, turn=turns)] if mask else [], reward)
    rows = zip(lengths, rewards or [0.0] * len(lengths), states or [None] * len(lengths), strict=True)
    return _with(made, tuple(turn(i, *row) for i, row in enumerate(rows)), ended)


def of_mask(name: str, mask: Sequence[int], reward: float, ended: TerminatedBy = TerminatedBy.DONE) -> Trajectory:
    """An episode whose turns are the spans of sampled tokens of `mask`, behind a prompt of one token."""
    turns, index = [], -1
    for at, sampled in enumerate(mask):
        index += int(sampled and (at == 0 or not mask[at - 1]))
        turns.append(index if sampled else -1)
    made = trajectory(name, [sample([5] * (len(mask) + 1), [0, *mask], turn=[-1, *turns])], reward)
    lengths = np.bincount([t for t in turns if t >= 0]).tolist()
    return _with(made, tuple(turn(i, length) for i, length in enumerate(lengths)), ended)


def _with(made: Trajectory, turns: tuple[Turn, ...], ended: TerminatedBy) -> Trajectory:
    return replace(made, turns=turns, terminated_by=ended)
