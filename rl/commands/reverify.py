"""`palestra reverify`: judge the stored artefacts of a run again."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from palestra.envs.environment import JudgesInBoxes, Taskset
from palestra.envs.errors import ConfigError
from palestra.rl.config import Config
from palestra.rl.exit_codes import DONE, FAILED
from palestra.rl.json_file import check_json_file
from palestra.rl.load_config import load_config
from palestra.rl.reverify import Reverified, judge_again, stored_episodes
from palestra.rl.rooms import boxes_factory, with_backend
from palestra.rl.taskset_check import open_taskset
from palestra.rl.terminal import Terminal
from palestra.rollout.guard import GuardedVerifier
from palestra.rollout.integrity import SettlingVerifier

SHOWN = 20


def run_reverify(run: Path, json_file: Path | None) -> int:
    """Print what came of it; exit code 1 when a verdict differs. Raises ConfigError for what is no run's folder."""
    if not run.is_dir():
        raise ConfigError(f"{run}: no such folder; give the folder of a run, such as runs/NAME")
    check_json_file(json_file)
    config = load_config(run / "config.toml")
    files = [file for part in ("trajectories", "evaluations") for file in sorted((run / part).glob("*.jsonl"))]
    if not files:
        raise ConfigError(f"{run}: no records of episodes in trajectories/ or evaluations/; nothing to judge again")
    taskset, _, _ = open_taskset(config)
    found = asyncio.run(_reverify(config, taskset, files))
    _show(found, Terminal())
    if json_file is not None:
        json_file.write_text(json.dumps(found.as_dict(), indent=2) + "\n", encoding="utf-8")
    return FAILED if found.different else DONE


async def _reverify(config: Config, taskset: Taskset, files: Sequence[Path]) -> Reverified:
    found = Reverified()
    verifier = taskset.verifier()
    async with AsyncExitStack() as stack:
        if isinstance(verifier, JudgesInBoxes):
            run_id = f"{config.run.name}-reverify"
            decided, _ = with_backend(config, run_id)
            boxes = boxes_factory(decided, run_id)()
            await boxes.start()
            stack.push_async_callback(boxes.close)
            verifier.lend(boxes)
        guarded = SettlingVerifier(GuardedVerifier(verifier), config.environment.on_integrity_violation)
        stack.push_async_callback(guarded.close)
        timeout_s = config.environment.budgets.verify_s
        await judge_again(stored_episodes(files, taskset, found), guarded, found, timeout_s=timeout_s)
    return found


def _show(found: Reverified, terminal: Terminal) -> None:
    for difference in found.different[:SHOWN]:
        terminal.plain(f"{difference.trajectory} (task {difference.task}): {difference.then} -> {difference.now}")
    if len(found.different) > SHOWN:
        terminal.plain(f"... and {len(found.different) - SHOWN} more; --json FILE lists them all")
    terminal.plain(
        f"{found.episodes} episodes: {found.same} judged the same, {len(found.different)} otherwise, "
        f"{found.not_stored} without a stored artefact"
    )
    if found.recovered or found.still_none:
        terminal.plain(
            f"{found.recovered + found.still_none} had no verdict: {found.recovered} have one now, and their records "
            "stay as they are"
        )
