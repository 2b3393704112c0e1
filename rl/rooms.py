"""Building what a run needs from its configuration: engines, players and boxes, opened and closed as one."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from palestra.envs.errors import InfrastructureError
from palestra.envs.sandboxes.backends import choose_backend
from palestra.envs.sandboxes.contract import Limits
from palestra.envs.sandboxes.pool import PoolSettings, SandboxPool
from palestra.rl.config import ClusterSettings as ClusterConfig
from palestra.rl.config import Config, EngineSettings
from palestra.rl.make_engine import EnginePlan, make_engine
from palestra.rollout.budgets import Budgets
from palestra.rollout.collector import Plays
from palestra.rollout.engines.protocol import Engine, EngineFacts
from palestra.rollout.nodes import ClusterSettings, Need
from palestra.rollout.player import EpisodeRequest, OwnedBoxes, Player, PlayerSettings
from palestra.rollout.players import PlayerPool
from palestra.rollout.pool import EnginePool
from palestra.rollout.replicas import Limits as ReplicaLimits
from palestra.rollout.replicas import Replicas
from palestra.rollout.second_opinion import SecondSettings
from palestra.rollout.types import Trajectory
from palestra.rollout.worker import Worker

if TYPE_CHECKING:
    from palestra.rollout.cluster import Cluster, Placement, RemotePlayer


@dataclass(slots=True)
class Rooms:
    """What is open while a run works."""

    engines: EnginePool
    players: Plays
    facts: EngineFacts
    leaked: int = 0  # boxes that could not be removed; known once the rooms are closed


def player_settings(config: Config, model_folder: Path) -> PlayerSettings:
    """What a player needs to build its room anywhere."""
    second = config.environment.second_verifier
    return PlayerSettings(
        model_folder=str(model_folder),
        environment=config.environment.name,
        options=config.environment.options,
        budgets=Budgets(**config.environment.budgets.model_dump()),
        history=config.model.history,
        trust_remote_code=config.model.trust_remote_code,
        on_integrity_violation=config.environment.on_integrity_violation,
        second_verifier=SecondSettings(second.name, second.share) if second.name else None,
    )


def with_backend(config: Config, run_id: str) -> tuple[Config, str]:
    """The configuration with the kind of box decided, once for all machines, and why, with the limits that it cannot
    enforce here. Raises ConfigError."""
    sandbox = config.environment.sandbox
    image = None if sandbox.backend == "namespace" else sandbox.image
    backend, reason = choose_backend(sandbox.backend, run=run_id, image=image, runtime=sandbox.runtime or None)
    values = config.model_dump()
    values["environment"]["sandbox"]["backend"] = backend.name
    return Config.model_validate(values), "; ".join([reason, *(f"not enforced: {gap}" for gap in backend.unenforced)])


def boxes_factory(config: Config, run_id: str) -> Callable[[], OwnedBoxes]:
    """A picklable maker of the pool of boxes of one machine."""
    sandbox = config.environment.sandbox
    limits = Limits(
        memory_bytes=sandbox.limits.memory_mb * 2**20,
        processes=sandbox.limits.processes,
        cpus=sandbox.limits.cpus,
        scratch_bytes=sandbox.limits.scratch_mb * 2**20,
        output_bytes=sandbox.limits.output_kb * 2**10,
    )
    settings = PoolSettings(
        backend=sandbox.backend,
        image=None if sandbox.backend == "namespace" else sandbox.image,
        runtime=sandbox.runtime or None,
        max_boxes=sandbox.max_boxes,
        acquire_s=sandbox.acquire_s,
        limits=limits,
        run=run_id,
    )
    return partial(SandboxPool, settings)


def replica_limits(settings: EngineSettings) -> ReplicaLimits:
    """How long the pool waits for engines, and how many dead ones it replaces."""
    return ReplicaLimits(
        start_s=settings.start_s,
        request_s=settings.generate_s,
        replacements=settings.max_replacements * settings.replicas,
    )


@asynccontextmanager
async def open_cluster(config: Config) -> AsyncIterator[Cluster | None]:
    """The cluster of a run, with all its nodes; None for a run without Ray. What was started is stopped."""
    if not config.cluster.ray:
        yield None
        return
    # here, so that a run without Ray needs no Ray
    from palestra.rollout.cluster import Cluster

    engine, told = config.rollout.engine, ClusterSettings.of_launcher(os.environ)
    learner_cpus = config.cluster.learner_ranks * config.optimizer.threads if config.cluster.learner_ranks > 1 else 0
    wanted = replace(
        told,
        address=config.cluster.address or told.address,
        join_s=config.cluster.join_s,
        cpus=max(os.cpu_count() or 1, engine.replicas * engine.threads + learner_cpus),
    )
    with Cluster(wanted) as cluster:
        _await_nodes(cluster.nodes, config.cluster)
        yield cluster


@asynccontextmanager
async def open_rooms(
    config: Config, model_folder: Path, run_id: str, cluster: Cluster | None = None
) -> AsyncIterator[Rooms]:
    """Engines started, boxes reaped and ready; everything is given back on the way out, whatever happened.

    `cluster`: the run's, when it is open already.
    """
    plan = EnginePlan.of(config, model_folder)
    make_player = partial(_player, player_settings(config, model_folder), boxes_factory(config, run_id))
    async with AsyncExitStack() as stack:
        if cluster is None:
            cluster = await stack.enter_async_context(open_cluster(config))
        place = None if cluster is None else _placement(config, cluster)
        if place is not None and config.cluster.players == "nodes":
            opened = _workers_on_nodes(config, partial(_worker, plan, make_player), place, stack)
        else:
            opened = _player_in_driver(config, plan, make_player, place, stack)
        rooms = await opened
        yield rooms


async def _workers_on_nodes(
    config: Config, make: Callable[[int], Worker], place: Placement, stack: AsyncExitStack
) -> Rooms:
    """Each Ray actor holds an engine, a player and its machine's boxes."""
    settings = config.rollout.engine
    replicas: Replicas[RemotePlayer[EpisodeRequest, Trajectory]] = Replicas(
        "rollout worker",
        settings.replicas,
        lambda index: place.player(index, partial(make, index)),
        replica_limits(settings),
    )
    engines = EnginePool(replicas)
    players: PlayerPool[EpisodeRequest, Trajectory] = PlayerPool(replicas, run_s=episode_limit_s(config))
    rooms = Rooms(engines, players, await engines.start())

    async def close() -> None:
        rooms.leaked = await players.close()

    stack.push_async_callback(close)
    return rooms


async def _player_in_driver(
    config: Config,
    plan: EnginePlan,
    make_player: Callable[[Engine], Player],
    place: Placement | None,
    stack: AsyncExitStack,
) -> Rooms:
    """Engines in Ray actors, or one in this process; episodes are played here."""
    settings = config.rollout.engine
    if place is not None:
        replicas: Replicas[Engine] = Replicas(
            "engine",
            settings.replicas,
            lambda index: place.engine(index, partial(make_engine, plan, index)),
            replica_limits(settings),
        )
    else:
        replicas = Replicas("engine", settings.replicas, partial(make_engine, plan), replica_limits(settings))
    engines = EnginePool(replicas)
    facts = await engines.start()
    stack.push_async_callback(engines.close)
    player = make_player(engines)
    await player.start()
    rooms = Rooms(engines, player, facts)

    async def close() -> None:
        rooms.leaked = await player.close()

    stack.push_async_callback(close)
    return rooms


def episode_limit_s(config: Config) -> float:
    """The longest that one episode can take by its own budgets, all tries and the wait for a box included."""
    budgets, sandbox = config.environment.budgets, config.environment.sandbox
    once = budgets.setup_s + budgets.wall_clock_s + 2 * budgets.step_s + budgets.verify_s + sandbox.acquire_s
    second_s = budgets.verify_s if config.environment.second_verifier.name else 0.0
    return config.rollout.max_attempts * once + second_s + 60


def _placement(config: Config, cluster: Cluster) -> Placement:
    """Room for the engines."""
    settings = config.rollout.engine
    need = Need(cpus=1, gpus=settings.gpus) if settings.gpus else Need.threads(settings.threads)
    return cluster.place(settings.replicas, need)


def _await_nodes(nodes: Callable[[], Sequence[object]], settings: ClusterConfig) -> None:
    """Until as many nodes are up as the run was told to wait for. Raises InfrastructureError."""
    deadline = time.monotonic() + settings.join_s
    while len(nodes()) < settings.nodes:
        if time.monotonic() > deadline:
            raise InfrastructureError(
                f"cluster.nodes is {settings.nodes}, but after {settings.join_s:g} s the cluster has {len(nodes())}; "
                "start Ray on the others, or ask for fewer"
            )
        time.sleep(0.5)


def _player(settings: PlayerSettings, boxes: Callable[[], OwnedBoxes], engine: Engine) -> Player:
    return Player(settings, engine, boxes)


def _worker(plan: EnginePlan, make_player: Callable[[Engine], Player], index: int) -> Worker:
    return Worker(make_engine(plan, index), make_player)
