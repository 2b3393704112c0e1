"""LoRA on vLLM's CPU backend as plain matrix products.

vLLM's own CPU path copies A and B once per token, which makes generation several times slower; and for tokens without
an adapter its index -1 means the last slot. Here the rows of each adapter go through two products, others are left be.
"""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

Rows = list[tuple[int, Tensor | None]]
"""(slot of an adapter, its rows) for the adapters of one step; None: all rows."""


def install(wrapper: Any) -> None:
    """Replace the linear operations of one CPU punica wrapper, on that object alone."""
    update_metadata = wrapper.update_metadata

    def update(self: Any, *args: Any, **kwargs: Any) -> None:
        update_metadata(*args, **kwargs)
        self.palestra_token_rows = _rows(self.token_lora_indices)
        self.palestra_sampled_rows = _rows(self.sampler_indices)

    wrapper.update_metadata = types.MethodType(update, wrapper)
    wrapper.add_lora_linear = types.MethodType(_add_lora_linear, wrapper)
    wrapper.add_lora_logits = types.MethodType(_add_lora_logits, wrapper)
    wrapper.add_lora_embedding = types.MethodType(_add_lora_embedding, wrapper)


def _rows(slots: Tensor) -> Rows:
    present = torch.unique(slots).tolist()
    if len(present) == 1:
        return [(present[0], None)] if present[0] >= 0 else []
    return [(slot, (slots == slot).nonzero()[:, 0]) for slot in present if slot >= 0]


def _add_lora_linear(
    self: Any,
    y: Tensor,  # [tokens, out], changed in place
    x: Tensor,  # [tokens, in]
    lora_a_stacked: Sequence[Tensor],  # per slice [slots, 1, rank, in]
    lora_b_stacked: Sequence[Tensor],  # per slice [slots, 1, out of the slice, rank]
    scale: float,
    output_slices: Sequence[int],
    **_: Any,
) -> None:
    y, x = y.view(-1, y.shape[-1]), x.view(-1, x.shape[-1])
    for slot, rows in self.palestra_token_rows:
        offset = 0
        for a, b, width in zip(lora_a_stacked, lora_b_stacked, output_slices, strict=True):
            _add(y[:, offset : offset + width], x, a[slot, 0], b[slot, 0], scale, rows)
            offset += width


def _add_lora_logits(
    self: Any, y: Tensor, x: Tensor, lora_a_stacked: Tensor, lora_b_stacked: Tensor, scale: float, **_: Any
) -> None:
    y, x = y.view(-1, y.shape[-1]), x.view(-1, x.shape[-1])
    for slot, rows in self.palestra_sampled_rows:
        b = lora_b_stacked[slot, 0]  # [vocab, rank]
        _add(y[:, : b.shape[0]], x, lora_a_stacked[slot, 0], b, scale, rows)


def _add_lora_embedding(self: Any, y: Tensor, x: Tensor, lora_b_stacked: Tensor, **_: Any) -> None:
    for slot, rows in self.palestra_token_rows:  # x: A has been looked up already
        where = slice(None) if rows is None else rows
        y[where] += x[where] @ lora_b_stacked[slot, 0].T


def _add(y: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: float, rows: Tensor | None) -> None:
    if rows is None:
        y.addmm_(x @ a.T, b.T, alpha=scale)
    else:
        y[rows] += scale * ((x[rows] @ a.T) @ b.T)
