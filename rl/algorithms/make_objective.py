"""From the [algorithm] settings to the objective."""

from __future__ import annotations

from palestra.envs.errors import ConfigError
from palestra.rl.aggregation import Aggregation
from palestra.rl.algorithms.make_correction import make_correction
from palestra.rl.objective import Objective
from palestra.rl.settings_objective import ObjectiveSettings
from palestra.rl.surrogates import (
    CISPOTwoSided,
    CISPOUpper,
    DPPOKl,
    DPPOTotalVariation,
    ImportanceSampling,
    PPOClip,
    Reinforce,
    Surrogate,
)


def make_objective(settings: ObjectiveSettings) -> Objective:
    """What is minimised. Raises ConfigError for combinations that are known to be wrong."""
    horizon = settings.length_norm_tokens if settings.aggregation == "seq-mean-token-sum-norm" else None
    if settings.kl == "none" and settings.kl_coefficient > 0:
        raise ConfigError(
            f"algorithm.kl_coefficient is {settings.kl_coefficient:g}, but algorithm.kl is none, so nothing would be "
            "weighed by it; choose a kl, such as k3_score, or leave the coefficient out"
        )
    return Objective(
        surrogate=_surrogate(settings),
        correction=make_correction(settings),
        mode=settings.mode,
        ratio=settings.ratio,
        aggregation=Aggregation(settings.aggregation, horizon, settings.count_without_signal),
        kl="k3_score" if settings.kl == "none" else settings.kl,
        kl_coefficient=settings.kl_coefficient,
        entropy_coefficient=settings.entropy_coefficient,
    )


def _surrogate(settings: ObjectiveSettings) -> Surrogate:
    name = settings.surrogate
    if name == "cispo_upper":
        if settings.cispo_max_ratio is None:
            raise ConfigError("algorithm.surrogate is cispo_upper, which needs algorithm.cispo_max_ratio, such as 5.0")
        return CISPOUpper(settings.cispo_max_ratio)
    if settings.cispo_max_ratio is not None:
        raise ConfigError(f"algorithm.cispo_max_ratio is for the surrogate cispo_upper, not for {name}; leave it out")
    if name in ("dppo_tv", "dppo_kl"):
        return _dppo(settings)
    if settings.dppo_low is not None or settings.dppo_high is not None:
        raise ConfigError(f"algorithm.dppo_low and dppo_high are of dppo_tv and dppo_kl, not of {name}; leave them out")
    if name == "reinforce":
        return Reinforce()
    if name == "importance_sampling":
        return ImportanceSampling()
    if name == "cispo_two_sided":
        return CISPOTwoSided(settings.clip_low, settings.clip_high)
    return PPOClip(settings.clip_low, settings.clip_high, settings.dual_clip)


def _dppo(settings: ObjectiveSettings) -> Surrogate:
    kind = DPPOTotalVariation if settings.surrogate == "dppo_tv" else DPPOKl
    usual = kind()
    low = usual.low if settings.dppo_low is None else settings.dppo_low
    high = usual.high if settings.dppo_high is None else settings.dppo_high
    return kind(low, high, settings.dppo_max_ratio)
