"""One weight path for every objective, on gathered action tokens only:

    loss = sum over t of  w_t * [ M_t * c_t * surrogate_t(A_t, r_t) + beta * kl_t - eta * H_t ]

w from the aggregation mode and counts over the whole optimiser step; M, what a correction keeps (0 or 1); c, its
detached weight. Observations and padding are not in these arrays, so nothing that stands there can leak in.

Policies: pi is being trained, old is what the ratio r = pi / old is clipped around, mu is what sampled the token.
    on_policy            one optimiser step consumes the batch: old is pi itself, detached. r is exactly 1, its gradient
                         is not 0, no extra forward pass, and rho = old / mu is corrected. With `old` given: decoupled.
    decoupled            old is the policy when the batch was frozen, computed again by the trainer and given. Clips
                         around it and corrects rho = old / mu (arXiv:2110.00641, 2505.24298).
    decoupled_loglinear  the same with old interpolated between mu and pi by the age of each token (arXiv:2512.06547).
    bypass               old is mu. The ratio already corrects the mismatch, so a correction on top is refused.
    imitation            nobody's samples: no mu, no ratio, no correction. For scripted episodes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from palestra.envs.errors import ConfigError
from palestra.rl.action_tokens import ActionTokens
from palestra.rl.aggregation import Aggregation
from palestra.rl.corrections import Correction, Mismatch, TokenTIS
from palestra.rl.kl import Kl, kl_per_token
from palestra.rl.measures import (
    correction_sums,
    largest,
    mismatch_maxima,
    mismatch_sums,
    ratio_maxima,
    ratio_minima,
    ratio_sums,
)
from palestra.rl.ratio import log_ratio, proximal_loglinear
from palestra.rl.segments import Level, Segments
from palestra.rl.surrogates import DPPO, PPOClip, Reinforce, Step, Surrogate

Mode = Literal["on_policy", "bypass", "decoupled", "decoupled_loglinear", "imitation"]


@dataclass(frozen=True, slots=True)
class Objective:
    """Settings of the loss. Objective() is PPO clip 0.2 / 0.28 with dual clip 3, token TIS capped at 2, token-mean."""

    surrogate: Surrogate = PPOClip()
    correction: Correction | None = TokenTIS()
    mode: Mode = "on_policy"
    ratio: Level = "token"
    """What r is of: the token, or the geometric mean over its turn or trajectory, in the token form of GSPO."""
    aggregation: Aggregation = Aggregation()
    kl: Kl = "k3_score"
    """reward_k1: taken off the reward before credit, and no term here."""
    kl_coefficient: float = 0.0
    """beta: weight of the KL to the reference policy. 0 needs no reference pass."""
    entropy_coefficient: float = 0.0
    """eta: weight of the entropy bonus at action positions, of the tempered distribution."""
    label_smoothing: float = 0.0
    """Imitation only: the share of each target that goes to the whole vocabulary alike (arXiv:1512.00567)."""
    updates_per_version: int = 1
    """Optimiser steps between two publishes: decoupled_loglinear counts age in versions that engines had."""

    def __post_init__(self) -> None:
        for sentence in _wrong(self):
            raise ConfigError(sentence)

    def check_updates(self, updates: int) -> None:
        """Raise ConfigError when a batch cannot serve so many optimiser steps."""
        if updates > 1 and isinstance(self.surrogate, Reinforce):
            raise ConfigError(
                f"surrogate reinforce with {updates} optimiser steps per batch: from the second on, the batch is of "
                "another policy, and it has no ratio to say so; use the surrogate importance_sampling or one step"
            )

    @property
    def kl_in_loss(self) -> bool:
        """Whether the loss needs the reference's log-probabilities."""
        return self.kl_coefficient > 0 and self.kl != "reward_k1"

    @property
    def kl_in_reward(self) -> bool:
        """Whether credit needs `kl.reward_penalties` of every token."""
        return self.kl_coefficient > 0 and self.kl == "reward_k1"

    @property
    def learns_without_signal(self) -> bool:
        """Whether tokens of zero advantage have a gradient: then their groups cannot be dropped."""
        return self.kl_in_loss or self.entropy_coefficient > 0


@dataclass(frozen=True, slots=True)
class Terms:
    """The loss, and detached sums and extremes over the tokens, from which metrics are made once all are in."""

    loss: Tensor
    sums: Mapping[str, Tensor] = field(default_factory=dict)
    maxima: Mapping[str, Tensor] = field(default_factory=dict)
    minima: Mapping[str, Tensor] = field(default_factory=dict)


def loss_terms(
    objective: Objective,
    logprobs: Tensor,
    tokens: ActionTokens,
    *,
    old: Tensor | None = None,
    reference: Tensor | None = None,
    entropy: Tensor | None = None,
    version: int | None = None,
) -> Terms:
    """The loss of one micro-batch; micro-batches are summed, never averaged.

    logprobs [N] of pi, differentiable. `old` [N] is the policy when the batch was frozen: needed in mode decoupled,
    welcome in on_policy, unread in the others, which have their own. `reference` [N] is needed with a KL in the loss,
    `entropy` [N] (differentiable) with an entropy bonus, `version` of the weights when the batch was frozen in mode
    decoupled_loglinear; given in any mode, it is what staleness is counted from.
    """
    old = _old_policy(objective, logprobs, tokens, old, version)
    segments = None if objective.ratio == "token" else Segments.of(objective.ratio, tokens.trajectory, tokens.turn)
    log_r = log_ratio(logprobs, old, segments)
    per_token, sums = objective.surrogate.per_token(Step(logprobs, old, log_r, tokens.advantages))
    maxima: dict[str, Tensor] = {}
    minima: dict[str, Tensor] = {}
    kept = None
    if objective.mode != "imitation":
        mismatch = _mismatch(logprobs, tokens, old)
        # where old is made of mu, what mismatches is pi
        gap = mismatch.log_drift if objective.mode in ("bypass", "decoupled_loglinear") else mismatch.log_rho
        sums |= ratio_sums(log_r) | mismatch_sums(gap)
        maxima |= ratio_maxima(log_r) | mismatch_maxima(gap, mismatch.segments("turn"))
        minima |= ratio_minima(log_r)
        if version is not None:
            staleness = (version - tokens.version).to(logprobs.dtype)
            sums["staleness"], maxima["staleness_max"] = staleness.sum(), largest(staleness)
        if objective.correction is not None:
            corrected = objective.correction.of(mismatch)
            sums |= correction_sums(corrected, mismatch)
            per_token, kept = corrected.weights * per_token, corrected.kept
    if kept is not None:
        # select, since 0 * inf is not 0; here and not in the weights, since a KL and the entropy are of all tokens
        per_token = torch.where(kept, per_token, torch.zeros_like(per_token))
    if objective.kl_coefficient > 0 and objective.kl != "reward_k1":
        kl = kl_per_token(objective.kl, logprobs, _needed(reference, "reference log-probabilities", "KL"), old)
        sums["kl_to_reference"] = kl.detach().sum()
        per_token = per_token + objective.kl_coefficient * kl
    if objective.entropy_coefficient > 0:
        per_token = per_token - objective.entropy_coefficient * _differentiable(entropy, logprobs)
    if entropy is not None:
        sums["entropy"] = entropy.detach().sum()
    sums["logprob"] = logprobs.detach().sum()
    return Terms((tokens.weights * per_token).sum(), sums, maxima, minima)


def _old_policy(
    objective: Objective, logprobs: Tensor, tokens: ActionTokens, old: Tensor | None, version: int | None
) -> Tensor:
    """[N], detached: what the ratio is taken to."""
    if objective.mode == "bypass":
        return tokens.sampling_logprobs
    if not logprobs.numel():
        return logprobs.detach()
    if objective.mode == "decoupled_loglinear":
        if version is None:
            raise ValueError("mode decoupled_loglinear interpolates by version; pass that of the policy's weights")
        updates = objective.updates_per_version
        return proximal_loglinear(logprobs, tokens.sampling_logprobs, tokens.version, version, updates)
    if old is None and objective.mode == "decoupled":
        raise ValueError("mode decoupled clips around the policy when the batch was frozen; compute and pass `old`")
    return logprobs.detach() if old is None else old.detach()


def _mismatch(logprobs: Tensor, tokens: ActionTokens, old: Tensor) -> Mismatch:
    log_rho, log_drift = old - tokens.sampling_logprobs, (logprobs - tokens.sampling_logprobs).detach()
    return Mismatch(log_rho, log_drift, tokens.advantages, tokens.trajectory, tokens.turn)


def _needed(value: Tensor | None, what: str, why: str) -> Tensor:
    if value is None:
        raise ValueError(f"{what} are missing, but the objective has a {why} term; compute and pass them")
    return value


def _differentiable(entropy: Tensor | None, logprobs: Tensor) -> Tensor:
    """A bonus without gradient changes the loss that is shown and nothing that is learned."""
    found = _needed(entropy, "entropies", "entropy bonus")
    if logprobs.requires_grad and not found.requires_grad:
        raise ValueError("the entropies have no gradient, so the bonus would teach nothing; compute them with one")
    return found


def _wrong(objective: Objective) -> Iterator[str]:
    """A sentence for everything in the settings that is known to be wrong together."""
    mode, surrogate = objective.mode, objective.surrogate
    if mode in ("bypass", "imitation") and objective.correction is not None:
        yield (
            f"mode {mode} with a correction: the ratio to the sampling policy already corrects the mismatch "
            "(bypass), or there is none (imitation); set the correction to none or the mode to on_policy"
        )
    if mode == "imitation" and not isinstance(surrogate, Reinforce):
        yield "mode imitation has no ratio to clip; use the surrogate reinforce"
    if isinstance(surrogate, Reinforce) and mode not in ("on_policy", "imitation"):
        yield (
            f"surrogate reinforce in mode {mode}: it has no ratio, so samples of another policy would count as the "
            "policy's own; use the surrogate importance_sampling, or mode on_policy with a correction"
        )
    if objective.ratio != "token":
        if objective.aggregation.mode == "token-sum":
            yield (
                f"ratio {objective.ratio} with aggregation token-sum: the ratio is a mean over the tokens of its "
                "segment, and their sum would count it once for each token; use seq-mean-token-mean"
            )
        if isinstance(surrogate, Reinforce | DPPO):
            yield (
                f"ratio {objective.ratio} with surrogate {type(surrogate).__name__}: reinforce has no ratio, and DPPO "
                "judges the probability of a token; use ratio token"
            )
    if objective.kl == "k1" and objective.kl_coefficient > 0:
        yield (
            "kl k1 as a term of the loss has zero expected gradient, so it restrains nothing; use reward_k1, which "
            "has it in the reward, or k3_score or k2 in the loss"
        )
    if mode == "imitation" and objective.kl_in_reward:
        yield "kl reward_k1 in mode imitation: it is taken off a reward, and there is none; use k2 or k3_score"
    if not 0 <= objective.label_smoothing < 1 or (objective.label_smoothing and mode != "imitation"):
        yield (
            f"label_smoothing is {objective.label_smoothing} in mode {mode}; it is 0 or more, below 1, and for "
            "imitation alone"
        )
    for name, value in (("kl", objective.kl_coefficient), ("entropy", objective.entropy_coefficient)):
        if not 0 <= value < math.inf:
            yield f"the {name} coefficient is {value}; use 0 (off) or a positive number"
