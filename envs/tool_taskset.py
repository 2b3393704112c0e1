"""A taskset of one's own in a few lines: tools, a function that makes task n, and a judge by its name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import ClassVar

from palestra.envs.builtin.tasks import TasksOnDemand, must_be_split
from palestra.envs.calls import JsonInTags
from palestra.envs.environment import Environment, Verifier
from palestra.envs.sandboxes.contract import Boxes
from palestra.envs.tool_environment import ToolEnvironment
from palestra.envs.tools import Tool
from palestra.envs.types import JSON, Message, Task
from palestra.envs.verifiers.process import ProcessVerifier
from palestra.envs.verifiers.verdict import Bounds

_CALLS = JsonInTags()


class ToolTaskset(ABC):
    """Tasks that are played with `tools` in a box, and judged by a pure function in a process of its own.

    A subclass sets `tools` and writes `make`; whatever else is here may be overridden, and nothing has to be. A taskset
    that wants more than this writes the four methods of `Taskset` itself.
    """

    tools: ClassVar[Sequence[Tool]]
    """What the policy may call; one of them finishes."""
    judge: ClassVar[str] = "palestra.envs.verifiers.numeric:judge"
    """"package.module:function" of (truth, answer); this one compares the argument `value` with truth["number"]."""
    bounds: ClassVar[Bounds] = Bounds(0.0, 1.0)
    """Of the judge's rewards."""
    train_tasks: ClassVar[int] = 500
    test_tasks: ClassVar[int] = 200
    digest_states: ClassVar[bool] = False
    """Record in which state the box was before each turn, for algorithms that compare turns of equal states."""
    call_reward: ClassVar[float] = 0.0
    """What a turn earns by itself when all its calls ran, for algorithms that look at turns."""

    @abstractmethod
    def make(self, split: str, n: int) -> Task:
        """Task number n of "train" or "test", the same each time. The two splits share no fact."""

    def demonstration(self, task: Task, seed: int) -> tuple[str, ...]:
        """The turns of a scripted expert, for imitation; none unless written. `call` writes one."""
        return ()

    def ask(self, question: str) -> tuple[Message, ...]:
        """A task's prompt: which tools there are, how they are called, and the question."""
        return (Message("user", f"{_CALLS.declare(self.tools)}\n{question}"),)

    def call(self, tool: str, **arguments: JSON) -> str:
        """A tool call as the policy should write it."""
        return _CALLS.render_call(tool, arguments)

    def split(self, name: str) -> Sequence[Task]:
        """The tasks of "train" or "test", made when they are asked for."""
        must_be_split(name)
        return TasksOnDemand(self.train_tasks if name == "train" else self.test_tasks, partial(self.make, name))

    def environment(self, task: Task, boxes: Boxes) -> Environment:
        """A fresh episode."""
        return ToolEnvironment(
            task,
            self.tools,
            boxes,
            digest_states=self.digest_states,
            call_reward=self.call_reward,
        )

    def verifier(self) -> Verifier:
        """The judge."""
        return ProcessVerifier(self.judge, bounds=self.bounds)
