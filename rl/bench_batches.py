"""The batches that `palestra bench learner` measures on: made of random ids, the same every time."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from palestra.envs.types import Scored
from palestra.rl.aggregation import Aggregation
from palestra.rl.algorithms.base import Credit, rewards_of
from palestra.rl.algorithms.rloo import RLOO
from palestra.rl.objective import Objective
from palestra.rl.surrogates import PPOClip
from palestra.rollout.types import Group, Sample, TerminatedBy, Trajectory

LOWEST_ID, HIGHEST_ID = 100, 49_000
TAIL = 1.3  # of the Pareto law that lengths are quantiles of
OBSERVED = 0.6  # of what follows the prompt


@dataclass(frozen=True, slots=True)
class Work:
    """One optimiser step's groups, their credit, and the objective."""

    groups: tuple[Group, ...]
    credits: tuple[Credit, ...]
    objective: Objective = Objective()


@dataclass(frozen=True, slots=True)
class Shape:
    """Groups of trajectories of `shortest` to `longest` tokens, long-tailed, the prompt included."""

    groups: int
    per_group: int
    prompt: int
    shortest: int
    longest: int
    turns: tuple[int, int]  # of the shortest and of the longest

    def lengths(self, rng: random.Random) -> list[list[int]]:
        """Of each group's trajectories. What follows a prompt has the tail, where prompts are most of the length."""
        fixed = self.prompt if 2 * self.prompt > self.longest else 0
        drawn = quantiles(self.groups * self.per_group, self.shortest - fixed, self.longest - fixed)
        rng.shuffle(drawn)
        return [[fixed + n for n in drawn[i : i + self.per_group]] for i in range(0, len(drawn), self.per_group)]


SHAPES = {
    "small": Shape(2, 4, prompt=128, shortest=200, longest=900, turns=(3, 8)),
    "long-tail": Shape(4, 4, prompt=60, shortest=100, longest=1000, turns=(2, 10)),
    "prompt-heavy": Shape(1, 8, prompt=1000, shortest=1150, longest=1300, turns=(2, 4)),
    "full": Shape(8, 8, prompt=256, shortest=300, longest=2000, turns=(3, 12)),
}
PEERS = {"peer-small": (2, 4, 400), "peer-long-tail": (4, 4, 1000)}
"""Batches on which other trainers were measured: groups, trajectories of each, longest. Gradient norms before clipping:
2.2336 and 3.6056."""
REWRITTEN = Shape(1, 4, prompt=128, shortest=300, longest=400, turns=(4, 5))
SIZES = (*SHAPES, "branching", *PEERS)


def work_of(size: str, seed: int = 0) -> Work:
    """The batch of one of SIZES."""
    rng = random.Random(seed)
    if size in PEERS:
        return _peer_work(rng, *PEERS[size])
    shape = SHAPES.get(size, REWRITTEN)
    samples_of: Callable[[Sample], list[Sample]] = _rewritten(rng) if size == "branching" else lambda row: [row]
    groups = []
    for g, lengths in enumerate(shape.lengths(rng)):
        prompt = _ids(rng, shape.prompt)
        rows = [_row(rng, prompt, _spans(rng, shape, length)) for length in lengths]
        groups.append(_group(g, [(samples_of(row), float(i % 2)) for i, row in enumerate(rows)]))
    return Work(tuple(groups), tuple(RLOO().credit(groups)))


def quantiles(num: int, shortest: int, longest: int) -> list[int]:
    """Lengths at evenly spaced quantiles of a Pareto law, cut off: every number of them is as ragged."""
    return [int(min(longest, shortest * (1 - (i + 0.5) / num) ** (-1 / TAIL))) for i in range(num)]


def _spans(rng: random.Random, shape: Shape, length: int) -> list[int]:
    """The mask behind a prompt: turns of sampled tokens with observations between them."""
    more = length - shape.prompt
    reach = (length - shape.shortest) / (shape.longest - shape.shortest)
    turns = round(shape.turns[0] + (shape.turns[1] - shape.turns[0]) * reach)
    observed = _parts(rng, round(OBSERVED * more), turns - 1)
    sampled = _parts(rng, more - sum(observed), turns)
    mask: list[int] = []
    for n, m in zip(sampled, [*observed, 0], strict=True):
        mask += [1] * n + [0] * m
    return mask


def _parts(rng: random.Random, total: int, num: int) -> list[int]:
    """`total` as `num` random whole numbers above 0; of nothing, nothing."""
    if num < 1:
        return []
    cuts = sorted(rng.sample(range(1, total), num - 1))
    return [b - a for a, b in zip([0, *cuts], [*cuts, total], strict=True)]


def _rewritten(rng: random.Random) -> Callable[[Sample], list[Sample]]:
    """A trajectory whose history is rewritten at three points: each time six tenths of it stay, 30 tokens stand for
    the others, and it goes on from there."""

    def samples_of(row: Sample) -> list[Sample]:
        samples = [row]
        for _ in range(3):
            kept = samples[-1].ids[: int(0.6 * len(samples[-1]))].tolist()
            samples.append(_row(rng, kept, [0] * 30 + [1] * 40 + [0] * 60 + [1] * 40))
        return samples

    return samples_of


def _peer_work(rng: random.Random, num_groups: int, per_group: int, longest: int) -> Work:
    """Drawn in the order in which the other trainers' batch was, with their settings: ratios to the sampled
    log-probabilities, clipped alike on both sides, token-mean."""
    lengths = quantiles(num_groups * per_group, 100, longest)
    rng.shuffle(lengths)
    groups, credits = [], []
    for g in range(num_groups):
        prompt = _ids(rng, rng.randint(60, 95))
        rows = [_peer_row(rng, prompt, total) for total in lengths[g * per_group : (g + 1) * per_group]]
        groups.append(_group(g, [([row], reward) for row, reward in rows]))
        rewards = rewards_of(groups[-1])
        advantages = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-4)
        pairs = zip(groups[-1].trajectories, advantages, strict=True)
        credits.append(Credit(tuple(np.full(t.sampled_tokens, advantage) for t, advantage in pairs)))
    counted = Aggregation(count_without_signal=True)  # they keep groups without signal in the mean
    objective = Objective(PPOClip(0.2, 0.2, None), None, mode="bypass", aggregation=counted)
    return Work(tuple(groups), tuple(credits), objective)


def _peer_row(rng: random.Random, prompt: Sequence[int], total: int) -> tuple[Sample, float]:
    """Spans of 20 to 80 tokens, sampled and observed in turn, the last token sampled; and a reward of 0 or 1."""
    length = total - len(prompt)
    mask: list[int] = []
    while len(mask) < length:
        mask += [1] * rng.randint(20, 80)
        if len(mask) < length - 10:
            mask += [0] * rng.randint(20, 80)
    ids = _ids(rng, length)
    reward = float(rng.random() < 0.4)
    return _sample(prompt, ids, [*mask[: length - 1], 1], _logprobs(rng, length)), reward


def _row(rng: random.Random, prompt: Sequence[int], mask: Sequence[int]) -> Sample:
    return _sample(prompt, _ids(rng, len(mask)), mask, _logprobs(rng, len(mask)))


def _ids(rng: random.Random, num: int) -> list[int]:
    return [rng.randint(LOWEST_ID, HIGHEST_ID) for _ in range(num)]


def _logprobs(rng: random.Random, num: int) -> list[float]:
    """About those of random ids."""
    return [-10.8 + 0.02 * rng.gauss(0, 1) for _ in range(num)]


def _sample(prompt: Sequence[int], ids: Sequence[int], mask: Sequence[int], logprobs: Sequence[float]) -> Sample:
    sampled = np.array([0] * len(prompt) + list(mask), dtype=bool)
    values = np.concatenate([np.zeros(len(prompt)), logprobs])
    starts = np.diff(sampled.astype(np.int16), prepend=np.int16(0)) == 1
    return Sample(
        ids=np.array([*prompt, *ids], np.int32),
        sampled=sampled,
        logprobs=np.where(sampled, values, np.nan).astype(np.float32),
        temperature=np.where(sampled, 1.0, np.nan).astype(np.float32),
        version=np.where(sampled, 0, -1).astype(np.int32),
        turn=np.where(sampled, np.cumsum(starts) - 1, -1).astype(np.int16),
    )


def _group(number: int, members: Sequence[tuple[list[Sample], float]]) -> Group:
    name = f"g{number}"
    trajectories = tuple(
        Trajectory(
            id=f"{name}t{i}",
            task_id=name,
            group_id=name,
            seed=0,
            messages=(),
            turns=(),
            samples=tuple(samples),
            terminated_by=TerminatedBy.DONE,
            verdict=Scored(reward),
        )
        for i, (samples, reward) in enumerate(members)
    )
    return Group(name, name, trajectories)
