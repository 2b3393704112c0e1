"""`palestra check-env`: whether an environment may be trained on."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict
from pathlib import Path

from palestra.envs.admission.rows import Check, Row, checked, checks
from palestra.envs.admission.scene import Scene
from palestra.envs.environment import JudgesInBoxes, Taskset
from palestra.envs.errors import ConfigError
from palestra.envs.types import Task
from palestra.rl.config import Config
from palestra.rl.exit_codes import DONE, FAILED
from palestra.rl.json_file import check_json_file
from palestra.rl.load_config import load_config
from palestra.rl.rooms import boxes_factory, episode_limit_s, with_backend
from palestra.rl.taskset_check import open_taskset
from palestra.rl.terminal import Terminal
from palestra.rollout.guard import GuardedVerifier

AT_ONCE = 2 * (os.cpu_count() or 1)
LIMIT_S = 600.0


def run_check_env(path: Path, overrides: Sequence[str], count: int, json_file: Path | None) -> int:
    """Check the first tasks and print a table; exit code 1 when a row failed. Raises ConfigError."""
    if count < 1:
        raise ConfigError(f"--tasks is {count}; check one or more")
    check_json_file(json_file)
    config = load_config(path, overrides)
    taskset, train, test = open_taskset(config)
    split = taskset.split("train" if train else "test")
    tasks = [split[index] for index in range(min(count, train or test))]
    if not tasks:
        raise ConfigError(f"environment {config.environment.name} has no tasks to check")
    terminal = Terminal()
    decided, why = with_backend(config, f"{config.run.name}-check")
    terminal.say(f"sandbox {decided.environment.sandbox.backend} ({why}); {len(tasks)} tasks")
    rows = asyncio.run(_check(decided, taskset, tasks))
    failed = _show(rows, terminal)
    if json_file is not None:
        json_file.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n", encoding="utf-8")
    return FAILED if failed else DONE


async def _check(config: Config, taskset: Taskset, tasks: Sequence[Task]) -> list[Row]:
    """The rows of all tasks, some at once."""
    verifier = taskset.verifier()
    run_id = f"{config.run.name}-check"
    free = asyncio.Semaphore(AT_ONCE)
    limit_s = min(LIMIT_S, episode_limit_s(config))
    async with AsyncExitStack() as stack:
        boxes = boxes_factory(config, run_id)()
        await boxes.start()
        stack.push_async_callback(boxes.close)
        if isinstance(verifier, JudgesInBoxes):
            judging = boxes_factory(config, run_id)()
            await judging.start()
            stack.push_async_callback(judging.close)
            verifier.lend(judging)
        guarded = GuardedVerifier(verifier)
        stack.push_async_callback(guarded.close)
        scene = Scene(taskset, boxes, guarded, config.run.seed)

        async def row(task: Task, name: str, check: Check) -> Row:
            async with free:
                return await checked(name, task, check, limit_s)

        wanted = [row(task, name, check) for task in tasks for name, check in checks(scene, task)]
        return list(await asyncio.gather(*wanted))


def _show(rows: Sequence[Row], terminal: Terminal) -> list[Row]:
    """A line for each check, over all tasks. Returns the rows that failed."""
    for name in dict.fromkeys(row.check for row in rows):
        mine = [row for row in rows if row.check == name]
        told = next((row for row in mine if row.ok is False), mine[0])
        sign = "FAILED" if told.ok is False else "-" if all(row.ok is None for row in mine) else "ok"
        terminal.plain(f"{sign:7}{name:52} wanted {told.expected:14} got {told.found}")
    failed = [row for row in rows if row.ok is False]
    for row in failed:
        terminal.plain(f"FAILED {row.check}, task {row.task}: wanted {row.expected}, got {row.found}")
    judged = sum(row.ok is not None for row in rows)
    terminal.plain(
        f"{judged} checks, {len(failed)} failed" + ("" if failed else "; this environment may be trained on")
    )
    return failed
