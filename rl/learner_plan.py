"""From the settings to a learner, in whatever process it is to run. The plan is plain data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from palestra.rl.algorithms.make import make_algorithm
from palestra.rl.config import Config
from palestra.rl.critic import critic_of
from palestra.rl.learner import Learner, LearnerSettings
from palestra.rl.lora import LoraSettings
from palestra.rl.model import check_context, load_model
from palestra.rl.optimizer import OptimizerSettings
from palestra.rl.ranks import Ranks
from palestra.rollout.adapters import Adapter


@dataclass(frozen=True, slots=True)
class LearnerPlan:
    """All that a learner is made from."""

    folder: Path  # base weights, which every rank's machine can read
    dtype: str
    trust_remote_code: bool
    context_tokens: int
    settings: LearnerSettings
    seed: int
    start: Adapter | None
    threads: int  # of one rank, on a CPU

    @classmethod
    def of(cls, config: Config, folder: Path, start: Adapter | None, num_updates: int) -> LearnerPlan:
        """The plan of a configuration, on the base weights in `folder`, going on from the adapter `start`, for at most
        `num_updates` optimiser steps."""
        lora, optimizer = config.model.lora, config.optimizer
        algorithm = make_algorithm(config.algorithm, config.environment.budgets.tokens)
        full = config.model.train == "full"
        settings = LearnerSettings(
            train=config.model.train,
            keep_start=full and algorithm.objective.kl_coefficient > 0,
            lora=LoraSettings(lora.rank, lora.alpha, lora.rank_stabilised),
            optimizer=OptimizerSettings(
                learning_rate=optimizer.learning_rate,
                schedule=optimizer.schedule,
                total_steps=num_updates if optimizer.schedule == "linear" else None,
                warmup_steps=optimizer.warmup_steps,
                beta1=optimizer.beta1,
                beta2=optimizer.beta2,
                weight_decay=optimizer.weight_decay,
                max_grad_norm=optimizer.max_grad_norm,
            ),
            sharding=config.cluster.learner_sharding,
            critic=critic_of(algorithm),
            gradient_checkpointing=config.model.gradient_checkpointing,
        )
        return cls(
            folder=folder,
            dtype=config.model.dtype,
            trust_remote_code=config.model.trust_remote_code,
            context_tokens=config.environment.budgets.context_tokens,
            settings=settings,
            seed=config.run.seed,
            start=start,
            threads=optimizer.threads,
        )

    def make(self, ranks: Ranks | None = None) -> Learner:
        """The learner, as one of `ranks` or alone. Raises ConfigError.

        Weights that will be sharded are loaded on the host: no device need hold all of them.
        """
        ranks = ranks or Ranks()
        whole_on_device = torch.cuda.is_available() and (ranks.size == 1 or self.settings.sharding == "replicate")
        loaded = load_model(
            str(self.folder),
            dtype=self.dtype,
            device="cuda" if whole_on_device else "cpu",
            trust_remote_code=self.trust_remote_code,
        )
        check_context(loaded.model, self.context_tokens, "environment.budgets.context_tokens")
        return Learner(loaded.model, self.settings, seed=self.seed, start=self.start, ranks=ranks)

    def alone(self) -> LearnerPlan:
        """The same for one rank, whose state it can load."""
        return replace(self, settings=replace(self.settings, sharding="replicate"))
