"""What users' environments and verifiers hand over is what their contract says, or their episode has no verdict."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest

from palestra.envs.errors import InfrastructureError
from palestra.envs.types import Action, Artefact, CallStatus, Message, NoVerdict, Scored, StepResult, Task, ToolResult
from palestra.rollout.guard import GuardedEnvironment, GuardedVerifier


def in_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(*args: object, **named: object) -> None:
        asyncio.run(test(*args, **named))

    return run


TASK = Task("t", (Message("user", "say"),))


class Says:
    """Hands over what it is told to, at every call; raises it when it is an exception."""

    tools = ()

    def __init__(self, value: object) -> None:
        self.value: Any = value

    async def start(self) -> tuple[Message, ...]:
        return self._give()  # type: ignore[no-any-return]

    async def step(self, action: Action) -> StepResult:
        return self._give()  # type: ignore[no-any-return]

    async def export(self) -> Artefact:
        return self._give()  # type: ignore[no-any-return]

    async def verify(self, task: Task, artefact: Artefact) -> Any:
        return self._give()

    async def close(self) -> None:
        raise RuntimeError("must hide nothing")

    def _give(self) -> Any:
        if isinstance(self.value, BaseException):
            raise self.value
        return self.value


async def opened(value: object) -> GuardedEnvironment:
    says = Says(TASK.prompt)
    environment = GuardedEnvironment(lambda: says)
    assert await environment.start() == TASK.prompt
    says.value = value
    return environment


@pytest.mark.parametrize("wrong", [None, "hello", ("a",), 5, (Message("user", 5),)])  # type: ignore[arg-type]
@in_a_loop
async def test_an_opening_is_messages_with_text(wrong: object) -> None:
    with pytest.raises(TypeError, match="the environment's start returned"):
        await GuardedEnvironment(lambda: Says(wrong)).start()


@in_a_loop
async def test_a_list_of_messages_will_do() -> None:
    assert await GuardedEnvironment(lambda: Says(list(TASK.prompt))).start() == TASK.prompt


@pytest.mark.parametrize(
    "wrong",
    [
        None,
        StepResult(("text",), ()),  # type: ignore[arg-type]
        StepResult((Message("tool", b"bytes"),), ()),  # type: ignore[arg-type]
        StepResult((), ("result",)),  # type: ignore[arg-type]
        StepResult((), (ToolResult(CallStatus.OK, "x", arguments={"a": object()}),)),  # type: ignore[dict-item]
    ],
)
@in_a_loop
async def test_a_step_gives_what_the_record_can_hold(wrong: object) -> None:
    with pytest.raises(TypeError):
        await (await opened(wrong)).step(Action("x"))


@in_a_loop
async def test_an_export_is_an_artefact() -> None:
    with pytest.raises(TypeError, match="expected an Artefact"):
        await (await opened(None)).export()


@pytest.mark.parametrize("wrong", [None, 1.0, "1"])
@in_a_loop
async def test_a_verdict_is_a_verdict(wrong: object) -> None:
    with pytest.raises(TypeError, match="expected Scored or NoVerdict"):
        await GuardedVerifier(Says(wrong)).verify(TASK, Artefact())


@pytest.mark.parametrize("score", [float("nan"), float("inf"), -float("inf"), 10**400, "1", None])
@in_a_loop
async def test_a_score_is_a_finite_number(score: Any) -> None:
    class Judge(Says):
        async def verify(self, task: Task, artefact: Artefact) -> Any:
            return Scored(score)

    verdict = await GuardedVerifier(Judge(None)).verify(TASK, Artefact())
    assert isinstance(verdict, NoVerdict)
    assert verdict.cause.startswith(f"not finite: a score of {score!r}"[:40])
    part = await GuardedVerifier(Says(Scored(1.0, {"p": score}))).verify(TASK, Artefact())
    assert isinstance(part, NoVerdict)
    assert "'p'" in part.cause


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 10**400])
def test_a_verdict_that_is_no_finite_number_cannot_be_made(value: float) -> None:
    with pytest.raises(ValueError, match=r"not finite: a score of .*; expected a finite number"):
        Scored(value)
    with pytest.raises(ValueError, match="not finite"):
        replace(Scored(1.0), value=value)


@in_a_loop
async def test_another_error_of_a_judge_is_not_taken_for_a_missing_score() -> None:
    with pytest.raises(ValueError, match="of its own"):
        await GuardedVerifier(Says(ValueError("of its own"))).verify(TASK, Artefact())


@pytest.mark.parametrize("raised", [SystemExit(3), asyncio.CancelledError()])
@in_a_loop
async def test_an_environment_does_not_end_the_run(raised: BaseException) -> None:
    with pytest.raises(InfrastructureError, match="the environment's step"):
        await (await opened(raised)).step(Action("x"))


@in_a_loop
async def test_a_cancellation_from_outside_is_one() -> None:
    class Slow(Says):
        async def step(self, action: Action) -> StepResult:
            await asyncio.sleep(60)
            return StepResult((), ())

    environment = GuardedEnvironment(lambda: Slow(TASK.prompt))
    await environment.start()
    task = asyncio.create_task(environment.step(Action("x")))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@in_a_loop
async def test_what_closing_raises_hides_nothing() -> None:
    await (await opened(None)).close()
    await GuardedVerifier(Says(None)).close()
    await GuardedEnvironment(lambda: Says(None)).close()  # never made
