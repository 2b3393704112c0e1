"""What is measured on action tokens beside the loss: detached sums, from which the tally makes metrics."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from palestra.rl.corrections import Corrected, Mismatch
from palestra.rl.kl import MAX_EXPONENT
from palestra.rl.segments import Segments


def ratio_sums(log_ratio: Tensor) -> dict[str, Tensor]:
    """Of r = pi / old [N]: its mean, and two estimates of KL(old, pi)."""
    log_ratio = log_ratio.detach()
    ratio = log_ratio.exp()
    return {"ratio": ratio.sum(), "kl_old_new_k1": -log_ratio.sum(), "kl_old_new_k3": (ratio - 1 - log_ratio).sum()}


def ratio_maxima(log_ratio: Tensor) -> dict[str, Tensor]:
    """The largest r."""
    return {"ratio_max": largest(log_ratio.exp())}


def ratio_minima(log_ratio: Tensor) -> dict[str, Tensor]:
    """The smallest r; infinity of no tokens."""
    ratio = log_ratio.detach().exp()
    return {"ratio_min": ratio.min() if ratio.numel() else ratio.new_tensor(math.inf)}


def mismatch_sums(log_rho: Tensor) -> dict[str, Tensor]:
    """Of rho = trainer / mu [N]: how far from 1, and two estimates of KL(mu, trainer)."""
    bounded = log_rho.clamp(-MAX_EXPONENT, MAX_EXPONENT)
    return {
        "log_rho_abs": log_rho.abs().sum(),
        "mismatch_kl": (bounded.exp() - 1 - bounded).sum(),
        "mismatch_kl_k1": -log_rho.sum(),
    }


def mismatch_maxima(log_rho: Tensor, turns: Segments) -> dict[str, Tensor]:
    """The largest |log rho| of a token, and of the geometric mean over a turn."""
    return {"log_rho_abs_max": largest(log_rho.abs()), "turn_log_rho_abs_max": largest(turns.mean(log_rho).abs())}


def correction_sums(corrected: Corrected, mismatch: Mismatch) -> dict[str, Tensor]:
    """Of the weights as they act, 0 where a token is not kept: for means and effective sample sizes.

    By token, and by trajectory with the mean weight of its tokens.
    """
    weights = corrected.weights
    rejected = weights.new_zeros(())
    if corrected.kept is not None:
        weights = torch.where(corrected.kept, weights, torch.zeros_like(weights))
        rejected = (~corrected.kept).sum()
    of_trajectories = mismatch.segments("sequence").mean(weights)
    return {
        "correction": weights.sum(),
        "correction_squared": weights.square().sum(),
        "rejected": rejected,
        "trajectories": weights.new_tensor(float(len(of_trajectories))),
        "trajectory_correction": of_trajectories.sum(),
        "trajectory_correction_squared": of_trajectories.square().sum(),
    }


def largest(values: Tensor) -> Tensor:
    """Of values that are 0 or more; 0 of none."""
    return values.detach().max() if values.numel() else values.new_zeros(())
