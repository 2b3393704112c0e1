"""Everything about a configuration that can be known before anything starts. Whatever is wrong raises ConfigError."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from palestra.envs.environment import MayDigest, Taskset
from palestra.envs.errors import ConfigError
from palestra.rl.algorithms.base import Algorithm
from palestra.rl.algorithms.gigpo import GiGPO
from palestra.rl.algorithms.make import make_algorithm
from palestra.rl.config import Config
from palestra.rl.lora import read_peft_folder
from palestra.rl.make_engine import sync_mode
from palestra.rl.model import resolve_model
from palestra.rl.new_policy import check_new_policy
from palestra.rl.policy import BASE
from palestra.rl.recorded import choose
from palestra.rl.rooms import with_backend
from palestra.rl.taskset_check import of_user, open_taskset
from palestra.rollout.second_opinion import load_second


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run will do."""

    config: Config
    taskset: Taskset
    algorithm: Algorithm
    num_train: int
    num_test: int

    def held_out(self, count: int) -> dict[int, str]:
        """The first `count` held-out tasks: their places and ids."""
        tasks = self.taskset.split("test")
        return {index: tasks[index].id for index in range(count)}

    def lines(self) -> Sequence[str]:
        """For a person, before the run starts."""
        config = self.config
        run, rollout, engine = config.run, config.rollout, config.rollout.engine
        episodes = run.groups_per_step * rollout.group_size
        budgets = config.environment.budgets
        refills = config.algorithm.max_refills if config.algorithm.dynamic_sampling else 0
        most = episodes + refills * rollout.group_size
        more = f" and up to {refills} groups more a step" if refills else ""
        where = f"{engine.gpus} GPUs" if engine.gpus else f"{engine.threads} CPU threads"
        host = "Ray actors" if config.cluster.ray else "this process"
        return (
            f"run        {run.folder}/{run.name}, seed {run.seed}",
            f"tasks      {config.environment.name}: {self.num_train} to train on, {self.num_test} held out",
            f"steps      {run.steps} of {run.groups_per_step} groups x {rollout.group_size} episodes = "
            f"{run.steps * episodes} episodes{more}; {config.algorithm.name}, lag {run.max_lag}, "
            f"{config.algorithm.updates_per_batch * config.algorithm.epochs} updates a step",
            f"tokens     at most {most * budgets.tokens} sampled in a step; rows of up to {budgets.context_tokens}",
            f"engines    {engine.replicas} x {engine.kind} on {where} each, in {host}; weights {sync_mode(config)}",
            f"learner    {_learner_layout(config)}",
            f"sandboxes  {config.environment.sandbox.backend}, at most {config.environment.sandbox.max_boxes} at once",
            f"disk       trajectories up to {config.tracking.keep_trajectories_gb:g} GB, "
            f"{config.checkpoint.keep} checkpoints, every {config.checkpoint.every_steps} steps",
        )


def _learner_layout(config: Config) -> str:
    ranks, threads = config.cluster.learner_ranks, config.optimizer.threads
    where = "a GPU" if torch.cuda.is_available() else f"{threads} CPU threads"
    if ranks == 1:
        return f"in this process, on {where}"
    how = "a part of each weight on each" if config.cluster.learner_sharding == "shard" else "all weights on each"
    return f"{ranks} ranks on {where} each, in Ray actors; {config.cluster.learner_sharding}: {how}"


def check(config: Config) -> Plan:
    """The plan of a configuration. Loads the tasks, downloads and starts nothing. Raises ConfigError."""
    algorithm = of_user(
        f"algorithm {config.algorithm.name}",
        lambda: make_algorithm(config.algorithm, config.environment.budgets.tokens),
    )
    algorithm.check(config.rollout.group_size)
    algorithm.objective.check_updates(config.algorithm.updates_per_batch * config.algorithm.epochs)
    taskset, num_train, num_test = open_taskset(config)
    if isinstance(algorithm, GiGPO) and isinstance(taskset, MayDigest) and not taskset.digest_states:
        raise ConfigError(
            f"algorithm.name is {config.algorithm.name!r}, which compares turns taken in equal states, but environment "
            f"{config.environment.name} records none; set environment.options.digest_states = true (of a ToolTaskset: "
            'its attribute digest_states), or use algorithm.name = "same_turn_baseline"'
        )
    if config.environment.second_verifier.name:
        asyncio.run(load_second(config.environment.second_verifier.name, taskset).close())
    if num_train < config.run.groups_per_step:
        raise ConfigError(
            f"environment {config.environment.name} has {num_train} training tasks, but run.groups_per_step is "
            f"{config.run.groups_per_step}; use at most that many"
        )
    if num_test < config.evaluation.tasks:
        raise ConfigError(
            f"environment {config.environment.name} has {num_test} held-out tasks, but evaluation.tasks is "
            f"{config.evaluation.tasks}; use at most that many"
        )
    if config.model.path == "new":
        check_new_policy(config.model.new)
    elif not config.model.path or config.model.path.startswith((".", "/", "~")) or _is_folder(config.model.path):
        resolve_model(config.model.path)
    if config.model.lora.initial is not None:
        read_peft_folder(Path(config.model.lora.initial))
    _check_records(config, taskset)
    _check_machines(config)
    return Plan(config, taskset, algorithm, num_train, num_test)


def _is_folder(path: str) -> bool:
    return Path(path).expanduser().is_dir()


def check_here(config: Config) -> None:
    """What has to be on this machine before anything is made: the model, which is fetched now if need be, and a place
    for the policy's commands. Raises ConfigError."""
    own = Path(config.run.folder) / config.run.name / "model" / BASE  # a base that the run has made for itself
    if config.model.path != "new" and not own.is_dir():
        resolve_model(config.model.path)
    with_backend(config, config.run.name)


def _check_records(config: Config, taskset: Taskset) -> None:
    """Read what is to be imitated, unless this run has done so, or the model is not on this machine yet."""
    path = config.model.path
    here = path.startswith("package:") or Path(path).expanduser().is_dir()
    made = (Path(config.run.folder) / config.run.name / "model").is_dir()
    if config.warm_start.recorded is not None and here and not made:
        choose(config, taskset)


def _check_machines(config: Config) -> None:
    engine, cluster = config.rollout.engine, config.cluster
    sync_mode(config)
    if not config.cluster.ray and engine.replicas > 1:
        raise ConfigError(
            f"rollout.engine.replicas is {engine.replicas}, but cluster.ray is false; one process holds one engine"
        )
    if cluster.learner_ranks > 1 and not cluster.ray:
        raise ConfigError(
            f"cluster.learner_ranks is {cluster.learner_ranks}, but cluster.ray is false; ranks are Ray actors, and "
            "without Ray there is one"
        )
    if not cluster.ray and engine.gpus > torch.cuda.device_count():
        raise ConfigError(
            f"rollout.engine.gpus is {engine.gpus}, but this machine shows {torch.cuda.device_count()} GPUs"
        )
    if cluster.nodes > 1 and not cluster.ray:
        raise ConfigError(f"cluster.nodes is {cluster.nodes}, but cluster.ray is false, which means this process alone")
    if cluster.nodes > 1 and cluster.address is None and not os.environ.get("RAY_ADDRESS"):
        raise ConfigError(
            f"cluster.nodes is {cluster.nodes}, but no cluster to join is given, and a private one has one node; "
            "set cluster.address or RAY_ADDRESS"
        )
