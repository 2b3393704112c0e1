"""The contract of an environment: one task, one episode, one use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from palestra.envs.sandboxes.contract import Boxes
from palestra.envs.tools import Tool
from palestra.envs.types import Action, Artefact, Message, StepResult, Task, Verdict


class Environment(Protocol):
    """One task being played. Opened per episode, used once, closed by whoever opened it."""

    @property
    def tools(self) -> Sequence[Tool]:
        """What the policy may call; fixed for the episode."""
        ...

    async def start(self) -> tuple[Message, ...]:
        """Make the world ready and return the opening messages. Raises SandboxError."""
        ...

    async def step(self, action: Action) -> StepResult:
        """Run what the action asks for. Whatever the policy got wrong is an observation, never an exception.

        Raises SandboxError when the world broke for no fault of the policy.
        """
        ...

    async def export(self) -> Artefact:
        """What is to be judged, taken out of the policy's reach. Raises SandboxError."""
        ...

    async def close(self) -> None:
        """Give everything back. Idempotent; never raises."""
        ...


@runtime_checkable
class OpensInState(Protocol):
    """An environment that also knows in which state it opens; later states come with each step's result."""

    @property
    def opening_state(self) -> str | None:
        """Digest of the world as the first action finds it; set by `start`. None: not asked for."""
        ...


class Verifier(Protocol):
    """Judges an artefact, elsewhere: never in a box or a process of the policy."""

    async def verify(self, task: Task, artefact: Artefact) -> Verdict:
        """A verdict, or why there is none. Never raises for a bad artefact; bounded in time."""
        ...

    async def close(self) -> None:
        """End what judges. Idempotent."""
        ...


@runtime_checkable
class JudgesInBoxes(Protocol):
    """A verifier that needs boxes to judge in. They come from a pool of its own: no policy used or will use one."""

    def lend(self, boxes: Boxes) -> None:
        """Called once, before the first `verify`. Whoever lends them closes them, after the verifier."""
        ...


class Taskset(Protocol):
    """Where tasks come from. An environment's setting names a function that returns one."""

    def split(self, name: str) -> Sequence[Task]:
        """The tasks of "train" or "test"; the two never share a fact. Order and content are fixed by the seed."""
        ...

    def environment(self, task: Task, boxes: Boxes) -> Environment:
        """A fresh environment for one episode. Nothing mutable is shared between two of them."""
        ...

    def verifier(self) -> Verifier:
        """A judge of this environment's episodes; whoever asks for it closes it."""
        ...

    def demonstration(self, task: Task, seed: int) -> tuple[str, ...]:
        """The turns of a scripted expert for the task, as the policy would write them; for imitation and tests."""
        ...


@runtime_checkable
class MayDigest(Protocol):
    """A taskset whose environments say in which state they are only when they are told to."""

    @property
    def digest_states(self) -> bool:
        """Whether they do."""
        ...
