"""Token sequences as a forest in which a shared prefix stands once.

    abcdefg, abcdxy        abcd -> efg
                                -> xy        7 + 6 tokens become 9

A segment is a run of tokens with at most one parent; a token sees its own segment up to itself, and all of the
segments above. Its position is its depth, so absolute and rotary positions are those of the plain sequence, and what
is computed for a token is what would be computed in each of the sequences that share it. Sequences that share nothing
are segments without parents, which is plain packing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]

SHORTEST_SHARED = 16
"""Tokens that a segment must save before it is split for them: each segment costs some calls in every layer."""


@dataclass(frozen=True, slots=True)
class Forest:
    """For abcdefg and abcdxy: boundaries 0 4 7 9, parents -1 0 0, positions 0 1 2 3 4 5 6 4 5.

    ids, positions [T]; boundaries [segments + 1], from 0 to T; parents [segments], -1 for a root, and always an
    earlier segment. places[i] [length of sequence i]: where its tokens stand.
    """

    ids: Ids
    positions: Ids
    boundaries: NDArray[np.int32]
    parents: NDArray[np.int32]
    places: tuple[Ids, ...]

    @property
    def pairs(self) -> int:
        """Query-key pairs that attention looks at."""
        return int((self.positions + 1).sum())


@dataclass(slots=True, eq=False)
class _Node:
    """A run of `ids` that begins at `depth`. The root is empty."""

    ids: Ids
    depth: int
    above: _Node | None
    children: list[_Node] = field(default_factory=list)
    start: int = 0  # in the row

    def split(self, length: int) -> _Node:
        """Part with the first `length` tokens to a new node above, which is returned; what ended here still does."""
        assert self.above is not None  # the root has no tokens to part with
        head = _Node(self.ids[:length], self.depth, self.above, [self])
        self.above.children[self.above.children.index(self)] = head
        self.ids, self.depth, self.above = self.ids[length:], self.depth + length, head
        return head


def plant(sequences: Sequence[Ids], *, shortest: int | None = SHORTEST_SHARED) -> Forest:
    """The forest of some sequences. Runs shorter than `shortest` are not shared; None: nothing is."""
    root = _Node(np.zeros(0, np.int64), 0, None)
    ends = {i: _insert(root, sequences[i], shortest) for i in _longest_first(sequences)}
    nodes, parents = _laid_out(root)
    lengths = [len(node.ids) for node in nodes]
    return Forest(
        ids=_joined([node.ids for node in nodes]),
        positions=_joined([np.arange(node.depth, node.depth + len(node.ids)) for node in nodes]),
        boundaries=np.cumsum([0, *lengths]).astype(np.int32),
        parents=np.array(parents, np.int32),
        places=tuple(_path(ends[i])[: len(sequence)] for i, sequence in enumerate(sequences)),
    )


def _longest_first(sequences: Sequence[Ids]) -> list[int]:
    """Then a sequence that another one extends needs no segment of its own."""
    return sorted(range(len(sequences)), key=lambda i: -len(sequences[i]))


def _insert(root: _Node, ids: Ids, shortest: int | None) -> _Node:
    """Put a sequence in, and return a node whose path from the root begins with it."""
    node, at = root, 0
    while at < len(ids):
        child, common = _closest(node, ids[at:]) if shortest is not None else (None, 0)
        if child is not None and at + common == len(ids):
            return child
        if child is not None and common == len(child.ids):
            node = child
        elif child is not None and common >= (shortest or 0):
            node = child.split(common)
        else:
            node.children.append(_Node(ids[at:], at, node))
            return node.children[-1]
        at += common
    return node


def _closest(node: _Node, ids: Ids) -> tuple[_Node | None, int]:
    """The child that has the most tokens in common with `ids`, and how many."""
    best, most = None, 0
    for child in node.children:
        common = common_prefix(child.ids, ids) if child.ids[0] == ids[0] else 0
        if common > most:
            best, most = child, common
    return best, most


def common_prefix(a: Ids, b: Ids) -> int:
    """Tokens before the first difference."""
    shorter = min(len(a), len(b))
    differs = np.flatnonzero(a[:shorter] != b[:shorter])
    return int(differs[0]) if len(differs) else shorter


def _laid_out(root: _Node) -> tuple[list[_Node], list[int]]:
    """All nodes but the root, each before its children, and the index of each one's parent."""
    nodes: list[_Node] = []
    parents: list[int] = []
    start = 0
    waiting = [(child, -1) for child in reversed(root.children)]
    while waiting:
        node, parent = waiting.pop()
        node.start = start
        start += len(node.ids)
        waiting += [(child, len(nodes)) for child in reversed(node.children)]
        nodes.append(node)
        parents.append(parent)
    return nodes, parents


def _path(node: _Node) -> Ids:
    """Where the tokens from the root to the end of `node` stand in the row."""
    runs = []
    at: _Node | None = node
    while at is not None:
        runs.append(np.arange(at.start, at.start + len(at.ids)))
        at = at.above
    return _joined(runs[::-1])


def _joined(arrays: Sequence[Ids]) -> Ids:
    return np.concatenate(arrays).astype(np.int64) if arrays else np.zeros(0, np.int64)
