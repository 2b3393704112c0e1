"""Scripted episodes, played for real: the expert's turns, the environment's own tools and boxes, and its verifier."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from palestra.envs.environment import Taskset
from palestra.envs.errors import ConfigError, PalestraError
from palestra.rl.config import Config
from palestra.rl.evaluation import solved
from palestra.rl.recorded import held_out_ids
from palestra.rl.rooms import boxes_factory, player_settings
from palestra.rollout.engines.scripted import ScriptedEngine
from palestra.rollout.load_renderer import load_renderer
from palestra.rollout.play import Ticket
from palestra.rollout.player import EpisodeRequest, Player
from palestra.rollout.seeds import derive_seed
from palestra.rollout.types import Trajectory

MOST_UNSOLVED = 0.1  # of the demonstrations; above it the expert or the environment is broken


async def play_demonstrations(config: Config, taskset: Taskset, base: Path) -> list[Trajectory]:
    """The scripted expert's episodes that were solved, in the order of their numbers.

    Raises ConfigError when one is of a held-out task, PalestraError when too many were not solved.
    """
    tasks = taskset.split("train")
    count, seed = config.warm_start.demonstrations, config.run.seed
    where = [derive_seed(seed, "demonstration", number) % len(tasks) for number in range(count)]
    _refuse_held_out(taskset, [tasks[index].id for index in where])
    renderer = load_renderer(base, history=config.model.history, trust_remote_code=config.model.trust_remote_code)

    def script(prompt: Sequence[int], session: str, turn: int) -> Sequence[int]:
        number = int(session.split("-")[1].partition(".")[0])
        turns = taskset.demonstration(tasks[where[number]], derive_seed(seed, "way", number))
        return renderer.encoder.words(turns[turn])

    player = Player(
        player_settings(config, base),
        ScriptedEngine(script, context_tokens=config.environment.budgets.context_tokens),
        boxes_factory(config, f"{config.run.name}-warm-start"),
    )
    await player.start()
    try:
        played = await _play_all(player, where, config)
    finally:
        await player.close()
    good = [t for t in played if solved(t)]
    if len(good) < (1 - MOST_UNSOLVED) * len(played):
        first = next(t for t in played if not solved(t))
        raise PalestraError(
            f"{len(played) - len(good)} of {len(played)} demonstrations were not solved, so they are nothing to copy. "
            f"First: task {first.task_id}, ended by {first.terminated_by.value}, {first.error or first.verdict}"
        )
    return good


def _refuse_held_out(taskset: Taskset, ids: Sequence[str]) -> None:
    held_out = held_out_ids(taskset)
    leaked = [task for task in ids if task in held_out]
    if leaked:
        raise ConfigError(
            f"{len(leaked)} of {len(ids)} demonstrations are of tasks that the held-out split has, too, such as "
            f"{leaked[0]!r}; give the tasks of the two splits ids of their own, and no task to both"
        )


async def _play_all(player: Player, where: Sequence[int], config: Config) -> list[Trajectory]:
    """Each demonstration once, a bounded number at a time."""
    room = asyncio.Semaphore(2 * config.environment.sandbox.max_boxes)

    async def one(number: int, index: int) -> Trajectory:
        async with room:
            ticket = Ticket(f"demo-{number}", "demonstrations", derive_seed(config.run.seed, "demo", number))
            return await player.run(EpisodeRequest("train", index, ticket, config.rollout.max_attempts))

    return list(await asyncio.gather(*(one(number, index) for number, index in enumerate(where))))
