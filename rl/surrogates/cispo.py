"""CISPO (arXiv:2506.13585): REINFORCE with a clipped, detached ratio as weight, so every token keeps a gradient.

Two losses go by this name, with numbers that do not fit each other. The paper and most trainers clip the weight to a
band around 1, given as distances from 1. Others, as ScaleRL (arXiv:2510.13786), cap it from above alone, at a ratio
such as 5: there 0.28 would shrink every weight to 0.28. They are two classes here, and their settings have two names.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from palestra.envs.errors import ConfigError
from palestra.rl.surrogates.base import Step
from palestra.rl.surrogates.ppo import check_clip


@dataclass(frozen=True, slots=True)
class CISPOTwoSided:
    """-sg(clip(r, 1 - low, 1 + high)) A log pi."""

    clip_low: float = 0.2
    clip_high: float = 0.28

    def __post_init__(self) -> None:
        check_clip(self.clip_low, self.clip_high)

    def per_token(self, step: Step) -> tuple[Tensor, dict[str, Tensor]]:
        """[N] losses, and how many weights the band changed, on each side."""
        ratio = step.log_ratio.detach().exp()
        weight = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        low, high = (ratio < 1 - self.clip_low).sum(), (ratio > 1 + self.clip_high).sum()
        return -weight * step.advantages * step.logprobs, {"modified": low + high, "clip_low": low, "clip_high": high}


@dataclass(frozen=True, slots=True)
class CISPOUpper:
    """-sg(min(r, max_ratio)) A log pi: no lower bound, and the upper one is of the ratio itself."""

    max_ratio: float

    def __post_init__(self) -> None:
        if not self.max_ratio > 1:
            raise ConfigError(
                f"cispo_max_ratio is {self.max_ratio}; it caps the ratio itself, which is about 1, so use more than 1, "
                'such as 5. Distances from 1, such as 0.28, belong to the surrogate "cispo_two_sided"'
            )

    def per_token(self, step: Step) -> tuple[Tensor, dict[str, Tensor]]:
        """[N] losses, and how many weights the cap changed."""
        ratio = step.log_ratio.detach().exp()
        weight = ratio.clamp(max=self.max_ratio)
        return -weight * step.advantages * step.logprobs, {"modified": (ratio > self.max_ratio).sum()}
