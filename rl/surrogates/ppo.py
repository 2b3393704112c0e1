"""PPO clip (arXiv:1707.06347), with DAPO's separate bounds (arXiv:2503.14476) and dual clip (arXiv:1912.09729).

Where A < 0 the clip of PPO bounds nothing from above: a token that became many times likelier gets a weight without
limit. Dual clip bounds its loss by -c A. INTELLECT-2 (arXiv:2505.07291) puts min(r, delta) into the unclipped branch
instead; with delta above 1 + clip_high that is the same loss and gradient, so dual_clip = delta.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from palestra.envs.errors import ConfigError
from palestra.rl.surrogates.base import Step


@dataclass(frozen=True, slots=True)
class PPOClip:
    """-min(r A, clip(r, 1 - low, 1 + high) A), and for A < 0 never more than -dual A.

    Clip fractions count only where the clipped branch is the active one.
    """

    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float | None = 3.0
    """Bound on the ratio where A < 0, whose weight is unbounded otherwise. None: off."""

    def __post_init__(self) -> None:
        check_clip(self.clip_low, self.clip_high)
        if self.dual_clip is not None and not self.dual_clip > 1:
            raise ConfigError(
                f"dual_clip is {self.dual_clip}; it bounds a ratio from above, so use more than 1, or none"
            )

    def per_token(self, step: Step) -> tuple[Tensor, dict[str, Tensor]]:
        """[N] clipped losses, and how often each side was active."""
        ratio, advantages = step.log_ratio.exp(), step.advantages
        clipped = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        loss = -torch.minimum(ratio * advantages, clipped * advantages)
        with torch.no_grad():
            sums = {
                "clip_high": ((advantages > 0) & (ratio > 1 + self.clip_high)).sum(),
                "clip_low": ((advantages < 0) & (ratio < 1 - self.clip_low)).sum(),
            }
        if self.dual_clip is not None:
            outlier = (advantages < 0) & (ratio.detach() > self.dual_clip)
            loss = torch.where(outlier, -self.dual_clip * advantages, loss)
            sums["dual_clip"] = outlier.sum()
        return loss, sums


def check_clip(low: float, high: float) -> None:
    """Raise ConfigError unless both are distances from 1."""
    if not 0 < low < 1 or not high > 0:
        raise ConfigError(
            f"clip_low is {low} and clip_high {high}; both are distances from 1, "
            "0 < clip_low < 1 and clip_high > 0, such as 0.2 and 0.28"
        )
