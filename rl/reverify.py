"""Judging again what episodes handed over: the same verdicts, or the differences. Nothing is written."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from palestra.envs.environment import Taskset, Verifier
from palestra.envs.errors import ConfigError, InfrastructureError
from palestra.envs.types import Artefact, NoVerdict, Scored, Task, Verdict
from palestra.rl.records import read_records
from palestra.rollout import artefacts
from palestra.rollout.types import Trajectory

AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class Difference:
    """An episode that is judged otherwise than when it was played."""

    trajectory: str
    task: str
    then: str
    now: str


@dataclass(slots=True)
class Reverified:
    """What became of the episodes of a run."""

    episodes: int = 0
    same: int = 0
    not_stored: int = 0  # episodes whose artefact was trimmed, or that never came to one
    recovered: int = 0  # had no verdict when they were played and have one now; their records stay as they are
    still_none: int = 0  # had no verdict, and have none now
    different: list[Difference] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Stored:
    """An episode that can be judged again."""

    trajectory: str
    task: Task
    artefact: Artefact
    verdict: Verdict


def stored_episodes(files: Sequence[Path], taskset: Taskset, found: Reverified) -> Iterable[Stored]:
    """The episodes of record files whose artefacts are there; the others are counted in `found`.

    Raises ConfigError for a damaged record and for a task that the taskset does not have.
    """
    tasks = _Tasks(taskset)
    for file in files:
        kept = dict(artefacts.read(file))
        for where, trajectory in read_records([file]):
            found.episodes += 1
            artefact = kept.get(str(trajectory.facts.get(artefacts.FACT)))
            if artefact is None:
                found.not_stored += 1
                continue
            yield Stored(trajectory.id, tasks.named(trajectory, where), artefact, trajectory.verdict)


async def judge_again(
    episodes: Iterable[Stored], verifier: Verifier, found: Reverified, *, timeout_s: float, at_once: int = AT_ONCE
) -> None:
    """Judge each, some at once, and put what came of it into `found`. A judge that fails is no verdict."""
    waiting = iter(episodes)

    async def work() -> None:
        for episode in waiting:
            _note(episode, await _verdict(episode, verifier, timeout_s), found)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(at_once):
                group.create_task(work())
    except ExceptionGroup as several:
        raise several.exceptions[0] from None  # one of them is enough to say what is wrong
    found.different.sort(key=lambda difference: difference.trajectory)


class _Tasks:
    """Tasks by their ids; a split is read when it is needed."""

    def __init__(self, taskset: Taskset) -> None:
        self._taskset = taskset
        self._splits: dict[str, Mapping[str, Task]] = {}

    def named(self, trajectory: Trajectory, where: str) -> Task:
        for split in ("train", "test"):
            if split not in self._splits:
                self._splits[split] = {task.id: task for task in self._taskset.split(split)}
            task = self._splits[split].get(trajectory.task_id)
            if task is not None:
                return task
        raise ConfigError(
            f"{where}: of task {trajectory.task_id!r}, which the environment of the run's config.toml does not have; "
            "give it the data that the run was played with"
        )


async def _verdict(episode: Stored, verifier: Verifier, timeout_s: float) -> Verdict:
    try:
        return await asyncio.wait_for(verifier.verify(episode.task, episode.artefact), timeout_s)
    except TimeoutError:
        return NoVerdict(f"the verifier did not answer within {timeout_s:g} s")
    except InfrastructureError as error:
        return NoVerdict(str(error))


def _note(episode: Stored, now: Verdict, found: Reverified) -> None:
    then = episode.verdict
    if isinstance(then, NoVerdict) and not then.flags:  # with flags it was masked, which is a judgement too
        if isinstance(now, Scored):
            found.recovered += 1
        else:
            found.still_none += 1
    elif now == then:
        found.same += 1
    else:
        found.different.append(Difference(episode.trajectory, episode.task.id, _words(then), _words(now)))


def _words(verdict: Verdict) -> str:
    if isinstance(verdict, NoVerdict):
        return f"no verdict: {verdict.cause}"
    more = [f"{name}={value:g}" for name, value in sorted(verdict.parts.items())]
    more += [f"flag {flag}" for flag in verdict.flags] + ([verdict.failure] if verdict.failure else [])
    return f"{verdict.value:g}" + (f" ({', '.join(more)})" if more else "")
