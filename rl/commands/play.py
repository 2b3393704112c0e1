"""`palestra play`: one episode, turn by turn, for a person to read."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from palestra.envs.environment import Taskset
from palestra.envs.errors import ConfigError
from palestra.envs.types import Scored, Task
from palestra.rl.config import Config
from palestra.rl.exit_codes import DONE
from palestra.rl.load_config import load_config
from palestra.rl.make_engine import EnginePlan, make_engine
from palestra.rl.policy import Policy, prepare_policy
from palestra.rl.preflight import check
from palestra.rl.rooms import boxes_factory, player_settings, with_backend
from palestra.rl.terminal import Terminal
from palestra.rollout.engines.protocol import Engine
from palestra.rollout.engines.scripted import ScriptedEngine
from palestra.rollout.load_renderer import load_renderer
from palestra.rollout.play import Ticket
from palestra.rollout.player import EpisodeRequest, Player
from palestra.rollout.types import Trajectory


def run_play(path: Path, overrides: Sequence[str], task: str | None, split: str, policy: str) -> int:
    """Play and print. Raises ConfigError for a task, a split or a policy that is not there."""
    if policy not in ("scripted", "model"):
        raise ConfigError(f"--policy is {policy!r}; use scripted or model")
    if split not in ("train", "test"):
        raise ConfigError(f"--split is {split!r}; use train or test")
    config = for_one_episode(load_config(path, overrides), policy)
    plan = check(config)
    index = _index(plan.taskset.split(split), task, split)
    decided, _ = with_backend(config, f"{config.run.name}-play")
    trajectory = asyncio.run(_play(decided, plan.taskset, split, index, policy))
    _show(Terminal(), trajectory)
    return DONE


def for_one_episode(config: Config, policy: str) -> Config:
    """Without what one episode does not need: an evaluation, a batch, and for a scripted expert any training."""
    changes: dict[str, object] = {
        "evaluation": config.evaluation.model_copy(update={"tasks": 0}),
        "run": config.run.model_copy(update={"groups_per_step": 1}),
    }
    if policy == "scripted":
        changes["warm_start"] = config.warm_start.model_copy(update={"demonstrations": 0, "recorded": None})
    return config.model_copy(update=changes)


async def _play(config: Config, taskset: Taskset, split: str, index: int, policy: str) -> Trajectory:
    prepared = await prepare_policy(config, taskset, None, Terminal().say)
    async with AsyncExitStack() as stack:
        engine = (
            _scripted(config, taskset, split, index, prepared) if policy == "scripted" else _model(config, prepared)
        )
        await engine.start()
        stack.push_async_callback(engine.close)
        if policy == "model" and prepared.start is not None:
            await engine.load(prepared.start, 0)
        player = Player(player_settings(config, prepared.folder), engine, boxes_factory(config, "play"))
        await player.start()
        stack.push_async_callback(player.close)
        ticket = Ticket("play", "play", config.run.seed, config.rollout.sampling.temperature)
        return await player.run(EpisodeRequest(split, index, ticket, 1))


def _scripted(config: Config, taskset: Taskset, split: str, index: int, prepared: Policy) -> Engine:
    turns = taskset.demonstration(taskset.split(split)[index], config.run.seed)
    if not turns:
        raise ConfigError("this environment has no scripted expert for the task; use --policy model")
    renderer = load_renderer(prepared.folder)
    encoded = [renderer.encoder.glue([turn]) for turn in turns]
    return ScriptedEngine(encoded, context_tokens=config.environment.budgets.context_tokens)


def _model(config: Config, prepared: Policy) -> Engine:
    return make_engine(EnginePlan.of(config, prepared.folder), 0)


def _index(tasks: Sequence[Task], wanted: str | None, split: str) -> int:
    if not len(tasks):
        raise ConfigError(f"the split {split} has no tasks")
    if wanted is None:
        return 0
    if wanted.isascii() and wanted.isdigit() and int(wanted) < len(tasks):
        return int(wanted)
    for index in range(min(len(tasks), 100_000)):
        if tasks[index].id == wanted:
            return index
    raise ConfigError(
        f"--task {wanted!r}: the split {split} has {len(tasks)} tasks, such as {tasks[0].id}; no such one"
    )


def _show(terminal: Terminal, trajectory: Trajectory) -> None:
    opening = 0
    for message in trajectory.messages:
        if message.role == "assistant":
            break
        opening += 1
        terminal.plain(f"--- {message.role}\n{message.content}")
    rest = iter(trajectory.messages[opening:])
    for turn in trajectory.turns:
        facts = f"{turn.sampled_tokens} tokens, {turn.generate_s:.2f} s, finished by {turn.finish.value}"
        terminal.plain(f"\n=== turn {turn.index + 1} ({facts})\n{next(rest).content}")
        answers = max(len(turn.results), 1)
        for number in range(answers):
            result = turn.results[number] if turn.results else None
            answer = next(rest, None)
            status = f" [{result.status.value}, {1000 * result.seconds:.1f} ms]" if result else ""
            text = answer.content if answer else (result.content if result else "")
            terminal.plain(f"--- tool{status}\n{text}")
    verdict = trajectory.verdict
    outcome = f"reward {verdict.value:g}" if isinstance(verdict, Scored) else f"no verdict: {verdict.cause}"
    terminal.plain(
        f"\nended by {trajectory.terminated_by.value}; {outcome}; {trajectory.sampled_tokens} tokens sampled"
    )
