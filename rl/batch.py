"""From groups to packed rows: what one optimiser step learns from, as flat arrays.

A member is one sample, cut after its last predictor. A row holds members one after the other, without padding. Action
tokens are gathered once, here: later code never sees an observation's log-probability, temperature or version, so the
poison (NaN) that stands there cannot reach any arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from palestra.envs.errors import IntegrityError
from palestra.rl.aggregation import Aggregation, token_weights
from palestra.rl.algorithms.base import Credit
from palestra.rl.members import Actions, Member, Numbers, Streams, join_actions, member_of
from palestra.rl.objective import Objective
from palestra.rl.planning import Piece, plan_rows
from palestra.rl.tree import SHORTEST_SHARED, common_prefix, plant
from palestra.rollout.types import Group, Trajectory


@dataclass(frozen=True, slots=True)
class PackedRow:
    """One micro-batch: samples laid out so that what several of them begin with stands once.

    "abcd" and "xyz": boundaries 0 4 7, parents -1 -1, positions 0 1 2 3 0 1 2. "abcd" and "abxy", shared: ids abcdxy,
    boundaries 0 2 4 6, parents -1 0 0, positions 0 1 2 3 2 3.
    ids, positions [T] int64; boundaries [segments + 1] int32, from 0 to T; parents [segments] int32: a token sees its
    own segment up to itself and the segments above, and nothing else.
    predictors [N] int64: where in the row the hidden state stands that predicts action token n of `actions`. Samples
    that share an action token share the place; each has its own entry, with its own credit.
    """

    ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    boundaries: NDArray[np.int32]
    parents: NDArray[np.int32]
    predictors: NDArray[np.int64]
    actions: Actions

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True)
class Accounting:
    """Where every sampled token of the step went: `trained + without_signal + invalid == sampled`, always."""

    sampled_tokens: int
    trained_tokens: int
    tokens_without_signal: int  # in groups whose outcomes teach nothing; dropped before the forward
    invalid_tokens: int  # of trajectories without a verdict
    trained_trajectories: int
    invalid_trajectories: int
    groups: int
    groups_without_signal: int


@dataclass(frozen=True, slots=True)
class Batch:
    """What one optimiser step learns from: all rows of all ranks. Action tokens are numbered in row order."""

    rows: tuple[PackedRow, ...]
    accounting: Accounting
    trajectory_ids: tuple[str, ...]  # what Actions.trajectory indexes
    group_ids: tuple[str, ...]  # what Actions.group indexes

    @property
    def num_actions(self) -> int:
        """Action tokens of the step; 0: nothing to learn, so no update and no new version."""
        return sum(len(row.predictors) for row in self.rows)

    @property
    def num_tokens(self) -> int:
        """Tokens that go through the model's body."""
        return sum(len(row) for row in self.rows)

    def actions(self) -> Actions:
        """All action tokens in row order."""
        return join_actions([row.actions for row in self.rows])


def pack(
    groups: Sequence[Group],
    credits: Sequence[Credit],
    tokens_per_micro_batch: int,
    objective: Objective,
    *,
    ranks: int = 1,
    share_prefixes: bool = True,
) -> Batch:
    """Groups and their credit to packed rows, with each action token's weight for the whole optimiser step.

    All samples of a trajectory are in one row; what samples of a row begin with stands there once, unless
    `share_prefixes` is off, which changes no result.

    Groups without signal are dropped before the forward, unless the objective learns from them (KL, entropy); whether
    they count in the denominators is the aggregation's `count_without_signal`. Raises IntegrityError when a sampled
    token has no finite log-probability or temperature.
    """
    kept = [credit.signal or objective.learns_without_signal for credit in credits]
    members: list[Member] = []
    trajectory_ids: list[str] = []
    group_ids: list[str] = []
    for group, credit, keep in zip(groups, credits, kept, strict=True):
        if not (keep or objective.aggregation.count_without_signal):
            continue
        group_ids.append(group.id)
        for trajectory, stream in zip(group.trajectories, _streams(credit), strict=True):
            if stream is None:
                continue
            trajectory_ids.append(trajectory.id)
            first = Numbers(len(members), len(trajectory_ids) - 1, len(group_ids) - 1, trained=keep)
            members += _members(trajectory, stream, first)
    trained = [member for member in _weighed(members, objective.aggregation) if member.trained]
    accounting = _account(groups, credits, kept)
    if accounting.trained_tokens != sum(len(member.predictors) for member in trained):
        raise IntegrityError("token accounting does not add up: some sampled tokens are in no row and no dropped group")
    by_trajectory = _by_trajectory(trained)
    plan = plan_rows(_pieces(by_trajectory, share_prefixes), tokens_per_micro_batch, multiple_of=ranks)
    rows = tuple(_row([member for i in row for member in by_trajectory[i]], share_prefixes) for row in plan)
    return Batch(rows, accounting, tuple(trajectory_ids), tuple(group_ids))


def _weighed(members: Sequence[Member], how: Aggregation) -> list[Member]:
    """The members with the weights of their tokens, which are counted over all of them."""
    everything = join_actions([member.actions for member in members])
    weights = token_weights(how, everything.sample, everything.trajectory, everything.group)
    of_critic = np.zeros_like(weights)
    asked = np.isfinite(everything.returns)
    of_critic[asked] = token_weights(
        how, *(x[asked] for x in (everything.sample, everything.trajectory, everything.group))
    )
    ends = np.cumsum([len(member.predictors) for member in members])[:-1]
    shares = zip(members, np.split(weights, ends), np.split(of_critic, ends), strict=True) if members else ()
    return [
        replace(member, actions=replace(member.actions, weights=share, value_weights=value_share))
        for member, share, value_share in shares
    ]


def _streams(credit: Credit) -> list[Streams | None]:
    """Of each trajectory of a group; None for one that is in no loss."""
    nobody: tuple[None, ...] = (None,) * len(credit.advantages)
    rows = zip(credit.advantages, credit.returns or nobody, credit.values or nobody, strict=True)
    made: list[Streams | None] = []
    for advantages, returns, values in rows:
        if advantages is None:
            made.append(None)
            continue
        unasked = np.full(len(advantages), np.nan)
        made.append(Streams(advantages, unasked if returns is None else returns, unasked if values is None else values))
    return made


def _by_trajectory(members: Sequence[Member]) -> list[list[Member]]:
    found: dict[int, list[Member]] = {}
    for member in members:
        found.setdefault(int(member.actions.trajectory[0]), []).append(member)
    return list(found.values())


def _pieces(trajectories: Sequence[Sequence[Member]], share: bool) -> list[Piece]:
    """What each trajectory comes to in a row, and what it has in common with all others of its group."""
    shortest = SHORTEST_SHARED if share else None
    alone = [plant([member.ids for member in members], shortest=shortest) for members in trajectories]
    groups = [int(members[0].actions.group[0]) for members in trajectories]
    shared: dict[int, int] = {}
    for group in set(groups) if share else ():
        starts = [members[0].ids for members, its in zip(trajectories, groups, strict=True) if its == group]
        shared[group] = min((common_prefix(starts[0], ids) for ids in starts[1:]), default=0)
    return [
        Piece(
            len(forest.ids), forest.pairs, group, shared.get(group, 0) if shared.get(group, 0) >= (shortest or 0) else 0
        )
        for forest, group in zip(alone, groups, strict=True)
    ]


def row_of_ids(ids: Sequence[int]) -> PackedRow:
    """A row of one member, in which every token but the first is scored at temperature 1. Not for training."""
    num = len(ids) - 1
    nobody, nothing = np.zeros(num, np.int32), np.zeros(num)
    actions = Actions(
        targets=np.asarray(ids[1:], np.int64),
        sampling_logprobs=np.full(num, np.nan, np.float32),
        temperature=np.ones(num, np.float32),
        version=nobody,
        turn=nobody,
        sample=nobody,
        trajectory=nobody,
        group=nobody,
        advantages=nothing,
        weights=nothing,
        returns=nothing + np.nan,
        old_values=nothing + np.nan,
        value_weights=nothing,
    )
    return PackedRow(
        ids=np.asarray(ids[:-1], np.int64),
        positions=np.arange(num),
        boundaries=np.array([0, num], np.int32),
        parents=np.array([-1], np.int32),
        predictors=np.arange(num),
        actions=actions,
    )


def _members(trajectory: Trajectory, streams: Streams, first: Numbers) -> list[Member]:
    for stream in (streams.advantages, streams.returns, streams.old_values):
        if len(stream) != trajectory.sampled_tokens:
            raise IntegrityError(
                f"trajectory {trajectory.id}: credit for {len(stream)} tokens, but the policy sampled "
                f"{trajectory.sampled_tokens}; an algorithm gives one value per sampled token"
            )
    members: list[Member] = []
    start = 0
    for index, sample in enumerate(trajectory.samples):
        num_sampled = int(sample.sampled.sum())
        if num_sampled:
            numbers = replace(first, sample=first.sample + len(members))
            name = f"trajectory {trajectory.id}, sample {index}"
            members.append(member_of(sample, streams.part(start, start + num_sampled), numbers, name))
        start += num_sampled
    return members


def _row(members: Sequence[Member], share: bool) -> PackedRow:
    forest = plant([member.ids for member in members], shortest=SHORTEST_SHARED if share else None)
    predictors = [places[member.predictors] for member, places in zip(members, forest.places, strict=True)]
    return PackedRow(
        ids=forest.ids,
        positions=forest.positions,
        boundaries=forest.boundaries,
        parents=forest.parents,
        predictors=np.concatenate(predictors) if predictors else np.zeros(0, np.int64),
        actions=join_actions([member.actions for member in members]),
    )


def _account(groups: Sequence[Group], credits: Sequence[Credit], kept: Sequence[bool]) -> Accounting:
    tokens = {"trained": 0, "without_signal": 0, "invalid": 0}
    trajectories = {"trained": 0, "without_signal": 0, "invalid": 0}
    for group, credit, keep in zip(groups, credits, kept, strict=True):
        for trajectory, stream in zip(group.trajectories, credit.advantages, strict=True):
            fate = "invalid" if stream is None else "trained" if keep else "without_signal"
            tokens[fate] += trajectory.sampled_tokens
            trajectories[fate] += 1
    return Accounting(
        sampled_tokens=sum(t.sampled_tokens for group in groups for t in group.trajectories),
        trained_tokens=tokens["trained"],
        tokens_without_signal=tokens["without_signal"],
        invalid_tokens=tokens["invalid"],
        trained_trajectories=trajectories["trained"],
        invalid_trajectories=trajectories["invalid"],
        groups=len(groups),
        groups_without_signal=sum(not credit.signal for credit in credits),
    )
