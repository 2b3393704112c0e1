"""How a policy writes a tool call, and how it is read.

A format is text on both sides: what a policy is told, what it writes, what is made of it. Ids are given in the order
of writing ("c1", "c2"); the environment numbers them through the episode.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from palestra.envs.strict_json import JsonError, decode, loads
from palestra.envs.tools import Tool, signature
from palestra.envs.types import JSON, Action, CallError, ToolCall

_SPACE = re.compile(r"[ \t\r\n]*")


class CallFormat(Protocol):
    """One way to write tool calls in text."""

    @property
    def form(self) -> str:
        """The expected form in a few words, for reminders."""
        ...

    def parse(self, text: str) -> Action:
        """What a turn asks for. Never raises; linear in the length of the text."""
        ...

    def render_call(self, name: str, arguments: Mapping[str, JSON]) -> str:
        """A call as the policy should write it; `parse` reads it back."""
        ...

    def declare(self, tools: Sequence[Tool]) -> str:
        """The text that tells a policy which tools there are and how to call them."""
        ...


@dataclass(frozen=True, slots=True)
class JsonInTags:
    """`<tool_call>{"name": "lookup", "arguments": {"key": "oak"}}</tool_call>`, as Hermes and Qwen models write it.

    Strict: exactly these two keys, JSON without duplicate keys, NaN, trailing commas or comments, at most 32 levels and
    `max_chars` characters, every tag closed. `arguments` is an object, or a string that holds one in JSON; both mean
    the same call. The JSON decides where a call ends, so its strings may hold the tags themselves.
    """

    max_chars: int = 32_768  # of one call
    max_calls: int = 32  # calls and errors of one turn; what follows is one more error

    _OPEN = "<tool_call>"
    _CLOSE = "</tool_call>"

    @property
    def form(self) -> str:
        """The expected form in a few words."""
        return f'{self._OPEN}{{"name": "...", "arguments": {{...}}}}{self._CLOSE}'

    def parse(self, text: str) -> Action:
        """What a turn asks for; text outside the tags is free."""
        calls: list[ToolCall] = []
        errors: list[CallError] = []
        position = 0
        while (start := _first(text, position, self._OPEN, self._CLOSE)) >= 0:
            if len(calls) + len(errors) >= self.max_calls:
                errors.append(CallError(f"more than {self.max_calls} calls in one turn; the rest is not read"))
                break
            try:
                (name, arguments), position = self._read(text, start)
                calls.append(ToolCall(f"c{len(calls) + 1}", name, arguments))
            except JsonError as error:
                errors.append(CallError(self._explain(error, text, start)))
                close = text.find(self._CLOSE, start)
                position = close + len(self._CLOSE) if close >= 0 else len(text)
        return Action(text, tuple(calls), tuple(errors))

    def render_call(self, name: str, arguments: Mapping[str, JSON]) -> str:
        """The call on one line."""
        call = json.dumps({"name": name, "arguments": dict(arguments)}, ensure_ascii=False, allow_nan=False)
        return f"{self._OPEN}{call}{self._CLOSE}"

    def declare(self, tools: Sequence[Tool]) -> str:
        """One line per tool, then the form."""
        lines = [f"{signature(tool)}: {tool.description}" for tool in tools]
        return "\n".join(["Tools:", *lines, f"To call one, write {self.form}"])

    def _read(self, text: str, start: int) -> tuple[tuple[str, dict[str, JSON]], int]:
        """The call whose tag is at `start`, and the offset behind it. Raises JsonError."""
        if text.startswith(self._CLOSE, start):
            raise JsonError("a closing tag that closes nothing", start)
        begin = _skip_space(text, start + len(self._OPEN))
        if not text.startswith("{", begin):
            raise JsonError("no object behind the tag", begin)
        value, end = decode(text, begin)
        end = _skip_space(text, end)
        if not text.startswith(self._CLOSE, end):
            raise JsonError("the tag is not closed behind the object", end)
        if end - begin > self.max_chars:
            raise JsonError(f"{end - begin} characters of JSON; at most {self.max_chars} are read", begin)
        return _call(value, begin), end + len(self._CLOSE)

    def _explain(self, error: JsonError, text: str, start: int) -> str:
        if error.position is None:
            return f"call at character {start} not read: {error}. Expected {self.form}"
        found = repr(text[error.position : error.position + 16]) if error.position < len(text) else "the end"
        return f"call at character {start} not read: character {error.position}, {found}: {error}. Expected {self.form}"


def _call(value: JSON, position: int) -> tuple[str, dict[str, JSON]]:
    if not isinstance(value, dict) or set(value) != {"name", "arguments"}:
        found = ", ".join(sorted(value)[:5]) if isinstance(value, dict) else type(value).__name__
        raise JsonError(f'expected the keys "name" and "arguments", found {found[:80] or "none"}', position)
    name, arguments = value["name"], value["arguments"]
    if not isinstance(name, str) or not name:
        raise JsonError('"name" must be a string', position)
    if isinstance(arguments, str):
        try:
            arguments = loads(arguments)
        except JsonError as error:
            raise JsonError(f'"arguments" is a string without JSON in it ({error})', position) from error
    if not isinstance(arguments, dict):
        raise JsonError('"arguments" must be an object', position)
    return name, arguments


def _first(text: str, position: int, *words: str) -> int:
    """Where the first of the words begins, or -1."""
    return min((at for at in (text.find(word, position) for word in words) if at >= 0), default=-1)


def _skip_space(text: str, position: int) -> int:
    found = _SPACE.match(text, position)
    return found.end() if found else position
