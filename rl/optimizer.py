"""AdamW with a learning rate that is a function of the number of updates done, and state keyed by parameter names."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from palestra.envs.errors import ConfigError

_MOMENTS = ("exp_avg", "exp_avg_sq", "step")


@dataclass(frozen=True, slots=True)
class OptimizerSettings:
    """AdamW. With LoRA the learning rate is about 10 times that of full fine-tuning: 1e-5 to 4e-5 for RL."""

    learning_rate: float = 2e-5
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Stay; fall in a line to 0 at `total_steps`, so that the last update has 1 / total_steps; or fall by a cosine to a
    tenth there."""
    warmup_steps: int = 0
    """Updates over which the learning rate rises in a line from 1 / warmup_steps of its value."""
    total_steps: int | None = None
    """Updates after which the linear or cosine schedule has fallen."""
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this norm; the norm is logged before."""

    def __post_init__(self) -> None:
        if not self.learning_rate > 0 or not self.max_grad_norm > 0:
            raise ConfigError(
                f"optimizer: learning_rate is {self.learning_rate} and max_grad_norm {self.max_grad_norm}; "
                "both are above 0"
            )
        if (self.schedule == "constant") == (self.total_steps is not None and self.total_steps > 0):
            raise ConfigError(
                f"optimizer: schedule {self.schedule} with total_steps {self.total_steps}; a linear or cosine schedule "
                "falls over 1 or more steps, a constant one has no end"
            )

    def rate_after(self, updates: int) -> float:
        """The learning rate of the next update when `updates` are done: once per update, whatever the micro-batches."""
        factor = min(1.0, (updates + 1) / self.warmup_steps) if self.warmup_steps else 1.0
        if self.total_steps is not None:
            done = min(1.0, updates / self.total_steps)
            factor *= 1.0 - done if self.schedule == "linear" else 0.55 + 0.45 * math.cos(math.pi * done)
        return self.learning_rate * factor


def make_optimizer(settings: OptimizerSettings, parameters: Sequence[nn.Parameter]) -> torch.optim.AdamW:
    """AdamW over the parameters that are trained."""
    return torch.optim.AdamW(
        parameters,
        lr=settings.learning_rate,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
        weight_decay=settings.weight_decay,
    )


def moments(
    optimizer: torch.optim.AdamW,
    named: Mapping[str, nn.Parameter],
    whole: Callable[[Tensor], Tensor],
    *,
    keep: bool,
) -> dict[str, Tensor]:
    """Copies of the moments on the host, as "exp_avg/NAME" and so on; empty before the first update.

    `whole` makes a tensor whole, together with the other ranks; a rank that does not `keep` only takes part in that.
    """
    found: dict[str, Tensor] = {}
    for name, parameter in named.items():
        if parameter not in optimizer.state:
            continue
        for kind in _MOMENTS:
            moment = whole(optimizer.state[parameter][kind])
            if keep:
                found[f"{kind}/{name}"] = moment.detach().to("cpu", copy=True)
    return found


def load_moments(
    optimizer: torch.optim.AdamW,
    named: Mapping[str, nn.Parameter],
    tensors: Mapping[str, Tensor],
    fill: Callable[[Tensor, Tensor], None],
) -> None:
    """Put moments back, bound to the live parameters by name. `fill` overwrites a tensor, or this rank's part of it."""
    optimizer.state.clear()
    for name, parameter in named.items():
        if f"step/{name}" in tensors:
            own = {kind: torch.zeros_like(parameter, requires_grad=False) for kind in _MOMENTS if kind != "step"}
            for kind, moment in own.items():
                fill(moment, tensors[f"{kind}/{name}"])
            optimizer.state[parameter] = own | {"step": tensors[f"step/{name}"].to("cpu", copy=True)}
