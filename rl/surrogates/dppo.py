"""DPPO (arXiv:2602.04879): a token leaves the loss when its probability, not its ratio, has moved too far already.

A ratio of 2 is nothing for a token of probability 0.001 and a lot for one of 0.4. Both forms look at the sampled token
against all others: total variation |p - q|, or the KL of the two Bernoulli distributions. Only moves in the direction
of the advantage are stopped; what went astray may come back. The ratio stays as a detached, capped weight.

Differs from the paper: the cap on the ratio is a setting; the divergence over the top tokens is not offered, since it
needs more than the sampled token's probability from the engine.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from palestra.envs.errors import ConfigError
from palestra.rl.surrogates.base import Step

LEAST = 1e-8
"""Of the probability of all other tokens, whose logarithm is taken."""


@dataclass(frozen=True, slots=True)
class DPPO(ABC):
    """-keep sg(min(r, max_ratio)) A log pi. keep is 0 where A > 0 and p - q is positive with a divergence above `high`,
    and where A < 0 and p - q is negative with a divergence above `low`."""

    low: float
    high: float
    max_ratio: float | None = 20.0

    def __post_init__(self) -> None:
        if not (self.low > 0 and self.high > 0):
            raise ConfigError(f"dppo_low is {self.low} and dppo_high {self.high}; both bound a divergence: above 0")
        if self.max_ratio is not None and not self.max_ratio > 1:
            raise ConfigError(
                f"dppo_max_ratio is {self.max_ratio}; it caps the ratio itself, which is about 1, so use more than 1, "
                "such as 20, or off"
            )

    @abstractmethod
    def divergence(self, new: Tensor, old: Tensor) -> Tensor:
        """[N] at least 0, from probabilities [N]."""

    def per_token(self, step: Step) -> tuple[Tensor, dict[str, Tensor]]:
        """[N] losses, and how many tokens each side dropped, or the cap reached."""
        with torch.no_grad():
            new, old = step.logprobs.exp(), step.old.exp()
            far = self.divergence(new, old)
            high = (step.advantages > 0) & (new > old) & (far > self.high)
            low = (step.advantages < 0) & (new < old) & (far > self.low)
            dropped = high | low
            cap = math.inf if self.max_ratio is None else self.max_ratio
            ratio = step.log_ratio.exp()
            capped = ratio > cap
            weight = ratio.clamp(max=cap)
            sums = {"modified": (dropped | capped).sum(), "clip_high": high.sum(), "clip_low": low.sum()}
        loss = -weight * step.advantages * step.logprobs
        return torch.where(dropped, torch.zeros_like(loss), loss), sums


@dataclass(frozen=True, slots=True)
class DPPOTotalVariation(DPPO):
    """By |p - q|."""

    low: float = 0.2
    high: float = 0.2

    def divergence(self, new: Tensor, old: Tensor) -> Tensor:
        """[N] |p - q|."""
        return (new - old).abs()


@dataclass(frozen=True, slots=True)
class DPPOKl(DPPO):
    """By KL(old, new) of "this token or another": q log(q / p) + (1 - q) log((1 - q) / (1 - p))."""

    low: float = 0.05
    high: float = 0.05

    def divergence(self, new: Tensor, old: Tensor) -> Tensor:
        """[N] Bernoulli KL, finite at probabilities of 0 and 1."""
        chosen = old * (old.clamp(min=LEAST).log() - new.clamp(min=LEAST).log())
        rest = (1 - old) * ((1 - old + LEAST).log() - (1 - new + LEAST).log())
        return chosen + rest
