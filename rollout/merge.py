"""Adapter into weights: a fresh float32 copy of the base plus the update, cast once. The base is only ever read.

Adding and subtracting updates in place would round the base away a little more with every version.
"""

from __future__ import annotations

import torch
from torch import Tensor

from palestra.rollout.adapters import Factors


def merged(weight: Tensor, factors: Factors) -> Tensor:
    """weight + scale * b @ a, computed in float32 and cast once to the weight's dtype; a new tensor [out, in].

    Raises ValueError when the shapes do not fit.
    """
    update = delta(factors, weight.device)  # [out, in]
    if update.shape != weight.shape:
        raise ValueError(f"factors make an update of {tuple(update.shape)} for a weight of {tuple(weight.shape)}")
    return update.add_(weight.float()).to(weight.dtype)


def delta(factors: Factors, device: torch.device | str = "cpu") -> Tensor:
    """scale * b @ a in float32, [out, in]."""
    a = torch.tensor(factors.a, device=device)  # [rank, in]; a copy: factors may be read-only views
    b = torch.tensor(factors.b, device=device)  # [out, rank]
    return (b @ a).mul_(factors.scale)


def share_lost(weight: Tensor, result: Tensor, factors: Factors) -> float:
    """How much of the update the cast took: |received - meant| / |meant|, 0 to about 1 (all of it).

    In bfloat16 an update below half a unit in the last place of its weight disappears.
    """
    meant = delta(factors, weight.device)
    norm = meant.norm()
    if norm == 0:
        return 0.0
    received = result.float() - weight.float()
    return float((received - meant).norm() / norm)
