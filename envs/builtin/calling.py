"""An episode of calls that nothing runs: the policy says which functions it would call, and that is the answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from palestra.envs.calls import CallFormat, JsonInTags
from palestra.envs.gates import Gate, Schema, Scope, named
from palestra.envs.tools import Tool
from palestra.envs.types import JSON, Action, Artefact, CallStatus, Message, StepResult, Task, ToolCall, ToolResult

_CALLS = JsonInTags()
_MAX_CALLS = 16  # of one turn
_MAX_BYTES = 16_384  # of one call's arguments


class CallingEnvironment:
    """One episode of `task` with declared functions. No box: nothing runs.

    The first turn whose calls all satisfy their declarations is the answer and ends the episode. A turn that breaks one
    is told which argument was wrong, and counts for nothing else. What leaves is `{"calls": [{"name", "arguments"}] or
    None, "turns": n}`.
    """

    def __init__(self, task: Task, tools: Sequence[Tool], *, calls: CallFormat = _CALLS) -> None:
        self.task = task
        self._tools = tuple(tools)
        self._calls = calls
        by_name = named(self._tools)
        self._gates: tuple[Gate, ...] = (Scope(by_name), Schema(by_name, _MAX_BYTES))
        self._answer: tuple[ToolCall, ...] | None = None
        self._turns = 0
        self._num_calls = 0

    @property
    def tools(self) -> Sequence[Tool]:
        """What the policy may call."""
        return self._tools

    async def start(self) -> tuple[Message, ...]:
        """The task's prompt."""
        return self.task.prompt

    async def step(self, action: Action) -> StepResult:
        """Take the calls as the answer, or say what is wrong with them."""
        if self._answer is not None:
            raise RuntimeError(f"{self.task.id}: step after the end of the episode")
        self._turns += 1
        calls = [replace(call, id=f"c{self._num_calls + n}") for n, call in enumerate(action.calls, 1)]
        self._num_calls += len(calls)
        results = [await self._look(call, n) for n, call in enumerate(calls)]
        results += [ToolResult(CallStatus.UNPARSABLE, f"error: {error.message}") for error in action.errors]
        if not results:
            names = ", ".join(tool.name for tool in self._tools)
            reminder = f"error: no function called. Write {self._calls.form} with one of: {names}"
            results = [ToolResult(CallStatus.NO_CALL, reminder)]
        done = all(result.status is CallStatus.OK for result in results)
        if done:
            self._answer = tuple(calls)
        return StepResult(tuple(map(self._observation, results)), tuple(results), done)

    async def export(self) -> Artefact:
        """The calls, as plain data."""
        if self._answer is None:
            return Artefact({"calls": None, "turns": self._turns})
        calls: list[JSON] = [{"name": call.name, "arguments": dict(call.arguments)} for call in self._answer]
        return Artefact({"calls": calls, "turns": self._turns})

    async def close(self) -> None:
        """Nothing was borrowed."""

    async def _look(self, call: ToolCall, index: int) -> ToolResult:
        if index >= _MAX_CALLS:
            told = f"error: at most {_MAX_CALLS} calls are taken in one turn"
            return ToolResult(CallStatus.LIMIT, told, call.name, call.id, call.arguments)
        for gate in self._gates:
            refusal = await gate.check(call)
            if refusal is not None:
                return ToolResult(refusal.status, f"error: {refusal.message}", call.name, call.id, call.arguments)
        return ToolResult(CallStatus.OK, "accepted", call.name, call.id, call.arguments)

    def _observation(self, result: ToolResult) -> Message:
        known = any(tool.name == result.name for tool in self._tools)
        return Message("tool", result.content, name=result.name if known else None, call_id=result.call_id)
