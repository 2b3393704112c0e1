"""The plain way to log-probabilities: weights merged by hand, one padded float32 forward pass, nothing kept."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from palestra.rollout.adapters import Adapter
from palestra.rollout.types import Float32

PAD = 0


class Reference:
    """A model with an adapter merged in float64, cast to float32."""

    def __init__(self, folder: Path, adapter: Adapter | None = None) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        for name, factors in (adapter.factors if adapter else {}).items():
            weight = self._model.get_submodule(name).weight
            update = factors.scale * factors.b.astype(np.float64) @ factors.a.astype(np.float64)
            with torch.no_grad():
                weight.copy_((weight.double() + torch.from_numpy(update)).float())

    @torch.inference_mode()
    def logprobs(self, rows: Sequence[Sequence[int]], temperature: float = 1.0) -> list[Float32]:
        """log p(ids[t] | ids[:t]) for t >= 1 of each row, in one right-padded batch."""
        width = max(map(len, rows))
        ids = torch.tensor([[*row, *[PAD] * (width - len(row))] for row in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
        table = torch.log_softmax(self._model(input_ids=ids, attention_mask=mask).logits / temperature, dim=-1)
        picked = table[:, :-1].gather(-1, ids[:, 1:, None])[..., 0].numpy()
        return [picked[i, : len(row) - 1] for i, row in enumerate(rows)]

    @torch.inference_mode()
    def greedy(self, prompt: Sequence[int], length: int) -> list[int]:
        """The most likely continuation, token by token."""
        ids = list(prompt)
        for _ in range(length):
            ids.append(int(self._model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
        return ids[len(prompt) :]
