"""Shared prefixes: the forest, who sees whom in it, and that nothing it computes differs from the plain branches."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from palestra.rl.layout import Layout, Segment, varlen_of
from palestra.rl.tree import Forest, plant
from palestra.rl.tree_attention import tree_attention

CPU = torch.device("cpu")


def words(*texts: str) -> list[np.ndarray]:
    return [np.array([ord(c) for c in text], np.int64) for text in texts]


def text(forest: Forest) -> list[str]:
    joined = "".join(map(chr, forest.ids))
    return [joined[a:b] for a, b in zip(forest.boundaries, forest.boundaries[1:], strict=False)]


def test_what_sequences_begin_with_stands_once() -> None:
    forest = plant(words("abcdefg", "abcdxy", "abcd", "abcdxyq", "zz"), shortest=2)
    assert text(forest) == ["abcd", "efg", "xyq", "zz"]
    assert forest.parents.tolist() == [-1, 0, 0, -1]
    assert forest.positions.tolist() == [0, 1, 2, 3, 4, 5, 6, 4, 5, 6, 0, 1]
    assert forest.places[1].tolist() == [0, 1, 2, 3, 7, 8]
    assert forest.places[2].tolist() == [0, 1, 2, 3]


def test_the_packing_case_is_a_forest_without_sharing() -> None:
    forest = plant(words("abcd", "abcd"), shortest=None)
    assert text(forest) == ["abcd", "abcd"]
    assert forest.parents.tolist() == [-1, -1]
    assert forest.positions.tolist() == [0, 1, 2, 3] * 2


def test_short_runs_are_not_shared_but_whole_segments_are() -> None:
    assert text(plant(words("abcdef", "abxyzw"), shortest=3)) == ["abcdef", "abxyzw"]
    assert text(plant(words("abcdef", "abcxyz", "ab"), shortest=3)) == ["abc", "def", "xyz"]


def test_nothing_makes_an_empty_forest() -> None:
    assert [plant([]).boundaries.tolist(), plant([]).parents.tolist(), plant([]).ids.tolist()] == [[0], [], []]


sequences = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=12).map(np.array), max_size=8)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(rows=sequences, shortest=st.sampled_from([None, 1, 2, 3, 5]))
def test_every_sequence_is_a_path_of_the_forest(rows: list[np.ndarray], shortest: int | None) -> None:
    forest = plant(rows, shortest=shortest)
    seen = visible(forest)
    for row, places in zip(rows, forest.places, strict=True):
        assert forest.ids[places].tolist() == row.tolist()
        assert forest.positions[places].tolist() == list(range(len(row)))
        for depth, place in enumerate(places):
            assert np.flatnonzero(seen[place]).tolist() == sorted(places[: depth + 1].tolist())
    assert all(parent < index for index, parent in enumerate(forest.parents))
    if shortest == 1:
        assert len(forest.ids) == len({tuple(row[: i + 1]) for row in rows for i in range(len(row))})
    assert forest.pairs == seen.sum()


def visible(forest: Forest) -> np.ndarray:
    """[T, T] bool, by the definition: an ancestor, or oneself."""
    owner = np.repeat(np.arange(len(forest.parents)), np.diff(forest.boundaries))
    above = np.eye(len(forest.parents), dtype=bool)
    for segment, parent in enumerate(forest.parents):
        if parent >= 0:
            above[segment] |= above[parent]
    return above[owner][:, owner] & (forest.positions[None] <= forest.positions[:, None])


def reference(q: Tensor, k: Tensor, v: Tensor, scale: float, seen: Tensor) -> Tensor:
    """[T, heads, head_dim], with a mask of everything."""
    repeat = len(q) // len(k)
    scores = scale * q @ k.repeat_interleave(repeat, 0).transpose(1, 2)
    weights = torch.softmax(scores.masked_fill(~seen, float("-inf")), -1)
    return (weights @ v.repeat_interleave(repeat, 0)).transpose(0, 1)


def random_forest(seed: int, longest: int) -> Forest:
    rng = np.random.default_rng(seed)
    trunk = rng.integers(0, 9, longest)
    rows = [
        np.concatenate([trunk[: rng.integers(1, longest)], rng.integers(0, 9, rng.integers(1, longest))])
        for _ in range(5)
    ]
    return plant([*rows, rng.integers(0, 9, 7)], shortest=2)


def seen_of(forest: Forest, window: int | None) -> Tensor:
    seen = visible(forest)
    if window is not None:
        seen &= forest.positions[:, None] - forest.positions[None] < window
    return torch.from_numpy(seen)


def segments_of(forest: Forest) -> tuple[Segment, ...]:
    return Layout.of(forest.boundaries.tolist(), forest.parents.tolist(), CPU).segments


@pytest.mark.parametrize("window", [None, 1, 5, 70])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2)])
@pytest.mark.parametrize("longest", [12, 150])
def test_attention_over_a_forest_has_the_values_and_gradients_of_a_mask_over_everything(
    longest: int, heads: tuple[int, int], window: int | None
) -> None:
    forest = random_forest(longest, longest)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(n, len(forest.ids), 8, generator=generator, dtype=torch.float64).requires_grad_()
        for n in (heads[0], heads[1], heads[1])
    )
    ours = tree_attention(q, k, v, 0.3, window, segments_of(forest))
    theirs = reference(q, k, v, 0.3, seen_of(forest, window))
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    weights = torch.randn(theirs.shape, generator=generator, dtype=torch.float64)
    pairs = zip(
        torch.autograd.grad((weights * ours).sum(), (q, k, v)),
        torch.autograd.grad((weights * theirs).sum(), (q, k, v)),
        strict=True,
    )
    for x, y in pairs:
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("seed", range(5))
def test_gathered_keys_aligned_at_the_bottom_right_show_each_token_what_it_may_see(
    seed: int, window: int | None
) -> None:
    forest = random_forest(seed, 12)
    lengths = varlen_of(segments_of(forest), CPU)
    gathered = torch.arange(len(forest.ids)) if lengths.gathered is None else lengths.gathered
    seen = torch.zeros(len(forest.ids), len(forest.ids), dtype=torch.bool)
    for i in range(len(lengths.queries) - 1):
        keys = gathered[lengths.keys[i] : lengths.keys[i + 1]]
        queries = range(int(lengths.queries[i]), int(lengths.queries[i + 1]))
        for at, query in enumerate(queries):
            last = len(keys) - len(queries) + at  # what the kernel's causal mask leaves
            first = 0 if window is None else max(0, last - window + 1)
            seen[query, keys[first : last + 1]] = True
    assert torch.equal(seen, seen_of(forest, window))
    assert lengths.longest_keys == max(len(places) for places in forest.places)


def test_a_row_without_sharing_gathers_no_keys() -> None:
    assert varlen_of(segments_of(plant(words("abc", "xy"))), CPU).gathered is None
    first_child = Layout.of([0, 4, 7, 9], [-1, 0, 0], CPU).segments
    assert [segment.seen for segment in first_child] == [((0, 4),), ((0, 7),), ((0, 4), (7, 9))]
