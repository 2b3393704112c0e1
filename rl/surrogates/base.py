"""What a surrogate is: the per-token loss from log-probabilities, a ratio and an advantage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Step:
    """What a surrogate sees of each action token, [N] each."""

    logprobs: Tensor  # of pi, differentiable
    old: Tensor  # of the policy that the ratio is taken to, detached
    log_ratio: Tensor  # log pi - log old of the token or its segment, differentiable through pi
    advantages: Tensor


class Surrogate(Protocol):
    """Frozen settings of one published loss."""

    def per_token(self, step: Step) -> tuple[Tensor, dict[str, Tensor]]:
        """[N] losses to minimise, and sums over the tokens of what happened to them, detached."""
        ...
