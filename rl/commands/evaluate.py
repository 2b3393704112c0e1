"""`palestra eval`."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from palestra.envs.errors import ConfigError
from palestra.rl.checkpoints import Checkpoints, base_digest, broken, places
from palestra.rl.evaluation import Report, report
from palestra.rl.exit_codes import DONE
from palestra.rl.job import collector_settings, make_learner, max_gap
from palestra.rl.json_file import check_json_file
from palestra.rl.load_config import load_config
from palestra.rl.policy import prepare_policy
from palestra.rl.preflight import Plan, check
from palestra.rl.probe import probe_rows
from palestra.rl.publish import Publisher
from palestra.rl.rooms import open_rooms, with_backend
from palestra.rl.terminal import Terminal
from palestra.rollout.collector import Collector
from palestra.rollout.load_renderer import load_renderer


def run_evaluate(
    path: Path,
    overrides: Sequence[str],
    step: int | None,
    tasks: int | None,
    samples: int | None,
    json_file: Path | None,
) -> int:
    """Evaluate a configuration's starting policy, or a checkpoint of a run."""
    is_run = path.is_dir()
    config = load_config(path / "config.toml" if is_run else path, overrides)
    if is_run and Path(config.run.folder) / config.run.name != path:
        config = config.model_copy(
            update={"run": config.run.model_copy(update={"folder": str(path.parent), "name": path.name})}
        )
    if step is not None and not is_run:
        raise ConfigError(f"--step {step} names a checkpoint of a run, but {path} is a configuration")
    plan = check(config)
    terminal = Terminal()
    wanted = (
        config.evaluation.tasks if tasks is None else tasks,
        config.evaluation.samples if samples is None else samples,
    )
    if not 0 < wanted[0] <= plan.num_test:
        raise ConfigError(
            f"--tasks is {wanted[0]}; the held-out split has {plan.num_test}, so use 1 to {plan.num_test}"
        )
    if wanted[1] < 1:
        raise ConfigError(f"--samples is {wanted[1]}; play each task at least once")
    check_json_file(json_file)
    decided, why = with_backend(config, f"{config.run.name}-eval")
    terminal.say(f"sandbox {decided.environment.sandbox.backend} ({why})")
    plan = Plan(decided, plan.taskset, plan.algorithm, plan.num_train, plan.num_test)
    place = path / "checkpoints" if is_run else None
    found = asyncio.run(_evaluate(plan, place, step, *wanted, terminal))
    for name, value in asdict(found).items():
        terminal.plain(f"{name:22} {value}")
    if json_file is not None:
        json_file.write_text(json.dumps(asdict(found), indent=2) + "\n", encoding="utf-8")
    return DONE


async def _evaluate(
    plan: Plan, checkpoints: Path | None, step: int | None, tasks: int, samples: int, terminal: Terminal
) -> Report:
    config = plan.config
    policy = await prepare_policy(
        config, plan.taskset, checkpoints.parent / "model" if checkpoints else None, terminal.say
    )
    learner = make_learner(config, policy)
    if checkpoints is not None:
        folder = _checkpoint(checkpoints, step, terminal)
        state, _ = Checkpoints(checkpoints, base_digest(policy.folder)).load(folder)
        learner.load_state(state)
        terminal.say(f"weights of {folder}")
    async with open_rooms(config, policy.folder, f"{config.run.name}-eval") as rooms:
        renderer = load_renderer(policy.folder, history=config.model.history)
        rows = probe_rows(renderer, plan.taskset, config.environment.budgets.context_tokens)
        await Publisher(rooms.engines, learner, rows, max_gap(config)).publish(learner.step)
        with tempfile.TemporaryDirectory() as scratch:
            collector = Collector(
                rooms.players, _NoBook(), lambda position: (position, ""), Path(scratch), collector_settings(config)
            )
            collector.version = learner.step
            trajectories = await collector.evaluate(
                "test",
                plan.held_out(tasks),
                samples,
                temperature=config.evaluation.temperature,
                seed=config.run.seed,
                file=Path(scratch) / "evaluation.jsonl",
            )
    return report(trajectories)


def _checkpoint(checkpoints: Path, step: int | None, terminal: Terminal) -> Path:
    if step is not None:
        place = checkpoints / f"step_{step:06d}"
        problem = broken(place) if place.exists() else "it is not there"
        if problem is not None:
            have = ", ".join(p.name for p in places(checkpoints) if broken(p) is None) or "none"
            raise ConfigError(f"{place}: no complete checkpoint: {problem}; have {have}")
        return place
    found = Checkpoints(checkpoints, base="").newest()
    if found is None:
        raise ConfigError(f"{checkpoints}: this run has no checkpoint yet; evaluate its configuration instead")
    for why in found.skipped:
        terminal.say(f"skipped: {why}")
    return found.folder


class _NoBook:
    """Evaluation issues nothing."""

    def next_position(self) -> int:
        return 0

    def issue(self, position: int, group_id: str, task_id: str, version: int) -> None:
        raise AssertionError("evaluation issues no groups")

    def finish(self, position: int) -> None:
        raise AssertionError("evaluation issues no groups")
