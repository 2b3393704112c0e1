"""Whether two computations of one model agree, whatever its precision."""

from __future__ import annotations

import torch
from torch import Tensor

_EXACT, _HALF = 1e-3, 0.25
"""Allowed total variation. In bfloat16 a right model of 30 layers has 0.05, one that looks elsewhere 0.5 and more."""


def variation(theirs: Tensor, ours: Tensor) -> float:
    """Mean total variation, 0 to 1, between the next tokens' distributions of logits [n, vocab] each.

    Log-probabilities would not do: those of the least likely words of a large vocabulary differ by rounding alone.
    """
    return float((torch.softmax(theirs.float(), -1) - torch.softmax(ours.float(), -1)).abs().sum(-1).mean()) / 2


def allowed_variation(dtype: torch.dtype) -> float:
    """What rounding alone may come to: 0.001, or 0.25 in half precision."""
    return _EXACT if dtype in (torch.float32, torch.float64) else _HALF
