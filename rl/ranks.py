"""The processes that share one optimiser step. Alone, everything here is the identity."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, distributed, nn

Row = TypeVar("Row")


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among `size`. With more than one, torch.distributed must be initialised.

    Gradients are summed, never averaged: the weights of the action tokens already hold the counts of the whole step,
    so there is nothing to multiply by the number of ranks.
    """

    rank: int = 0
    size: int = 1

    @classmethod
    def current(cls) -> Ranks:
        """Of the initialised process group, or alone."""
        if not distributed.is_initialized():
            return cls()
        return cls(distributed.get_rank(), distributed.get_world_size())

    def share(self, rows: Sequence[Row]) -> Sequence[Row]:
        """This rank's rows: every size-th, as `pack(..., ranks=size)` has dealt them, as many on each rank.

        Raises ValueError when they were dealt for another number of ranks: some would wait for the others for ever.
        """
        if len(rows) % self.size:
            raise ValueError(f"{len(rows)} rows for {self.size} ranks; pack the batch with ranks={self.size}")
        return rows[self.rank :: self.size]

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Add up gradients over ranks, in one exchange per dtype; one that has none, because its rows were empty, adds
        zeros."""
        if self.size == 1:
            return
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            by_dtype.setdefault(parameter.grad.dtype, []).append(parameter.grad)
        for gradients in by_dtype.values():
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
            distributed.all_reduce(flat)
            parts = flat.split([gradient.numel() for gradient in gradients])
            for gradient, summed in zip(gradients, parts, strict=True):
                gradient.copy_(summed.view_as(gradient))

    def sum(self, values: Tensor) -> Tensor:
        """Sums over ranks, in place."""
        if self.size > 1:
            distributed.all_reduce(values)
        return values

    def max(self, values: Tensor) -> Tensor:
        """Maxima over ranks, in place."""
        if self.size > 1:
            distributed.all_reduce(values, op=distributed.ReduceOp.MAX)
        return values
