"""The score function, without and with the ratio; nothing is clipped."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from palestra.rl.surrogates.base import Step


@dataclass(frozen=True, slots=True)
class Reinforce:
    """-A log pi (Williams, 1992). It has no ratio: right for the policy's own samples, or with a correction."""

    def per_token(self, step: Step) -> tuple[Tensor, dict[str, Tensor]]:
        """[N] losses."""
        return -step.advantages * step.logprobs, {}


@dataclass(frozen=True, slots=True)
class ImportanceSampling:
    """-r A: reinforce for samples of the old policy, with a variance that grows as the two drift apart."""

    def per_token(self, step: Step) -> tuple[Tensor, dict[str, Tensor]]:
        """[N] losses."""
        return -step.log_ratio.exp() * step.advantages, {}
