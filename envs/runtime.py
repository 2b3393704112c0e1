"""The tool runtime: every call passes the gates in one order, runs within its own time limit, and leaves a record.

Nothing that a policy writes raises here. An InfrastructureError or IntegrityError does: nobody's policy did that.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass

import tenacity

from palestra.envs.errors import ConfigError, InfrastructureError, IntegrityError
from palestra.envs.gates import Gate, Refusal, Repeats, Schema, Scope, named
from palestra.envs.sandboxes.contract import Sandbox
from palestra.envs.tools import Tool, ToolContext, ToolError, ToolTimeout, TransientToolError
from palestra.envs.types import CallStatus, ToolCall, ToolResult

_MAX_ERROR_CHARS = 500


@dataclass(frozen=True, slots=True)
class RuntimeLimits:
    """How much one episode may ask of its tools."""

    calls_per_action: int = 8  # calls beyond are answered, not run
    concurrent_calls: int = 4
    argument_bytes: int = 16_384
    repeat_window: int = 12  # calls that the repeated-call detector looks back on
    repeat_limit: int = 3  # equal calls with equal results in the window before the next is refused
    attempts: int = 3  # tries of a call whose handler says that the failure is transient
    retry_wait_s: float = 0.05  # before the second try; doubled each time, half of it random

    def __post_init__(self) -> None:
        for name in ("calls_per_action", "concurrent_calls", "repeat_window", "repeat_limit", "attempts"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; use 1 or more")


@dataclass(frozen=True, slots=True)
class AuditRecord:
    """What became of one call, and which gate decided it ("execution": none refused). Denials are recorded alike."""

    call: ToolCall
    decided_by: str
    result: ToolResult


class ToolRuntime:
    """The tools of one episode over one box. `gates` shows the order of the checks; `audit` grows with every call."""

    def __init__(self, tools: Sequence[Tool], box: Sandbox, limits: RuntimeLimits, rng: random.Random) -> None:
        self._tools = named(tools)
        if len(self._tools) != len(tools):
            raise ConfigError(f"two tools of one name among {', '.join(tool.name for tool in tools)}")
        self._box = box
        self._limits = limits
        self._rng = rng
        self._turn = asyncio.Lock()
        self._slots = asyncio.Semaphore(limits.concurrent_calls)
        self.gates: tuple[Gate, ...] = (
            Scope(self._tools),
            Schema(self._tools, limits.argument_bytes),
            Repeats(limits.repeat_window, limits.repeat_limit),
        )
        self.audit: list[AuditRecord] = []

    async def run(self, calls: Sequence[ToolCall]) -> tuple[ToolResult, ...]:
        """Run the calls of one action: one result per call, in their order; one that fails takes no other with it.

        A finishing call waits for those before it, and ends the action when it succeeds. Raises InfrastructureError
        and IntegrityError, and nothing for what a policy wrote.
        """
        results: list[ToolResult] = []
        waiting: list[ToolCall] = []
        for index, call in enumerate(calls[: self._limits.calls_per_action]):
            waiting.append(call)
            if self._finishes(call):
                results += await self._together(waiting)
                waiting = []
                if results[-1].status is CallStatus.OK:
                    return (*results, *(self._skip(late, "the episode is over") for late in calls[index + 1 :]))
        results += await self._together(waiting)
        over = calls[self._limits.calls_per_action :]
        reason = f"at most {self._limits.calls_per_action} calls are run in one turn"
        return (*results, *(self._skip(call, reason) for call in over))

    def _finishes(self, call: ToolCall) -> bool:
        return call.name in self._tools and self._tools[call.name].finishes

    async def _together(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        """Gates in the order of the calls, then the ones let pass at once, a finishing one last."""
        decided = [await self._gate(call) for call in calls]
        results: dict[int, ToolResult] = {n: result for n, result in enumerate(decided) if result is not None}
        passed = [n for n, result in enumerate(decided) if result is None]
        last = [n for n in passed if self._finishes(calls[n])]
        for batch in ([n for n in passed if n not in last], last):
            results.update(zip(batch, await _all(self._execute(calls[n]) for n in batch), strict=True))
        return [results[n] for n in range(len(calls))]

    async def _gate(self, call: ToolCall) -> ToolResult | None:
        for gate in self.gates:
            refusal = await gate.check(call)
            if refusal is not None:
                return self._refuse(call, gate.name, refusal)
        return None

    def _refuse(self, call: ToolCall, gate: str, refusal: Refusal) -> ToolResult:
        result = ToolResult(refusal.status, f"error: {refusal.message}", call.name, call.id, call.arguments)
        self.audit.append(AuditRecord(call, gate, result))
        return result

    def _skip(self, call: ToolCall, reason: str) -> ToolResult:
        return self._refuse(call, "limits", Refusal(CallStatus.LIMIT, f"not run: {reason}"))

    async def _execute(self, call: ToolCall) -> ToolResult:
        clock = asyncio.get_running_loop().time
        async with self._slots:
            began = clock()
            status, content, attempts = await self._attempt(call)
            seconds = clock() - began
        result = ToolResult(status, content, call.name, call.id, call.arguments, seconds, attempts)
        for gate in self.gates:
            gate.settle(call, result)
        self.audit.append(AuditRecord(call, "execution", result))
        return result

    async def _attempt(self, call: ToolCall) -> tuple[CallStatus, str, int]:
        """The outcome, and after how many tries. The time limit covers them all."""
        tool = self._tools[call.name]
        retrying = self._retrying()
        content: str
        try:
            async with asyncio.timeout(tool.timeout_s) as clock:
                context = ToolContext(self._box, self._turn, clock)
                content = await retrying(tool.handler, call.arguments, context)
            if not isinstance(content, str):
                raise TypeError(f"the tool returned {type(content).__name__}, not text")
            status = CallStatus.OK
        except (InfrastructureError, IntegrityError):
            raise
        except (TimeoutError, ToolTimeout):
            status, content = CallStatus.TIMEOUT, f"error: {call.name} did not end within {tool.timeout_s:g} s"
        except ToolError as error:
            status, content = CallStatus.ERROR, f"error: {error}"
        except Exception as error:  # noqa: BLE001 - the boundary: what a handler raises is the policy's to read
            status, content = CallStatus.ERROR, f"error: {type(error).__name__}: {_short(str(error))}"
        return status, content, int(retrying.statistics.get("attempt_number", 1))

    def _retrying(self) -> tenacity.AsyncRetrying:
        def wait(state: tenacity.RetryCallState) -> float:
            longest = self._limits.retry_wait_s * 2 ** (state.attempt_number - 1)
            return float(longest * self._rng.uniform(0.5, 1.0))

        return tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception_type(TransientToolError),
            stop=tenacity.stop_after_attempt(self._limits.attempts),
            wait=wait,
            reraise=True,
        )


async def _all(work: Iterable[Coroutine[None, None, ToolResult]]) -> list[ToolResult]:
    """Results in order. The first exception ends the others before it is raised."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _short(text: str) -> str:
    return text if len(text) <= _MAX_ERROR_CHARS else f"{text[:_MAX_ERROR_CHARS]}..."
