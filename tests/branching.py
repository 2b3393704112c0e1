"""Groups whose trajectories share a prompt and fork: what a tree of tokens is for."""

from __future__ import annotations

import numpy as np

from learning_support import group, sample, trajectory
from palestra.rollout.types import Group, Sample


def branching_groups(
    rng: np.random.Generator, *, groups: int = 2, per_group: int = 3, vocab: int = 50, longest: int = 24
) -> list[Group]:
    """A prompt of 16 to 24 tokens for each group; trajectories of one or two samples, the second a fork of the first.

    A fork keeps some of the first sample's tokens, sampled ones among them, and goes on differently. One in three has
    sampled the tokens that it keeps itself, so a place in the trunk is credited twice.
    """
    made = []
    for g in range(groups):
        prompt = rng.integers(0, vocab, int(rng.integers(16, 25))).tolist()
        trajectories = []
        for t in range(per_group):
            rows = [_row(rng, prompt, [0] * len(prompt), vocab, longest)]
            if rng.random() < 0.5:
                rows.append(_fork(rng, rows[0], len(prompt), vocab, longest))
            trajectories.append(trajectory(f"g{g}t{t}", rows, float(t == 0 or (t > 1 and rng.random() < 0.5))))
        made.append(group(f"g{g}", trajectories))
    return made


def _fork(rng: np.random.Generator, first: Sample, prompt: int, vocab: int, longest: int) -> Sample:
    kept = int(rng.integers(prompt, len(first)))
    mask = first.sampled[:kept].astype(int) if rng.random() < 0.33 else np.zeros(kept, int)
    return _row(rng, first.ids[:kept].tolist(), mask.tolist(), vocab, longest)


def _row(rng: np.random.Generator, ids: list[int], mask: list[int], vocab: int, longest: int) -> Sample:
    """More of a row: spans of sampled tokens and of observed ones, in turn."""
    more = int(rng.integers(2, longest + 1))
    spans: list[int] = []
    while len(spans) < more:
        spans += [1] * int(rng.integers(1, 6)) + [0] * int(rng.integers(1, 5))
    mask = mask + spans[:more]
    turn = np.cumsum(np.diff(mask, prepend=0) == 1)
    return sample(
        ids + rng.integers(0, vocab, more).tolist(),
        mask,
        logprobs=(-rng.random(len(mask)) * 4).tolist(),
        temperature=float(rng.choice([0.5, 1.0, 2.0])),
        turn=np.minimum(turn, 100).tolist(),
    )
