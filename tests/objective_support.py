"""The golden batch as the objective sees it: action tokens alone, poison elsewhere, dealt over micro-batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from learning_support import poisoned, shared_batch
from palestra.rl.action_tokens import ActionTokens
from palestra.rl.aggregation import Aggregation, token_weights
from palestra.rl.corrections import Mismatch
from palestra.rl.objective import Objective, loss_terms
from palestra.rl.ranks import Ranks
from palestra.rl.segments import Segments
from palestra.rl.tally import Tally

TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-6}
MICRO_BATCHES = {"one": [[0, 1, 2, 3]], "row by row": [[0], [1], [2], [3]], "out of order": [[2, 0], [3, 1]]}
ALL = MICRO_BATCHES["one"][0]
DTYPES = [torch.float64, torch.float32]


@dataclass(frozen=True)
class Found:
    """What a run gives, in the shape of the golden tables."""

    loss: float
    gradient: np.ndarray  # towards new_logp, masked places included
    metrics: dict[str, float]


def tokens_of_one(weights: Tensor, advantages: Tensor, mu: Tensor) -> ActionTokens:
    """Action tokens of one turn of one trajectory."""
    same = torch.zeros(len(weights), dtype=torch.int64)
    return ActionTokens(weights, advantages, mu, same, same, same)


class Gathered:
    """One row is one trajectory; turns and versions are zero unless the case has them."""

    def __init__(self, dtype: torch.dtype, poison: float, how: Aggregation | None = None, **overrides: Any) -> None:
        batch = shared_batch() | overrides
        self.mask = np.array(batch["mask"], bool)
        rows = np.repeat(np.arange(4)[:, None], 7, axis=1)
        weights = np.zeros(self.mask.shape)
        index = rows[self.mask].astype(np.int32)
        weights[self.mask] = token_weights(how or Aggregation(), index, index, index // 2)
        self.weights = torch.tensor(weights, dtype=dtype)
        self.new = torch.tensor(poisoned(batch["new_logp"], poison), dtype=dtype, requires_grad=True)
        self.old, self.mu, self.ref, self.advantages = (
            torch.tensor(poisoned(batch[key], poison), dtype=dtype)
            for key in ("old_logp", "rollout_logp", "ref_logp", "advantages")
        )
        zeros = np.zeros_like(rows).tolist()
        self.row = torch.from_numpy(rows)
        self.turn = torch.tensor(batch.get("turn", zeros))
        self.version = torch.tensor(batch.get("token_version", zeros))

    def part(self, table: Tensor, rows: list[int]) -> Tensor:
        """[N] of the action tokens of these rows."""
        return table[rows][torch.from_numpy(self.mask[rows])]

    def tokens(self, rows: list[int]) -> ActionTokens:
        tables = (self.weights, self.advantages, self.mu, self.row, self.turn, self.version)
        return ActionTokens(*(self.part(table, rows) for table in tables))

    def mismatch(self) -> Mismatch:
        """Of the whole batch, with old as in the golden table."""
        new, old, mu = (self.part(table, ALL) for table in (self.new.detach(), self.old, self.mu))
        return Mismatch(old - mu, new - mu, *(self.part(t, ALL) for t in (self.advantages, self.row, self.turn)))

    def segments(self, level: Any) -> Segments:
        return Segments.of(level, self.part(self.row, ALL), self.part(self.turn, ALL))

    def table(self, values: Tensor) -> np.ndarray:
        """Action tokens put back, 0 elsewhere."""
        found = np.zeros(self.mask.shape)
        found[self.mask] = values.detach().numpy()
        return found

    def run(
        self, objective: Objective, split: list[list[int]], *, old: str | None = "old", version: int | None = None
    ) -> Found:
        """Loss, gradient and metrics, with micro-batches summed."""
        nothing = self.new.new_zeros(0)
        empty = tokens_of_one(nothing, nothing, nothing)
        tally = Tally(loss_terms(objective, nothing, empty, reference=nothing, version=version))
        total = torch.zeros((), dtype=self.new.dtype)
        for rows in split:
            terms = loss_terms(
                objective,
                self.part(self.new, rows),
                self.tokens(rows),
                old=None if old is None else self.part(getattr(self, old), rows),
                reference=self.part(self.ref, rows),
                version=version,
            )
            tally.add(terms)
            total = total + terms.loss
        total.backward()
        assert self.new.grad is not None
        return Found(float(total.detach()), self.new.grad.numpy(), tally.metrics(int(self.mask.sum()), Ranks()))
