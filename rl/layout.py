"""Which tokens of a row see which: segments of a forest, as attention needs them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Run = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens start to end of the row, the first of which stands at `depth` of its sequence.

    `seen` is the path from the root to the segment's own end, as runs of the row; its length is depth + end - start.
    """

    start: int
    end: int
    depth: int
    seen: tuple[Run, ...]


@dataclass(frozen=True, slots=True)
class VarLen:
    """The same for one variable-length kernel: segment i's queries, and its keys gathered from the whole row.

    Queries stand at the end of their keys, which is the kernel's bottom-right alignment of the causal mask.
    """

    queries: Tensor  # [segments + 1] int32 offsets
    keys: Tensor  # [segments + 1] int32 offsets into `gathered`
    gathered: Tensor | None  # int64 places in the row; None: the row as it is, since no segment has a parent
    longest_queries: int
    longest_keys: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Of a whole row."""

    segments: tuple[Segment, ...]
    varlen: VarLen | None  # on CUDA

    @classmethod
    def of(cls, boundaries: Sequence[int], parents: Sequence[int], device: torch.device) -> Layout:
        """From [segments + 1] offsets and each segment's parent, -1 for none. Layout.of([0, 4, 7], [-1, 0], device)"""
        segments: list[Segment] = []
        for start, end, parent in zip(boundaries, boundaries[1:], parents, strict=False):
            above = segments[parent].seen if parent >= 0 else ()
            segments.append(Segment(start, end, _length(above), _extended(above, (start, end))))
        found = tuple(segments)
        return cls(found, varlen_of(found, device) if device.type == "cuda" else None)


def varlen_of(segments: Sequence[Segment], device: torch.device) -> VarLen:
    """Offsets, and an index where some segment has a parent."""
    queries = [segment.end - segment.start for segment in segments]
    keys = [_length(segment.seen) for segment in segments]
    runs = [torch.arange(*run, device=device) for segment in segments for run in segment.seen]
    return VarLen(
        queries=_offsets(queries, device),
        keys=_offsets(keys, device),
        gathered=torch.cat(runs) if queries != keys else None,
        longest_queries=max(queries, default=0),
        longest_keys=max(keys, default=0),
    )


def _offsets(lengths: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)


def _length(runs: Sequence[Run]) -> int:
    return sum(end - start for start, end in runs)


def _extended(runs: tuple[Run, ...], last: Run) -> tuple[Run, ...]:
    """With one more run, which is joined to the one before it where they touch."""
    if runs and runs[-1][1] == last[0]:
        return (*runs[:-1], (runs[-1][0], last[1]))
    return (*runs, last)
