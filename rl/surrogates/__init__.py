"""Surrogates: the per-token loss from a ratio and an advantage, one file for each family."""

from palestra.rl.surrogates.base import Step, Surrogate
from palestra.rl.surrogates.cispo import CISPOTwoSided, CISPOUpper
from palestra.rl.surrogates.dppo import DPPO, DPPOKl, DPPOTotalVariation
from palestra.rl.surrogates.ppo import PPOClip
from palestra.rl.surrogates.score import ImportanceSampling, Reinforce

__all__ = [
    "DPPO",
    "CISPOTwoSided",
    "CISPOUpper",
    "DPPOKl",
    "DPPOTotalVariation",
    "ImportanceSampling",
    "PPOClip",
    "Reinforce",
    "Step",
    "Surrogate",
]
