"""Token by token with a transformers model: prefill of one row, and a batch that rows join and leave at every step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from palestra.envs.errors import EngineError
from palestra.rollout.engines.kept import KeyValues

SCORE_CHUNK = 256
"""Tokens per forward pass of `score`: bounds the logits held at once to [256, vocab]."""


def prefill(model: PreTrainedModel, ids: Sequence[int], kept: KeyValues | None) -> tuple[Tensor, KeyValues]:
    """Logits after `ids` [vocab] and the keys and values of all of them; `kept` holds those of a prefix."""
    cache, start = _cache(kept or []), kept[0][0].shape[2] if kept else 0
    logits = _forward(model, ids[start:], cache, start, last_only=True)
    return logits[-1], _layers(cache)


def score(model: PreTrainedModel, ids: Sequence[int]) -> Tensor:
    """log p(ids[t] | ids[:t]) at temperature 1, [len(ids) - 1] float32, in chunks."""
    cache, parts = _cache([]), []
    for start in range(0, len(ids) - 1, SCORE_CHUNK):
        chunk = ids[start : min(start + SCORE_CHUNK, len(ids) - 1)]
        table = torch.log_softmax(_forward(model, chunk, cache, start, last_only=False).float(), dim=-1)
        targets = torch.tensor(list(ids[start + 1 : start + 1 + len(chunk)]), device=table.device)
        parts.append(table.gather(-1, targets[:, None])[:, 0])
    return torch.cat(parts)


@dataclass(slots=True)
class Batch:
    """Rows that decode together. Shorter rows are padded on the left, masked out and numbered past by positions.

    layers: per layer keys and values [rows, heads, width, size]; lengths [rows]: how much of width is a row's own.
    """

    layers: KeyValues
    lengths: list[int]

    @classmethod
    def empty(cls) -> Batch:
        """A batch without rows."""
        return cls([], [])

    def join(self, layers: KeyValues) -> None:
        """Add one prefilled row at the end."""
        length = layers[0][0].shape[2]
        width = max([length, *self.lengths])
        if self.lengths:
            layers = [
                (torch.cat([_fit(k, width), _fit(new_k, width)]), torch.cat([_fit(v, width), _fit(new_v, width)]))
                for (k, v), (new_k, new_v) in zip(self.layers, layers, strict=True)
            ]
        self.layers = layers
        self.lengths.append(length)

    def leave(self, staying: Sequence[int]) -> None:
        """Keep only these rows, in this order, and no more width than they need."""
        self.lengths = [self.lengths[row] for row in staying]
        if not staying:
            self.layers = []
            return
        rows, width = list(staying), max(self.lengths)
        self.layers = [(_fit(k[rows], width), _fit(v[rows], width)) for k, v in self.layers]

    def row(self, index: int) -> KeyValues:
        """One row's own keys and values, copied."""
        length = self.lengths[index]
        return [(_fit(k[[index]], length), _fit(v[[index]], length)) for k, v in self.layers]

    def step(self, model: PreTrainedModel, last_ids: Sequence[int]) -> Tensor:
        """Run each row's newest token; logits of the next ones [rows, vocab]."""
        device = model.device
        lengths = torch.tensor(self.lengths, device=device)  # [rows]
        width = int(self.layers[0][0].shape[2])
        own = torch.arange(width + 1, device=device)[None, :] >= (width - lengths)[:, None]  # [rows, width + 1]
        cache = _cache(self.layers)
        output = model(
            input_ids=torch.tensor(list(last_ids), device=device)[:, None],
            attention_mask=own.long(),
            position_ids=lengths[:, None],
            past_key_values=cache,
            use_cache=True,
        )
        self.layers = _layers(cache)
        self.lengths = [length + 1 for length in self.lengths]
        logits: Tensor = output.logits[:, -1]
        return logits


def _forward(model: PreTrainedModel, ids: Sequence[int], cache: DynamicCache, start: int, *, last_only: bool) -> Tensor:
    device, stop = model.device, start + len(ids)
    output = model(
        input_ids=torch.tensor([list(ids)], device=device),
        attention_mask=torch.ones((1, stop), dtype=torch.long, device=device),
        position_ids=torch.arange(start, stop, device=device)[None],
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1 if last_only else 0,  # 0 is all
    )
    logits: Tensor = output.logits[0]  # [1 or len(ids), vocab]
    return logits


def _cache(layers: KeyValues) -> DynamicCache:
    cache = DynamicCache()
    for index, (keys, values) in enumerate(layers):
        cache.update(keys, values, index)
    return cache


def _layers(cache: DynamicCache) -> KeyValues:
    layers = []
    for layer in cache.layers:
        if not isinstance(layer, DynamicLayer) or layer.keys is None or layer.values is None:
            raise EngineError(
                f"this model's cache is a {type(layer).__name__}; only plain attention is served, use vllm"
            )
        layers.append((layer.keys, layer.values))
    return layers


def _fit(states: Tensor, width: int) -> Tensor:
    """Padded or cut on the left to `width` tokens."""
    return pad(states, (0, 0, width - states.shape[2], 0)).contiguous()  # a negative pad cuts
