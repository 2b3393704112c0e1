"""`palestra train`."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from palestra.envs.errors import ConfigError
from palestra.rl.config import Config
from palestra.rl.exit_codes import DONE, INTERRUPTED, STOP_SIGNALS
from palestra.rl.load_config import load_config, to_toml
from palestra.rl.run_folder import RunFolder, open_run
from palestra.rl.terminal import Terminal

if TYPE_CHECKING:
    from palestra.rl.summary import Summary  # torch comes with it


def run_train(path: Path, overrides: Sequence[str], *, resume: str, dry_run: bool) -> int:
    """The exit code of the job. Raises ConfigError before anything has started."""
    config = load_config(path, overrides)
    _check_resume(resume)
    from palestra.rl.preflight import check, check_here  # torch comes with it: a misspelled setting is told before

    plan = check(config)
    terminal = Terminal()
    if dry_run:
        terminal.plain(to_toml(config))
        for line in plan.lines():
            terminal.plain(f"# {line}")
        return DONE
    check_here(config)
    from palestra.rl.job import run_job
    from palestra.rl.resume import find_start

    folder = open_run(config, resume=resume != "never")
    try:
        if not resume.isdigit() and _finished(folder, config):
            terminal.say(f"{folder.path}: this run has done its {config.run.steps} steps; raise run.steps to go on")
            return DONE
        start = find_start(folder, resume, terminal.say)
        for line in plan.lines():
            terminal.plain(line)
        (folder.path / "summary.json").unlink(missing_ok=True)  # it tells of an earlier life; this one writes its own
        summary = asyncio.run(_until_deaf(run_job(plan, folder, start, terminal.say)))
    finally:
        folder.close()
    if summary.exit == "interrupted":
        terminal.say(f"interrupted at step {summary.steps}; the same command goes on from there")
        return INTERRUPTED
    _last_screen(terminal, folder, summary.as_dict())
    if not summary.weight_version:
        terminal.plain("Nothing was learned: in every group all episodes had the same outcome. See `failures` above.")
    return DONE


async def _until_deaf(job: Coroutine[Any, Any, Summary]) -> Summary:
    """The job; then stop signals change nothing more: all is saved, and the exit code that says so must get out."""
    try:
        return await job
    finally:
        for number in STOP_SIGNALS:
            asyncio.get_running_loop().remove_signal_handler(number)
            signal.signal(number, signal.SIG_IGN)


def _check_resume(resume: str) -> None:
    if resume not in ("auto", "never") and not (resume.isascii() and resume.isdigit()):
        raise ConfigError(f"--resume is {resume!r}; use auto, never, or the step of a checkpoint")


def _finished(folder: RunFolder, config: Config) -> bool:
    try:
        summary = json.loads((folder.path / "summary.json").read_text(encoding="utf-8"))
        return bool(summary["exit"] == "done" and summary["steps"] >= config.run.steps)
    except (OSError, ValueError, KeyError, TypeError):
        return False  # absent or damaged: the checkpoints know how far the run came


def _last_screen(terminal: Terminal, folder: RunFolder, summary: dict[str, object]) -> None:
    terminal.plain()
    for name, value in summary.items():
        terminal.plain(f"{name:24} {_shown(value)}")
    terminal.plain()
    terminal.plain(f"Run folder: {folder.path}")
    terminal.plain(f"Next: palestra eval {folder.path}   or look at {folder.path}/metrics.jsonl and trajectories/")


def _shown(value: object) -> str:
    if isinstance(value, dict) and {"mean", "low", "high"} <= value.keys():
        return f"{value['mean']:.3f}  [{value['low']:.3f}, {value['high']:.3f}] on {value['tasks']} tasks"
    if isinstance(value, dict):
        return ", ".join(f"{name} {_shown(part)}" for name, part in value.items())
    return f"{value:.3g}" if isinstance(value, float) else "-" if value is None else str(value)
