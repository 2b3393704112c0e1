"""Action tokens in segments: each token by itself, its turn, or its trajectory. A segment is whole in a micro-batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Level = Literal["token", "turn", "sequence"]


@dataclass(frozen=True, slots=True)
class Segments:
    """Which of S segments each of N tokens is in. Segments(tensor([0, 0, 1]), tensor([2, 1]))."""

    index: Tensor  # [N] int64, 0 to S - 1
    lengths: Tensor  # [S] int64, at least 1 each

    @classmethod
    def of(cls, level: Level, trajectory: Tensor, turn: Tensor) -> Segments:
        """From [N] int64 each; `turn` counts within the trajectory."""
        if level == "token" or not trajectory.numel():
            return cls(torch.arange(len(trajectory), device=trajectory.device), torch.ones_like(trajectory))
        # one number per turn of one trajectory: no two trajectories share any, whatever their own numbers are
        name = trajectory if level == "sequence" else trajectory * (turn.max() - turn.min() + 1) + (turn - turn.min())
        _, index, lengths = torch.unique(name, return_inverse=True, return_counts=True)
        return cls(index, lengths)

    def sum(self, values: Tensor) -> Tensor:
        """[S] sums of [N] values; differentiable."""
        return values.new_zeros(len(self.lengths)).index_add(0, self.index, values)

    def mean(self, values: Tensor) -> Tensor:
        """[S] means of [N] values; differentiable."""
        return self.sum(values) / self.lengths

    def spread(self, per_segment: Tensor) -> Tensor:
        """[N]: each token's value of its segment, from [S]."""
        return per_segment[self.index]
