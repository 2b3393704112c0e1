"""From a configuration to what the loop is told."""

from __future__ import annotations

from palestra.rl.config import Config
from palestra.rl.counted import counting
from palestra.rl.gap_watch import GapWatch
from palestra.rl.gather import GatherSettings
from palestra.rl.second_watch import SecondWatch
from palestra.rl.step import Practice
from palestra.rl.train import LoopSettings


def loop_settings(config: Config) -> LoopSettings:
    """When the loop does what, and with which groups."""
    algorithm = config.algorithm
    return LoopSettings(
        steps=config.run.steps,
        save_every=config.checkpoint.every_steps,
        evaluate_every=config.evaluation.every_steps,
        stop_without_signal=config.run.stop_without_signal,
        keep_trajectory_bytes=int(config.tracking.keep_trajectories_gb * 2**30),
        gather=GatherSettings(
            config.run.groups_per_step,
            config.run.min_group_size,
            algorithm.dynamic_sampling,
            algorithm.max_refills,
            algorithm.when_uninformative,
            tuple(algorithm.objectives or ()),
        ),
        counting=counting(config),
        practice=Practice(
            config.optimizer.tokens_per_micro_batch,
            algorithm.updates_per_batch,
            algorithm.epochs,
            config.run.seed,
            config.environment.budgets.context_tokens,
        ),
    )


def num_updates(config: Config) -> int:
    """Optimiser steps of the whole run, when every batch has a signal in each of its parts."""
    return config.run.steps * config.algorithm.updates_per_batch * config.algorithm.epochs


def gap_watch(config: Config) -> GapWatch:
    """What looks at the difference of engine and trainer on sampled tokens."""
    asked = config.rollout.max_sampled_gap
    limit = asked if asked is not None else 1e-2 if config.model.dtype == "float32" else None
    return GapWatch(config.run.max_lag == 0, limit, config.rollout.sampled_gap_steps)


def second_watch(config: Config) -> SecondWatch:
    """What looks at the difference of the two verifiers."""
    second = config.environment.second_verifier
    return SecondWatch(second.alarm_gap if second.name else None, second.alarm_steps)
