"""Imitation: the same rows, masks and weights as reinforcement, with advantage 1 on every token to copy.

The loss is -log p of the sampled tokens, token-mean. Scripted episodes carry no log-probabilities, and none are read.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from palestra.envs.errors import ConfigError
from palestra.rl.algorithms.base import Credit
from palestra.rl.batch import Batch, pack
from palestra.rl.learner import Learner, UpdateStats
from palestra.rl.objective import Objective
from palestra.rl.surrogates import Reinforce
from palestra.rollout.types import Group, Sample, Trajectory


@dataclass(frozen=True, slots=True)
class Imitation:
    """What to copy, how often, in what portions."""

    epochs: int = 1
    trajectories_per_step: int = 16
    tokens_per_micro_batch: int = 4096
    objective: Objective = Objective(surrogate=Reinforce(), correction=None, mode="imitation")

    def __post_init__(self) -> None:
        if min(self.epochs, self.trajectories_per_step, self.tokens_per_micro_batch) < 1:
            raise ConfigError(
                f"imitation: epochs is {self.epochs}, trajectories_per_step {self.trajectories_per_step} and "
                f"tokens_per_micro_batch {self.tokens_per_micro_batch}; each is 1 or more"
            )

    def num_updates(self, num_trajectories: int) -> int:
        """Optimiser steps that `imitate` takes; the last portion of an epoch may be smaller."""
        return self.epochs * -(-num_trajectories // self.trajectories_per_step)


def imitation_batch(trajectories: Sequence[Trajectory], settings: Imitation, *, ranks: int = 1) -> Batch:
    """Rows in which every sampled token of every trajectory is to be copied, scored at temperature 1."""
    group = Group("imitation", "imitation", tuple(_unpoisoned(trajectory) for trajectory in trajectories))
    credit = Credit(tuple(np.ones(trajectory.sampled_tokens) for trajectory in trajectories))
    return pack([group], [credit], settings.tokens_per_micro_batch, settings.objective, ranks=ranks)


def imitation_loss(learner: Learner, trajectories: Sequence[Trajectory], settings: Imitation) -> float:
    """Mean of -log p over the tokens to copy, at temperature 1, of the weights in force. Nothing is learned."""
    logprobs = learner.sampled_logprobs(imitation_batch(trajectories, settings))
    return -float(logprobs.astype(np.float64).mean())


def set_apart(
    trajectories: Sequence[Trajectory], count: int, rng: random.Random
) -> tuple[list[Trajectory], list[Trajectory]]:
    """(to copy, to measure). Whole tasks are set apart, at most `count` trajectories and a tenth of them all."""
    most = min(count, len(trajectories) // 10)
    sizes = Counter(trajectory.task_id for trajectory in trajectories)
    apart: set[str] = set()
    left = most
    for task in rng.sample(sorted(sizes), len(sizes)):
        if sizes[task] <= left:
            apart.add(task)
            left -= sizes[task]
    copied = [trajectory for trajectory in trajectories if trajectory.task_id not in apart]
    return copied, [trajectory for trajectory in trajectories if trajectory.task_id in apart]


def imitate(
    learner: Learner,
    trajectories: Sequence[Trajectory],
    settings: Imitation,
    rng: random.Random,
    on_update: Callable[[UpdateStats], None] = lambda stats: None,
    on_epoch: Callable[[], None] = lambda: None,
) -> list[UpdateStats]:
    """Copy the trajectories, shuffled anew each epoch. Takes `settings.num_updates(len(trajectories))` steps."""
    if not any(trajectory.sampled_tokens for trajectory in trajectories):
        raise ConfigError("imitation has no trajectory with a token to copy; give it scripted or recorded episodes")
    done: list[UpdateStats] = []
    for _ in range(settings.epochs):
        order = rng.sample(range(len(trajectories)), len(trajectories))
        for start in range(0, len(order), settings.trajectories_per_step):
            portion = [trajectories[i] for i in order[start : start + settings.trajectories_per_step]]
            done.append(learner.update(imitation_batch(portion, settings, ranks=learner.ranks.size), settings))
            on_update(done[-1])
        on_epoch()
    return done


def _unpoisoned(trajectory: Trajectory) -> Trajectory:
    return replace(trajectory, samples=tuple(_as_if_sampled(sample) for sample in trajectory.samples))


def _as_if_sampled(sample: Sample) -> Sample:
    """With a temperature of 1 at the tokens to copy, and a log-probability that passes for one but is never read."""
    where = sample.sampled
    return replace(
        sample,
        logprobs=np.where(where, 0.0, np.nan).astype(np.float32),
        temperature=np.where(where, 1.0, np.nan).astype(np.float32),
    )
