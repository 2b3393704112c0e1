"""Corrections of the mismatch between the policy that sampled, mu, and the trainer's, old: rho = old / mu.

A correction gives each action token a detached weight c and says whether it is kept at all, M. A token that is not
kept leaves the numerator of the loss and no denominator. Over a turn or a trajectory there are two ratios:

    product         exact for what depends on the whole of it, but dies with length: a harmless 1 % at every token
                    is 2 after 70 tokens and 20,000 after 1,000
    geometric mean  the same scale at any length: good for deciding what to keep, not an importance weight

Only the untruncated product over the trajectory is unbiased; caps and masks trade bias for variance. Bounds are
inclusive.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from palestra.envs.errors import ConfigError
from palestra.rl.segments import Level, Segments


@dataclass(frozen=True, slots=True)
class Mismatch:
    """What a correction looks at, [N] each, detached."""

    log_rho: Tensor  # log old - log mu
    log_drift: Tensor  # log pi - log mu, of the policy as it is now
    advantages: Tensor
    trajectory: Tensor  # int64
    turn: Tensor  # int64, within the trajectory

    def segments(self, level: Level) -> Segments:
        """Of these tokens."""
        return Segments.of(level, self.trajectory, self.turn)


@dataclass(frozen=True, slots=True)
class Corrected:
    """c [N] and M [N] bool; M None keeps all. What is not kept may have any weight."""

    weights: Tensor
    kept: Tensor | None = None


class Correction(Protocol):
    """Frozen settings of one way to correct."""

    def of(self, mismatch: Mismatch) -> Corrected:
        """Weights and verdicts of the tokens."""
        ...


@dataclass(frozen=True, slots=True)
class TokenTIS:
    """c = min(rho, cap) per token: truncated importance sampling. Low variance, biased."""

    cap: float = 2.0

    def __post_init__(self) -> None:
        _check_cap(self.cap)

    def of(self, mismatch: Mismatch) -> Corrected:
        """[N] weights in (0, cap]."""
        return Corrected(_capped(mismatch.log_rho, self.cap))


@dataclass(frozen=True, slots=True)
class TokenClamp:
    """c = clip(rho, low, high) per token. Unlike TIS, a token that the trainer finds unlikely keeps weight `low`."""

    low: float = 0.5
    high: float = 2.0

    def __post_init__(self) -> None:
        _check_band(self.low, self.high)

    def of(self, mismatch: Mismatch) -> Corrected:
        """[N] weights in [low, high]."""
        least = math.log(self.low) if self.low else -math.inf
        return Corrected(mismatch.log_rho.clamp(least, math.log(self.high)).exp())


@dataclass(frozen=True, slots=True)
class IcePop:
    """c = rho where low <= rho <= high, and the token is dropped elsewhere (Ling team, arXiv:2510.18855)."""

    low: float = 0.5
    high: float = 5.0

    def __post_init__(self) -> None:
        _check_band(self.low, self.high)

    def of(self, mismatch: Mismatch) -> Corrected:
        """[N] weights, and who is within the band."""
        return Corrected(_capped(mismatch.log_rho, self.high), _within(mismatch.log_rho, self.low, self.high))


@dataclass(frozen=True, slots=True)
class ProductTIS:
    """c = min(product of rho over the turn or trajectory, cap), for each of its tokens."""

    level: Level
    cap: float = 2.0

    def __post_init__(self) -> None:
        _check_cap(self.cap)

    def of(self, mismatch: Mismatch) -> Corrected:
        """[N] weights in (0, cap]."""
        segments = mismatch.segments(self.level)
        return Corrected(segments.spread(_capped(segments.sum(mismatch.log_rho), self.cap)))


@dataclass(frozen=True, slots=True)
class ProductMask:
    """c = product of rho over the turn or trajectory where low <= product <= high; the whole is dropped elsewhere."""

    level: Level
    high: float = 2.0
    low: float = 0.0

    def __post_init__(self) -> None:
        _check_band(self.low, self.high)

    def of(self, mismatch: Mismatch) -> Corrected:
        """[N] weights, and whose segment is within the band."""
        segments = mismatch.segments(self.level)
        log_product = segments.sum(mismatch.log_rho)
        kept = segments.spread(_within(log_product, self.low, self.high))
        return Corrected(segments.spread(_capped(log_product, self.high)), kept)


@dataclass(frozen=True, slots=True)
class GeometricTIS:
    """c = min(geometric mean of rho over the turn or trajectory, cap), for each of its tokens."""

    level: Level
    cap: float = 2.0

    def __post_init__(self) -> None:
        _check_cap(self.cap)

    def of(self, mismatch: Mismatch) -> Corrected:
        """[N] weights in (0, cap]."""
        segments = mismatch.segments(self.level)
        return Corrected(segments.spread(_capped(segments.mean(mismatch.log_rho), self.cap)))


@dataclass(frozen=True, slots=True)
class GeometricMask:
    """A turn or trajectory is kept where low <= geometric mean of rho <= high; c is 1, or token TIS where `cap` is set.

    Calibrate the band on turn_log_rho_abs_max of the run itself before dropping anything by it.
    """

    level: Level
    low: float
    high: float
    cap: float | None = 2.0

    def __post_init__(self) -> None:
        _check_band(self.low, self.high)
        if self.cap is not None:
            _check_cap(self.cap)

    def of(self, mismatch: Mismatch) -> Corrected:
        """[N] weights, and whose segment is within the band."""
        segments = mismatch.segments(self.level)
        kept = segments.spread(_within(segments.mean(mismatch.log_rho), self.low, self.high))
        log_rho = mismatch.log_rho
        return Corrected(torch.ones_like(log_rho) if self.cap is None else _capped(log_rho, self.cap), kept)


@dataclass(frozen=True, slots=True)
class OPSM:
    """Off-policy sequence mask (DeepSeek-V3.2, arXiv:2512.02556): drop tokens of negative advantage in a trajectory
    that the policy of now finds unlikely, mean of log(mu / pi) > delta. c is 1.

    What is bad and already unlikely teaches nothing more, and its gradient is the one that blows up.
    """

    delta: float

    def __post_init__(self) -> None:
        if not self.delta > 0:
            raise ConfigError(f"opsm_delta is {self.delta}; it bounds a KL from above, so use more than 0, such as 0.1")

    def of(self, mismatch: Mismatch) -> Corrected:
        """[N] weights of 1, and who is kept."""
        segments = mismatch.segments("sequence")
        away = segments.spread(segments.mean(-mismatch.log_drift))
        return Corrected(torch.ones_like(away), (mismatch.advantages >= 0) | (away <= self.delta))


def _capped(log_rho: Tensor, cap: float) -> Tensor:
    return log_rho.clamp(max=math.log(cap)).exp()  # bounded before exp, so nothing overflows


def _within(log_rho: Tensor, low: float, high: float) -> Tensor:
    rho = log_rho.exp()  # inf where it overflows, which is above any bound
    return (rho >= low) & (rho <= high)


def _check_cap(cap: float) -> None:
    if not cap >= 1:
        raise ConfigError(f"the TIS cap is {cap}; it bounds a ratio near 1 from above, so use 1 or more, such as 2")


def _check_band(low: float, high: float) -> None:
    if not 0 <= low <= 1 <= high:
        raise ConfigError(
            f"the band of a correction is {low} to {high}; it is one of ratios and holds 1, such as 0.5 to 2"
        )
