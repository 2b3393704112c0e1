"""The gates between a call and its tool. Each says no in words that help the next attempt, or lets the call pass."""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from palestra.envs.schemas import echo, validator, violations
from palestra.envs.tools import Tool
from palestra.envs.types import JSON, CallStatus, ToolCall, ToolResult

_MAX_VIOLATIONS = 5


@dataclass(frozen=True, slots=True)
class Refusal:
    """A gate's no. The tool did not run."""

    status: CallStatus
    message: str


class Gate(Protocol):
    """One check. Gates are asked in order, call by call in the order of writing, before any call of the action runs."""

    @property
    def name(self) -> str:
        """The word for it in the audit."""
        ...

    async def check(self, call: ToolCall) -> Refusal | None:
        """Why the call may not run, or None. May wait, within a bound of its own."""
        ...

    def settle(self, call: ToolCall, result: ToolResult) -> None:
        """A call that every gate let pass has ended."""
        ...


@dataclass(frozen=True, slots=True)
class Scope:
    """Only tools of the episode exist; any other name is answered alike, so that nothing can be learned from it."""

    tools: Mapping[str, Tool]
    name: str = "scope"

    async def check(self, call: ToolCall) -> Refusal | None:
        """Refuse a tool that is not granted, and name those that are."""
        if call.name in self.tools:
            return None
        return Refusal(CallStatus.UNKNOWN_TOOL, f"no tool {echo(call.name)}. Have: {', '.join(self.tools)}")

    def settle(self, call: ToolCall, result: ToolResult) -> None:
        """Nothing to remember."""


class Schema:
    """Arguments satisfy the tool's JSON Schema (draft 2020-12) and fit into `max_bytes`, or the tool does not run."""

    name = "schema"

    def __init__(self, tools: Mapping[str, Tool], max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._validators = {name: validator(tool.parameters) for name, tool in tools.items()}

    async def check(self, call: ToolCall) -> Refusal | None:
        """Refuse with every violation, at most five."""
        size = len(canonical(call.arguments))
        if size > self._max_bytes:
            return _invalid(f"{size} bytes of arguments; at most {self._max_bytes} are taken")
        found = violations(self._validators[call.name], call.arguments)
        if not found:
            return None
        rest = len(found) - _MAX_VIOLATIONS
        return _invalid("; ".join(found[:_MAX_VIOLATIONS]) + (f"; and {rest} more" if rest > 0 else ""))

    def settle(self, call: ToolCall, result: ToolResult) -> None:
        """Nothing to remember."""


class Repeats:
    """The same call again and again, with the same outcome, gets a nudge instead of another run.

    A call is the same when name and arguments are, in whatever order of keys. Looks at the last `window` calls; a
    different result starts the count anew, so polling something that changes stays possible.
    """

    name = "repeats"

    def __init__(self, window: int, limit: int) -> None:
        self._limit = limit
        self._recent: deque[tuple[str, str]] = deque(maxlen=window)  # (call, outcome), in order of ending
        self._running: dict[str, str] = {}  # id -> call: let pass, not ended

    async def check(self, call: ToolCall) -> Refusal | None:
        """Refuse the call when it ran `limit` times with one outcome."""
        key = _digest(call.name, canonical(call.arguments))
        seen = self._same_outcome(key) + sum(running == key for running in self._running.values())
        if seen >= self._limit:
            again = f"not run: the same call gave the same result {seen} times. Use what it gave, or try something else"
            return Refusal(CallStatus.REPEATED, again)
        self._running[call.id] = key
        return None

    def settle(self, call: ToolCall, result: ToolResult) -> None:
        """Remember the outcome."""
        key = self._running.pop(call.id, None)
        if key is not None:
            self._recent.append((key, _digest(result.status, result.content)))

    def _same_outcome(self, key: str) -> int:
        outcomes = [outcome for recent, outcome in reversed(self._recent) if recent == key]
        return next((n for n, outcome in enumerate(outcomes) if outcome != outcomes[0]), len(outcomes))


def canonical(arguments: Mapping[str, JSON]) -> str:
    """One text per meaning: keys sorted, no spaces, ASCII."""
    return json.dumps(arguments, sort_keys=True, separators=(",", ":"), default=str)


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _invalid(message: str) -> Refusal:
    return Refusal(CallStatus.INVALID_ARGUMENTS, message)


def named(tools: Sequence[Tool]) -> dict[str, Tool]:
    """Tools by name, in their order."""
    return {tool.name: tool for tool in tools}
