"""Plays episodes on one machine: owns its boxes and its judge, borrows an engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

from palestra.envs.calls import JsonInTags
from palestra.envs.environment import JudgesInBoxes, Taskset, Verifier
from palestra.envs.load import load_taskset
from palestra.envs.sandboxes.contract import Boxes
from palestra.envs.types import JSON, Task
from palestra.rollout.budgets import Budgets
from palestra.rollout.engines.protocol import Engine
from palestra.rollout.guard import GuardedEnvironment, GuardedVerifier
from palestra.rollout.integrity import OnViolation, SettlingVerifier, is_masked
from palestra.rollout.load_renderer import load_renderer
from palestra.rollout.play import Stage, Ticket, play
from palestra.rollout.renderer import History
from palestra.rollout.second_opinion import SecondOpinion, SecondSettings, load_second
from palestra.rollout.types import Trajectory


class OwnedBoxes(Boxes, Protocol):
    """A pool of boxes as its owner sees it."""

    async def start(self) -> None:
        """Remove what dead owners left, then be ready to lend."""
        ...

    async def close(self) -> None:
        """Remove every box."""
        ...

    def leaked(self) -> int:
        """Boxes of this owner that are still there."""
        ...


@dataclass(frozen=True, slots=True)
class PlayerSettings:
    """What a player needs to know to build its room anywhere in a cluster; plain data."""

    model_folder: str
    environment: str
    options: Mapping[str, JSON] = field(default_factory=dict)
    budgets: Budgets = field(default_factory=Budgets)
    history: History = "append"
    trust_remote_code: bool = False
    on_integrity_violation: OnViolation = "zero"
    second_verifier: SecondSettings | None = None


@dataclass(frozen=True, slots=True)
class EpisodeRequest:
    """One episode to play: the position of its task in a split, and its ticket."""

    split: str
    index: int
    ticket: Ticket
    max_attempts: int = 2  # tries when infrastructure fails; a verdict is never tried again


class Player:
    """Plays many episodes at once. Tasks come from the taskset by position, so a request is a few bytes."""

    def __init__(self, settings: PlayerSettings, engine: Engine, boxes: Callable[[], OwnedBoxes]) -> None:
        self._settings = settings
        self._engine = engine
        self._make_boxes = boxes
        self._splits: dict[str, Sequence[Task]] = {}
        self._judging: OwnedBoxes | None = None  # boxes that only verifiers use; made for the first that needs them

    async def start(self) -> None:
        """Load the taskset and the tokenizer, start the boxes and the judge."""
        settings = self._settings
        self._taskset: Taskset = load_taskset(settings.environment, dict(settings.options))
        renderer = await asyncio.to_thread(
            load_renderer,
            settings.model_folder,
            history=settings.history,
            trust_remote_code=settings.trust_remote_code,
        )
        self._stage = Stage(self._engine, renderer, JsonInTags(), settings.budgets)
        verifier = self._taskset.verifier()
        self._verifier: Verifier = SettlingVerifier(GuardedVerifier(verifier), settings.on_integrity_violation)
        self._second = self._second_opinion()
        self._boxes = self._make_boxes()
        await self._boxes.start()
        for judge in (verifier, None if self._second is None else self._second.verifier):
            if isinstance(judge, JudgesInBoxes):
                judge.lend(await self._judging_boxes())

    def _second_opinion(self) -> SecondOpinion | None:
        second = self._settings.second_verifier
        if second is None:
            return None
        return SecondOpinion(load_second(second.name, self._taskset), second.share, self._settings.budgets.verify_s)

    async def _judging_boxes(self) -> OwnedBoxes:
        if self._judging is None:
            self._judging = self._make_boxes()
            await self._judging.start()
        return self._judging

    async def run(self, request: EpisodeRequest) -> Trajectory:
        """Play, and play again while infrastructure fails, up to `max_attempts`. The last record is returned; what
        was sampled in the tries before it is counted in its facts, since it is in no record."""
        task = self._task(request.split, request.index)
        discarded = 0
        for attempt in range(1, request.max_attempts + 1):
            environment = GuardedEnvironment(partial(self._taskset.environment, task, self._boxes))
            ticket = request.ticket
            if attempt > 1:  # another session: nothing that an engine kept of the failed try is taken up
                ticket = replace(ticket, trajectory_id=f"{ticket.trajectory_id}.{attempt}")
            trajectory = await play(task, environment, self._verifier, self._stage, ticket)
            masked = is_masked(trajectory.verdict, self._settings.on_integrity_violation)
            if trajectory.valid or masked or attempt == request.max_attempts:
                break
            discarded += trajectory.sampled_tokens
        second = {} if self._second is None else await self._second.facts(task, trajectory)
        facts = {**trajectory.facts, **second, "attempts": attempt, "discarded_tokens": discarded}
        return replace(trajectory, facts=facts)

    async def close(self) -> int:
        """Give everything back. Returns the number of boxes that could not be removed."""
        await self._verifier.close()
        if self._second is not None:
            await GuardedVerifier(self._second.verifier).close()
        pools = [self._boxes, *([] if self._judging is None else [self._judging])]
        for boxes in pools:
            await boxes.close()
        return sum(boxes.leaked() for boxes in pools)

    def _task(self, split: str, index: int) -> Task:
        if split not in self._splits:
            self._splits[split] = self._taskset.split(split)
        return self._splits[split][index]
