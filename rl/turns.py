"""A trajectory as a table of turns: which tokens are of which turn, and what each turn earned.

Advantages of turn-level algorithms are computed on the table, one number per turn, and laid out over the turn's tokens.
Time is counted in turns: what is discounted is discounted once per turn, however many tokens it took.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from palestra.envs.errors import IntegrityError
from palestra.rl.algorithms.base import Credit, Float64, Measured, constant
from palestra.rl.gae import conserve
from palestra.rollout.types import Group, Trajectory


@dataclass(frozen=True, slots=True)
class Turns:
    """The K turns of a judged trajectory.

    of_token [sampled_tokens]: the turn of each token, from 0 to K - 1, in the order in which credit is laid out;
    rewards [K]: what each turn earned; the outcome is on the last one. states: the digest before each turn's action.
    total: what the episode earned in all, the sum of `rewards`; where it ended before a turn (K = 0), its outcome.
    """

    of_token: NDArray[np.int64]
    rewards: Float64
    states: tuple[str | None, ...]
    total: float

    def __len__(self) -> int:
        return len(self.states)

    def laid_out(self, per_turn: Float64) -> Float64:
        """[sampled_tokens] from [K]."""
        return per_turn[self.of_token]

    def summed(self, per_token: Float64) -> Float64:
        """[K] from [sampled_tokens]."""
        return np.bincount(self.of_token, per_token, len(self)).astype(np.float64)


def token_turns(trajectory: Trajectory) -> NDArray[np.int64]:
    """[sampled_tokens]: the turn that each sampled token says it is of."""
    parts = [sample.turn[sample.sampled] for sample in trajectory.samples]
    return np.concatenate(parts).astype(np.int64) if parts else np.zeros(0, np.int64)


def turns_of(trajectory: Trajectory, penalties: Float64 | None = None) -> Turns:
    """The table of a judged trajectory; `penalties` [sampled_tokens] are taken off what the turns earned.

    Raises IntegrityError when its turns and its tokens tell of different turns.
    """
    of_token = token_turns(trajectory)
    counted = np.bincount(of_token[of_token >= 0], minlength=len(trajectory.turns))
    told = [turn.sampled_tokens for turn in trajectory.turns]
    if (
        (of_token < 0).any()
        or [turn.index for turn in trajectory.turns] != list(range(len(told)))
        or (counted.tolist() != told)
    ):
        raise IntegrityError(
            f"trajectory {trajectory.id}: its turns tell of {told} sampled tokens, its rows of {counted.tolist()}; "
            "credit per turn needs both to agree"
        )
    rewards = np.array([turn.reward for turn in trajectory.turns], np.float64)
    outcome = float(trajectory.reward or 0.0)
    total = outcome + sum(turn.reward for turn in trajectory.turns)
    if penalties is not None:
        total -= float(penalties.sum())
    table = Turns(of_token, rewards, tuple(turn.state for turn in trajectory.turns), total)
    if not len(table):
        return table
    rewards[-1] += outcome
    if penalties is not None:
        rewards -= table.summed(penalties)
    conserve(rewards, total, f"trajectory {trajectory.id}")
    return table


def tables_of(group: Group, measured: Measured | None, index: int) -> list[Turns | None]:
    """The table of each trajectory of the step's group number `index`; None for one without a verdict."""
    nobody: tuple[None, ...] = (None,) * len(group.trajectories)
    penalties = nobody if measured is None or measured.penalties is None else measured.penalties[index]
    return [
        None if trajectory.reward is None else turns_of(trajectory, penalty)
        for trajectory, penalty in zip(group.trajectories, penalties, strict=True)
    ]


def credit_of(tables: Sequence[Turns | None], advantages: Sequence[Float64]) -> Credit:
    """One group's credit from the advantages [K] of each table that is there, in order."""
    ahead = iter(advantages)
    return Credit(tuple(None if table is None else table.laid_out(next(ahead)) for table in tables))


def compared(values: Float64, baseline: str) -> Float64:
    """Values minus their mean, or minus that of the others ("leave_one_out"); one alone, or all alike: exactly 0."""
    if constant(values):
        return np.zeros_like(values)
    centred: Float64 = values - float(values.mean())
    return centred * (values.size / (values.size - 1)) if baseline == "leave_one_out" else centred
