"""The ratio of the policy to the one that it is compared with, of a token, a turn or a trajectory; and who that is."""

from __future__ import annotations

import torch
from torch import Tensor

from palestra.rl.kl import MAX_EXPONENT
from palestra.rl.segments import Segments


def log_ratio(logprobs: Tensor, old: Tensor, segments: Segments | None = None) -> Tensor:
    """[N] log ratios of pi to old; with segments, the log of the geometric mean over each token's segment.

    The token form of GSPO (arXiv:2507.18071): every token has its segment's ratio as value and a gradient towards its
    own log-probability alone, sg(s) * pi / sg(pi). So tokens of one segment may have different advantages, and each
    keeps the sign of its own. Where they are the same, the gradient is that of `segment_log_ratio`.
    """
    own = logprobs - old
    if segments is None:
        return own.clamp(-MAX_EXPONENT, MAX_EXPONENT)
    whole = segments.spread(segments.mean(own.detach())).clamp(-MAX_EXPONENT, MAX_EXPONENT)
    return whole + (logprobs - logprobs.detach())


def segment_log_ratio(logprobs: Tensor, old: Tensor, segments: Segments) -> Tensor:
    """[N] as `log_ratio`, differentiable through the mean: GSPO as first written.

    Each token's gradient is smeared over its segment, so a turn's credit reaches other turns. No run uses it; it is
    what the token form is compared with.
    """
    return segments.spread(segments.mean(logprobs - old)).clamp(-MAX_EXPONENT, MAX_EXPONENT)


def proximal_loglinear(
    logprobs: Tensor, sampling: Tensor, sampled_by: Tensor, version: int, updates_per_version: int = 1
) -> Tensor:
    """[N] log pi_old without a forward pass: log mu + a (log pi - log mu), detached (A-3PO, arXiv:2512.06547).

    a = (age - 1) / age, from 0 to 1, for each token: a trajectory may mix versions. The age is counted in publishes:
    `version` less `sampled_by`, over `updates_per_version`, rounded up, since versions are numbered by optimiser steps.
    `version`: of the weights when the batch was frozen; a batch that serves several updates ages by none of them. A
    token that those weights sampled, or the weights published before them, has a = 0: old is mu. The older the token,
    the nearer old is to pi.
    """
    age = ((version - sampled_by).to(logprobs.dtype) / updates_per_version).ceil()
    a = torch.where(age > 0, (age - 1) / age.clamp(min=1), torch.zeros_like(age))
    return sampling + a * (logprobs.detach() - sampling)
