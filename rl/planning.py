"""Which trajectories share a row: planned once per optimiser step, on the host, from lengths alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Piece:
    """What must stay in one row: all samples of a trajectory. Piece(300, 45_150, group=0, shared=128)"""

    tokens: int  # that stand in the row when it is alone there
    pairs: int  # of query and key, likewise
    group: int
    shared: int = 0  # tokens that all pieces of the group begin with, and that a row holds once


@dataclass(slots=True)
class _Load:
    """Pieces that go together, and what they come to."""

    pieces: list[int] = field(default_factory=list)
    tokens: int = 0
    pairs: int = 0

    @property
    def cost(self) -> float:
        return row_cost(self.tokens, self.pairs)

    def add(self, pieces: Sequence[int], tokens: int, pairs: int) -> None:
        self.pieces += pieces
        self.tokens += tokens
        self.pairs += pairs


def row_cost(tokens: int, pairs: int, hidden: int = 1024) -> float:
    """Work in units of a token's linear layers: linear in the tokens, plus attention.

    A token costs about 24 hidden^2 FLOPs in a layer's projections and 4 hidden FLOPs per key that it looks at; `hidden`
    only sets where attention begins to matter.
    """
    return tokens + pairs / (6.0 * hidden)


def plan_rows(pieces: Sequence[Piece], tokens_per_row: int, *, multiple_of: int = 1) -> list[list[int]]:
    """Indices of `pieces`, grouped into rows of at most `tokens_per_row` tokens, what a row shares counted once.

    A group stays together where it fits, so that what it shares is computed once. Then the costliest first: to the rank
    with the least work, and there into the cheapest row that has room. With more ranks than one, groups are also tried
    in smaller parts, and the plan with the least work on the busiest rank is taken. A piece longer than the budget gets
    a row of its own. Rows k, k + multiple_of, ... are rank k's; all ranks get the same number of rows, so some may be
    empty with more ranks than one.
    """
    if tokens_per_row < 1:
        raise ValueError(f"tokens_per_row is {tokens_per_row}; a row holds at least one token")
    fair = -(-sum(piece.tokens for piece in pieces) // multiple_of)
    most = tokens_per_row if multiple_of == 1 else min(tokens_per_row, fair)
    sizes = [most] if multiple_of == 1 else [most, most // 2, most // 4, most // 8, 0]
    plans = [_deal(_bundles(pieces, size), multiple_of) for size in sizes]
    ranks = min(plans, key=lambda plan: max(sum(load.cost for load in loads) for loads in plan))
    planned = [_fill_rows(loads, tokens_per_row) for loads in ranks]
    rounds = max(len(rows) for rows in planned)
    return [rows[i] if i < len(rows) else [] for i in range(rounds) for rows in planned]


def _bundles(pieces: Sequence[Piece], size: int) -> list[_Load]:
    """Pieces of a group that share something, together in bundles of at most `size` tokens; the others alone."""
    bundles: list[_Load] = []
    open_of: dict[int, list[_Load]] = {}
    for index in sorted(range(len(pieces)), key=lambda i: (-pieces[i].tokens, i)):
        piece = pieces[index]
        more = piece.tokens - piece.shared
        mine = open_of.setdefault(piece.group, []) if piece.shared else []
        room = next((bundle for bundle in mine if bundle.tokens + more <= size), None)
        if room is not None:
            room.add([index], more, piece.pairs - piece.shared * (piece.shared + 1) // 2)
            continue
        bundles.append(_Load([index], piece.tokens, piece.pairs))
        mine.append(bundles[-1])
    return bundles


def _deal(bundles: Sequence[_Load], ranks: int) -> list[list[_Load]]:
    """Each rank's bundles, costliest first, to whoever has the least work."""
    dealt: list[list[_Load]] = [[] for _ in range(ranks)]
    work = [0.0] * ranks
    for bundle in sorted(bundles, key=lambda b: -b.cost):
        rank = work.index(min(work))
        dealt[rank].append(bundle)
        work[rank] += bundle.cost
    return dealt


def _fill_rows(bundles: Sequence[_Load], tokens_per_row: int) -> list[list[int]]:
    """Bundles, costliest first, into as few rows as their tokens need, or a few more; costliest row first."""
    fewest = -(-sum(bundle.tokens for bundle in bundles) // tokens_per_row)
    rows = [_Load() for _ in range(fewest)]
    for bundle in bundles:
        room = [row for row in rows if not row.pieces or row.tokens + bundle.tokens <= tokens_per_row]
        if not room:
            room = [_Load()]
            rows += room
        min(room, key=lambda row: row.cost).add(bundle.pieces, bundle.tokens, bundle.pairs)
    return [row.pieces for row in sorted(rows, key=lambda row: -row.cost) if row.pieces]
