"""A taskset of one-turn tasks without boxes, where a random policy is right now and then."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from palestra.envs.environment import Environment, Verifier
from palestra.envs.sandboxes.contract import Boxes
from palestra.envs.tools import Tool
from palestra.envs.types import Action, Artefact, Message, Scored, StepResult, Task, Verdict


class Speech:
    """The policy says something, and that is all."""

    tools: Sequence[Tool] = ()

    def __init__(self, task: Task) -> None:
        self._task = task
        self._said = ""

    async def start(self) -> tuple[Message, ...]:
        return self._task.prompt

    async def step(self, action: Action) -> StepResult:
        self._said = action.text
        return StepResult((), (), done=True)

    async def export(self) -> Artefact:
        return Artefact(self._said)

    async def close(self) -> None: ...


class EvenLength:
    """1 when something was said, in an even number of characters."""

    async def verify(self, task: Task, artefact: Artefact) -> Verdict:
        length = len(str(artefact.answer))
        return Scored(float(length > 0 and length % 2 == 0))

    async def close(self) -> None: ...


@dataclass(frozen=True)
class Speeches:
    """The taskset."""

    tasks: int = 12

    def split(self, name: str) -> Sequence[Task]:
        return [Task(f"{name}-{i}", (Message("user", f"say {i}"),)) for i in range(self.tasks)]

    def environment(self, task: Task, boxes: Boxes) -> Environment:
        return Speech(task)

    def verifier(self) -> Verifier:
        return EvenLength()

    def demonstration(self, task: Task, seed: int) -> tuple[str, ...]:
        return ("ab",)
