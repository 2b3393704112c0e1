"""What a step does with the groups that it uses: measure, credit, deal into batches, update.

The batch is frozen when it is collected: credit, and the log-probabilities that ratios are taken to, are of the policy
before the first of its updates. Every optimiser step counts its denominators over the groups of its own part, as a
batch of that size would.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from palestra.rl.algorithms.base import Algorithm, Credit, Measured
from palestra.rl.batch import Batch, pack
from palestra.rl.counted import Counting, credited, trained
from palestra.rl.critic import critic_of
from palestra.rl.learner import UpdateStats
from palestra.rl.objective import Objective
from palestra.rl.penalties import measure_penalties
from palestra.rl.ranks import Ranks
from palestra.rl.turn_rewards import check_turn_rewards
from palestra.rl.values import measure_values
from palestra.rollout.seeds import derive_seed
from palestra.rollout.types import Float32, Group


class Learns(Protocol):
    """The learner, as far as a step asks."""

    step: int
    ranks: Ranks

    def update(
        self, batch: Batch, algorithm: Algorithm, old: Float32 | None = None, version: int | None = None
    ) -> UpdateStats: ...

    def sampled_logprobs(self, batch: Batch) -> Float32: ...

    def reference_logprobs(self, batch: Batch) -> Float32: ...

    def values(self, batch: Batch) -> Float32: ...


@dataclass(frozen=True, slots=True)
class Practice:
    """How a batch is learned from. `seed` orders its parts."""

    tokens_per_micro_batch: int
    updates_per_batch: int = 1
    epochs: int = 1
    seed: int = 0
    context_tokens: int | None = None
    """The longest context that the policy may have; a critic looks no further."""

    @property
    def updates(self) -> int:
        """Optimiser steps that a batch serves, at most."""
        return self.updates_per_batch * self.epochs


@dataclass(frozen=True, slots=True)
class Learned:
    """What came of a step's groups.

    credits: of each group, without what was taken out of the loss; batches: its parts, in the order of the first pass;
    updates: one for each optimiser step, none when nothing could be learned; fresh: how many of the first of them
    compared the engine with the trainer as it was when the batch was frozen.
    """

    credits: tuple[Credit, ...]
    batches: tuple[Batch, ...]
    updates: tuple[UpdateStats, ...]
    fresh: int

    @property
    def action_tokens(self) -> int:
        """Sampled tokens that were learned from, each counted once."""
        return sum(batch.num_actions for batch in self.batches)


def learn(
    learner: Learns, algorithm: Algorithm, groups: Sequence[Group], counting: Counting, practice: Practice
) -> Learned:
    """Learn from groups of one step. Blocks; several optimiser steps when `practice` says so.

    Raises ConfigError when turns earned something that the algorithm does not read.
    """
    check_turn_rewards(algorithm, groups)
    views = [credited(group, counting) for group in groups]
    measured = measure(learner, algorithm, views, practice)
    given = algorithm.credit(views, measured)
    credits = [trained(group, credit, counting) for group, credit in zip(groups, given, strict=True)]
    order = random.Random(derive_seed(practice.seed, "parts", learner.step))
    parts = deal(credits, algorithm.objective, practice.updates_per_batch, order)
    packed = [
        pack(
            [views[i] for i in part],
            [credits[i] for i in part],
            practice.tokens_per_micro_batch,
            algorithm.objective,
            ranks=learner.ranks.size,
        )
        for part in parts
    ]
    batches = [batch for batch in packed if batch.num_actions]
    frozen = freezes(algorithm.objective, practice.updates)
    olds = [learner.sampled_logprobs(batch) if frozen else None for batch in batches]
    updates, version = [], learner.step
    for epoch in range(practice.epochs):
        turns = list(range(len(batches)))
        if epoch:
            order.shuffle(turns)
        updates += [learner.update(batches[i], algorithm, olds[i], version) for i in turns]
    fresh = len(batches) if frozen else min(1, len(batches))
    return Learned(tuple(credits), tuple(batches), tuple(updates), fresh)


def freezes(objective: Objective, updates: int) -> bool:
    """Whether log-probabilities of the frozen policy are computed. In mode on_policy a single optimiser step needs
    none: what would be computed is the policy itself, detached."""
    return objective.mode == "decoupled" or (objective.mode == "on_policy" and updates > 1)


def deal(credits: Sequence[Credit], objective: Objective, parts: int, rng: random.Random) -> list[list[int]]:
    """Groups dealt whole into at most `parts` parts that differ by one group at most; one part keeps their order.

    Only groups that are learned from, or count in a denominator, are dealt: no part goes empty while another has two.
    """
    counts = [
        index
        for index, credit in enumerate(credits)
        if credit.signal or objective.learns_without_signal or objective.aggregation.count_without_signal
    ]
    if parts > 1:
        rng.shuffle(counts)
    return [sorted(counts[start::parts]) for start in range(min(parts, len(counts)))]


def measure(learner: Learns, algorithm: Algorithm, groups: Sequence[Group], practice: Practice) -> Measured | None:
    """What credit needs to know of the policy's tokens, if anything."""
    objective, ranks, tokens = algorithm.objective, learner.ranks.size, practice.tokens_per_micro_batch
    values = last_values = penalties = None
    if critic_of(algorithm) is not None:
        values, last_values = measure_values(learner, groups, tokens, ranks=ranks, longest=practice.context_tokens)
    if objective.kl_in_reward:
        penalties = measure_penalties(learner, groups, objective.kl_coefficient, tokens, ranks=ranks)
    if values is None and penalties is None:
        return None
    return Measured(values=values, last_values=last_values, penalties=penalties)
