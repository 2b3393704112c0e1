"""How far the policy may drift from a reference: per-token KL estimates with x = log pi - log ref.

    k2              x^2 / 2                  true gradient on-policy
    k3_score        k3 * pi / sg(pi)         unbiased value and true gradient: the score function factor adds what
                                             differentiating k3 = exp(-x) - 1 + x alone misses
    k3_is           k3 * pi / old            the same for samples of another policy, old (DeepSeek-V3.2,
                                             arXiv:2512.02556); k3_score where old is pi
    k3_is_detached  k3 * sg(pi / old)        right in value; its gradient misses the score function part
    k3              exp(-x) - 1 + x          as published with GRPO: its gradient descends the forward KL(ref, pi) and
                                             explodes where ref is much larger than pi
    k3_k2_gradient  value of k3, gradient of k2
    k1              x                        unbiased in value; as a loss it has zero expected gradient, so no run uses
                                             it there, only in the reward

(arXiv:2510.01555, 2506.09477)
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Estimate = Literal["k1", "k2", "k3", "k3_score", "k3_is", "k3_is_detached", "k3_k2_gradient"]
Kl = Literal["reward_k1", "k1", "k2", "k3", "k3_score", "k3_is", "k3_is_detached", "k3_k2_gradient"]

MAX_EXPONENT = 20.0
"""Only the argument of exp is bounded: clamping the output would remove the gradient where the drift is largest."""


def kl_per_token(kind: Estimate, logprobs: Tensor, reference: Tensor, old: Tensor | None = None) -> Tensor:
    """[N] estimates of KL(pi, ref) from log-probabilities [N]; differentiable in `logprobs`.

    `old` [N], detached, is what sampled the tokens; needed by k3_is and k3_is_detached alone.
    """
    x = logprobs - reference
    if kind == "k1":
        return x
    if kind == "k2":
        return x.square() / 2
    k3 = torch.exp((-x).clamp(max=MAX_EXPONENT)) - 1 + x
    if kind == "k3":
        return k3
    if kind == "k3_k2_gradient":
        k2 = x.square() / 2
        return k3.detach() + (k2 - k2.detach())
    if kind == "k3_score":
        return k3 * torch.exp(logprobs - logprobs.detach())
    if old is None:
        raise ValueError(f"the KL estimate {kind} weighs by pi / old; pass the old log-probabilities")
    weight = torch.exp((logprobs - old).clamp(-MAX_EXPONENT, MAX_EXPONENT))
    return k3 * (weight.detach() if kind == "k3_is_detached" else weight)


def clamped(kind: Literal["k1", "k3"], logprobs: Tensor, reference: Tensor, argument: float, output: float) -> Tensor:
    """[N] estimates with x bounded to +-argument and the result to +-output, as some trainers have it.

    To compare with their logs. The bound on the output has no gradient where the policy has drifted furthest, so no
    run uses it.
    """
    x = (logprobs - reference).clamp(-argument, argument)
    estimate = x if kind == "k1" else torch.exp(-x) - 1 + x
    return estimate.clamp(-output, output)


def reward_penalties(
    logprobs: NDArray[np.floating], reference: NDArray[np.floating], coefficient: float
) -> NDArray[np.float64]:
    """[N] float64: coefficient * (log pi - log ref), to be taken off each token's reward before credit.

    Numbers, not a part of the graph: in the reward k1 gives the true gradient, through the score function of the loss.
    """
    return coefficient * (logprobs.astype(np.float64) - reference.astype(np.float64))
