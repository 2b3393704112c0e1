"""What one pass computes, as one module: sharded weights are gathered when it is called, around all that needs them."""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn
from transformers import PreTrainedModel

from palestra.rl.batch import PackedRow
from palestra.rl.head import Head
from palestra.rl.logprobs import predictor_states, score_row

Hidden = Literal["drop", "keep", "only"]


class Scorer(nn.Module):
    """A row to the log-probabilities of its action tokens, body and head in one call."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, row: PackedRow, entropy_gradient: bool = False, smoothing: float = 0.0, hidden: Hidden = "drop"
    ) -> tuple[Tensor, ...]:
        """Log-probability and entropy of each action token, [N] each, in plain tensors, which hooks can see.

        `hidden`: "keep" the states that predict the tokens as a third, [N, hidden], or give "only" them.
        """
        if hidden == "only":
            return (predictor_states(self.model, row),)
        head = Head.of(self.model)  # anew: the gathered weights are other tensors than those of a moment ago
        scored = score_row(
            self.model,
            head,
            row,
            entropy_gradient=entropy_gradient,
            smoothing=smoothing,
            keep_hidden=hidden == "keep",
        )
        plain = (scored.logprobs, scored.entropy)
        return plain if scored.hidden is None else (*plain, scored.hidden)
