"""The border to environments and verifiers that users write: what they hand over is what their contract says.

What is of another kind would be found out later, in the record or in the statistics, where nobody knows any more whose
it was. So it is refused here, as an episode without a verdict that names the cause. Checking costs microseconds.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

from palestra.envs.environment import Environment, OpensInState, Verifier
from palestra.envs.errors import InfrastructureError, ScoreError
from palestra.envs.tools import Tool
from palestra.envs.types import (
    Action,
    Artefact,
    Message,
    NoVerdict,
    Scored,
    StepResult,
    Task,
    ToolResult,
    Verdict,
    is_finite_number,
)

log = logging.getLogger(__name__)
T = TypeVar("T")


class GuardedEnvironment:
    """An environment that is made when it starts, so that whatever goes wrong belongs to its episode."""

    def __init__(self, make: Callable[[], Environment]) -> None:
        self._make = make
        self._environment: Environment | None = None

    @property
    def tools(self) -> Sequence[Tool]:
        """What the policy may call; nothing before the start."""
        return self._environment.tools if self._environment is not None else ()

    async def start(self) -> tuple[Message, ...]:
        """Make the environment and open the episode."""
        opening = await _called(self._begin(), "the environment's start")
        return _all_of(opening, _message, "the environment's start")

    @property
    def opening_state(self) -> str | None:
        """As the environment says, where it says anything."""
        inner = self._environment
        return _state(inner.opening_state, "the environment's opening") if isinstance(inner, OpensInState) else None

    async def _begin(self) -> tuple[Message, ...]:
        self._environment = self._make()
        return await self._environment.start()

    async def step(self, action: Action) -> StepResult:
        """As the environment does."""
        result = await _called(self._opened().step(action), "the environment's step")
        if not isinstance(result, StepResult):
            raise TypeError(f"the environment's step returned {_kind(result)}; expected a StepResult")
        return StepResult(
            _all_of(result.observations, _message, "the environment's step"),
            _all_of(result.results, _result, "the environment's step"),
            bool(result.done),
            _reward(result.reward),
            _state(result.state, "the environment's step"),
        )

    async def export(self) -> Artefact:
        """As the environment does."""
        artefact = await _called(self._opened().export(), "the environment's export")
        if not isinstance(artefact, Artefact):
            raise TypeError(f"the environment's export returned {_kind(artefact)}; expected an Artefact")
        return artefact

    async def close(self) -> None:
        """Close what was made. What that raises is logged: it must not hide what went wrong before it."""
        if self._environment is None:
            return
        try:
            await self._environment.close()
        except Exception as error:  # noqa: BLE001 - written by users
            log.warning("closing an environment failed: %s: %s", type(error).__name__, error)

    def _opened(self) -> Environment:
        assert self._environment is not None, "used before its start"
        return self._environment


class GuardedVerifier:
    """A verifier whose verdicts are verdicts."""

    def __init__(self, verifier: Verifier) -> None:
        self._verifier = verifier

    async def verify(self, task: Task, artefact: Artefact) -> Verdict:
        """The verdict; NoVerdict when its score is not a finite number."""
        try:
            verdict = await _called(self._verifier.verify(task, artefact), "the verifier")
        except ScoreError as error:
            return NoVerdict(str(error))
        if isinstance(verdict, NoVerdict):
            return verdict
        if not isinstance(verdict, Scored):
            raise TypeError(f"the verifier returned {_kind(verdict)}; expected Scored or NoVerdict")
        for what, value in (("a score", verdict.value), *((f"a part {key!r}", v) for key, v in verdict.parts.items())):
            if not is_finite_number(value):
                return NoVerdict(f"not finite: {what} of {repr(value)[:40]}; expected a finite number")
        parts = {str(key): float(value) for key, value in verdict.parts.items()}
        return replace(verdict, value=float(verdict.value), parts=parts)

    async def close(self) -> None:
        """As the verifier does. What that raises is logged: boxes are closed after it."""
        try:
            await self._verifier.close()
        except Exception as error:  # noqa: BLE001 - written by users
            log.warning("closing the verifier failed: %s: %s", type(error).__name__, error)


async def _called(work: Awaitable[T], what: str) -> T:
    """The result of `work`. An exit or a cancellation that nobody outside asked for is its own failure."""
    try:
        return await work
    except SystemExit as error:
        raise InfrastructureError(f"{what} called for the end of the process ({error})") from error
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise InfrastructureError(f"{what} was cancelled from inside") from error


def _all_of(values: Iterable[T], check: Callable[[T, str], None], what: str) -> tuple[T, ...]:
    """A list will do as well; text will not, although it is a sequence too."""
    if not isinstance(values, list | tuple):
        raise TypeError(f"{what} returned {_kind(values)}; expected a tuple")
    for value in values:
        check(value, what)
    return tuple(values)


def _message(value: object, what: str) -> None:
    if not isinstance(value, Message) or not isinstance(value.content, str):
        found = f"a Message with {_kind(value.content)}" if isinstance(value, Message) else _kind(value)
        raise TypeError(f"{what} returned {found}; expected Messages with text")


def _result(value: object, what: str) -> None:
    if not isinstance(value, ToolResult) or not isinstance(value.content, str):
        found = f"a ToolResult with {_kind(value.content)}" if isinstance(value, ToolResult) else _kind(value)
        raise TypeError(f"{what} returned {found}; expected ToolResults with text")
    json.dumps(None if value.arguments is None else dict(value.arguments))  # raises TypeError: the record is JSON


def _reward(value: object) -> float:
    if isinstance(value, bool) or not is_finite_number(value):
        raise TypeError(f"the environment's step gave a reward of {value!r}; expected a finite number")
    return float(value)


def _state(value: object, what: str) -> str | None:
    if value is not None and not isinstance(value, str):
        raise TypeError(f"{what} gave a state that is {_kind(value)}; expected text or None")
    return value


def _kind(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
