"""From logits to a token and its log-probability, one row per request, each with its own random stream."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def log_probs(logits: Tensor, temperatures: Tensor) -> Tensor:
    """log-softmax of float32 logits over temperature, [rows, vocab]; temperature 0 (greedy) counts as 1."""
    divisors = torch.where(temperatures > 0, temperatures, torch.ones_like(temperatures))  # [rows]
    return torch.log_softmax(logits.float() / divisors[:, None], dim=-1)


def draw(logits: Tensor, temperatures: Sequence[float], streams: Sequence[torch.Generator]) -> tuple[Tensor, Tensor]:
    """A token per row and its log-probability under the distribution it was drawn from: ids [rows], logprobs [rows].

    Sampling inverts the cumulative distribution at one uniform number of the row's stream, so a row's tokens do not
    depend on which rows share its batch (up to the last bits of its logits).
    """
    heat = torch.tensor(list(temperatures), dtype=torch.float32, device=logits.device)  # [rows]
    table = log_probs(logits, heat)  # [rows, vocab]
    uniform = torch.stack([torch.rand((), generator=stream, dtype=torch.float64) for stream in streams])
    steps = table.double().exp().cumsum(-1)  # [rows, vocab]; float64: float32 sums of 150k terms end short of 1
    aims = uniform.to(logits.device)[:, None] * steps[:, -1:]  # [rows, 1], below the last step
    drawn = torch.searchsorted(steps, aims, right=True)[:, 0]  # right: never a token of probability 0
    ids = torch.where(heat > 0, drawn.clamp_(max=table.shape[-1] - 1), table.argmax(-1))
    return ids, table.gather(-1, ids[:, None])[:, 0]
