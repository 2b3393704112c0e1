"""Exact attention over a forest by plain matrix products, forward and backward.

Queries go in blocks against the keys that the block can see, so almost nothing above the diagonal is computed; the
query heads that share a key head are rows of one product. The backward computes the scores again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from palestra.rl.layout import Run, Segment

BLOCK = 64
"""Queries of a block: half of a block's square is wasted at the diagonal, and smaller products run slower."""


def tree_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None, segments: Sequence[Segment]
) -> Tensor:
    """[T, heads, head_dim] for query [heads, T, head_dim] and key, value [key_value_heads, T, head_dim].

    With a `window`, a token sees that many positions, its own included.
    """
    output: Tensor = _TreeAttention.apply(query, key, value, _How(scale, window, tuple(segments)))
    return output


@dataclass(frozen=True, slots=True)
class _How:
    scale: float
    window: int | None
    segments: tuple[Segment, ...]

    def blocks(self, segment: Segment) -> Iterator[_Block]:
        for start in range(segment.start, segment.end, BLOCK):
            depth = segment.depth + start - segment.start
            first = 0 if self.window is None else max(0, depth - self.window + 1)
            yield _Block(start, min(start + BLOCK, segment.end), depth, first)

    def probabilities(self, q: Tensor, keys: Tensor, block: _Block) -> Tensor:
        """[key heads, rows, keys that the block looks at] for q [key heads, rows, head_dim]."""
        nothing = q.new_empty(1, 1, 1)  # added with factor 0, so that the scale costs no pass of its own
        scores = torch.baddbmm(nothing, q, keys[:, block.looked_at].transpose(1, 2), beta=0, alpha=self.scale)
        by_query = scores.view(-1, block.size, scores.shape[-1])  # [heads, queries, keys]
        if self.window is not None and block.last > self.window:
            queries = torch.arange(block.depth, block.last, device=q.device)[:, None]
            distance = queries - torch.arange(block.first, block.last, device=q.device)
            by_query.masked_fill_((distance < 0) | (distance >= self.window), float("-inf"))
        else:
            future = torch.ones(block.size, block.size, dtype=torch.bool, device=q.device).triu_(1)
            by_query[:, :, -block.size :].masked_fill_(future, float("-inf"))
        return torch.softmax(scores, dim=-1)


@dataclass(frozen=True, slots=True)
class _Block:
    """Queries start to end of the row, the first at `depth`; they look at places first to last of their path."""

    start: int
    end: int
    depth: int
    first: int

    @property
    def size(self) -> int:
        return self.end - self.start

    @property
    def last(self) -> int:
        return self.depth + self.size

    @property
    def looked_at(self) -> slice:
        return slice(self.first, self.last)

    def folded(self, tensor: Tensor, key_heads: int) -> Tensor:
        """[key heads, rows, head_dim] of [heads, T, head_dim]: heads that share a key head, one after the other."""
        return tensor[:, self.start : self.end].reshape(key_heads, -1, tensor.shape[-1])


class _TreeAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, how: _How) -> Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.how = how
        heads, length, width = query.shape
        output = query.new_empty(length, heads, width)
        for segment in how.segments:
            keys, values = _path(key, segment.seen), _path(value, segment.seen)
            for block in how.blocks(segment):
                p = how.probabilities(block.folded(query, len(key)), keys, block)
                mixed = torch.bmm(p, values[:, block.looked_at])
                output[block.start : block.end] = mixed.view(heads, block.size, width).transpose(0, 1)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value = ctx.saved_tensors
        how: _How = ctx.how
        towards = gradients[0].transpose(0, 1)  # [heads, T, head_dim]
        to_query, to_key, to_value = torch.empty_like(query), torch.zeros_like(key), torch.zeros_like(value)
        for segment in how.segments:
            keys, values = _path(key, segment.seen), _path(value, segment.seen)
            to_keys, to_values = torch.zeros_like(keys), torch.zeros_like(values)
            for block in how.blocks(segment):
                part = block.looked_at
                q, g = block.folded(query, len(key)), block.folded(towards, len(key))
                p = how.probabilities(q, keys, block)
                to_values[:, part].baddbmm_(p.transpose(1, 2), g)
                to_p = torch.bmm(g, values[:, part].transpose(1, 2))
                to_scores = torch._softmax_backward_data(to_p, p, -1, p.dtype)
                to_q = torch.bmm(to_scores, keys[:, part])
                to_query[:, block.start : block.end] = to_q.view(len(query), block.size, -1)
                to_keys[:, part].baddbmm_(to_scores.transpose(1, 2), q, alpha=how.scale)
            _add_path(to_key, to_keys, segment.seen)
            _add_path(to_value, to_values, segment.seen)
        return to_query.mul_(how.scale), to_key, to_value, None


def _path(tensor: Tensor, runs: Sequence[Run]) -> Tensor:
    """[heads, keys, head_dim] of the runs of a row, one after the other; of one run, a view."""
    parts = [tensor[:, start:end] for start, end in runs]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _add_path(total: Tensor, parts: Tensor, runs: Sequence[Run]) -> None:
    """The opposite of `_path`: add to each place of the row what its place on the path has got."""
    lengths = [end - start for start, end in runs]
    for (start, end), part in zip(runs, parts.split(lengths, dim=1), strict=True):
        total[:, start:end] += part
