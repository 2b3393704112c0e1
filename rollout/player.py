"""Plays episodes on one machine: owns its boxes and its judge, borrows an engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

from palestra.envs.calls import JsonInTags
from palestra.envs.environment import Taskset, Verifier
from palestra.envs.load import load_taskset
from palestra.envs.sandboxes.contract import Boxes
from palestra.envs.types import JSON, Task
from palestra.rollout.budgets import Budgets
from palestra.rollout.engines.protocol import Engine
from palestra.rollout.guard import GuardedEnvironment, GuardedVerifier
from palestra.rollout.load_renderer import load_renderer
from palestra.rollout.play import Stage, Ticket, play
from palestra.rollout.renderer import History
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
        self._verifier: Verifier = GuardedVerifier(self._taskset.verifier())
        self._boxes = self._make_boxes()
        await self._boxes.start()

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
            if trajectory.valid or attempt == request.max_attempts:
                break
            discarded += trajectory.sampled_tokens
        return replace(trajectory, facts={**trajectory.facts, "attempts": attempt, "discarded_tokens": discarded})

    async def close(self) -> int:
        """Give everything back. Returns the number of boxes that could not be removed."""
        await self._verifier.close()
        await self._boxes.close()
        return self._boxes.leaked()

    def _task(self, split: str, index: int) -> Task:
        if split not in self._splits:
            self._splits[split] = self._taskset.split(split)
        return self._splits[split][index]
