"""What a learner is told, and what it tells of an update."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from palestra.rl import lora
from palestra.rl.critic import CriticSettings
from palestra.rl.objective import Objective
from palestra.rl.optimizer import OptimizerSettings


@dataclass(frozen=True, slots=True)
class LearnerSettings:
    """What is trained, and how."""

    train: Literal["lora", "full"] = "lora"
    lora: lora.LoraSettings = lora.LoraSettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    sharding: Literal["replicate", "shard"] = "replicate"
    """With several ranks: all weights on each, or a part on each. Alone it makes no difference."""
    keep_start: bool = False
    """Keep a frozen copy of the trained weights as they are at first: the reference of a KL when all are trained."""
    critic: CriticSettings | None = None
    """A value head on the body, for algorithms that credit with values."""
    gradient_checkpointing: bool = False
    """Compute each layer again in the backward instead of keeping its activations."""


class HasObjective(Protocol):
    """All that an update asks of an algorithm."""

    @property
    def objective(self) -> Objective: ...


@dataclass(frozen=True, slots=True)
class UpdateStats:
    """What one optimiser step did. `metrics` are means per action token, named by what they measure."""

    step: int  # optimiser steps done, this one included: the version of the weights
    loss: float
    grad_norm: float  # before clipping
    learning_rate: float
    action_tokens: int
    row_tokens: int  # through the body
    micro_batches: int
    seconds: float
    metrics: Mapping[str, float] = field(default_factory=dict)
