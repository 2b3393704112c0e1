"""What a tool is, and what its handler may reach."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from palestra.envs.errors import ConfigError
from palestra.envs.sandboxes.contract import Exec, Sandbox
from palestra.envs.schemas import schema_trouble
from palestra.envs.types import JSON

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")


class ToolError(Exception):
    """Raised by a handler: the tool ran and failed. The message is what the policy reads."""


class TransientToolError(ToolError):
    """Raised by a handler: it failed, nothing has happened, and the same call may work in a moment."""


class ToolTimeout(ToolError):
    """A command of the handler ran out of the tool's time limit and was killed."""


@dataclass(frozen=True, slots=True)
class ToolContext:
    """What a handler gets beside its arguments: the episode's box, one command at a time.

    `clock` limits the handler's own time; while a command runs or waits for its turn in the box it stands still,
    because the box ends the command itself.
    """

    box: Sandbox
    turn: asyncio.Lock  # calls of one action run concurrently, commands in a box do not
    clock: asyncio.Timeout

    async def run(self, argv: Sequence[str], *, stdin: bytes = b"", env: Mapping[str, str] | None = None) -> Exec:
        """Run a command in the box within what is left of the tool's time limit.

        Raises ToolTimeout when it overran, RuntimeError when the handler has one running, SandboxError as the box does.
        """
        loop = asyncio.get_running_loop()
        deadline = self.clock.when()
        if deadline is None:
            raise RuntimeError("a handler runs one command at a time; await the first before starting the next")
        left = max(0.01, deadline - loop.time())
        self.clock.reschedule(None)
        spent = 0.0
        try:
            async with self.turn:
                result = await self.box.run(argv, timeout_s=left, stdin=stdin, env=env)
                spent = result.seconds  # the command's own: it may have waited for its turn on a busy machine
        finally:
            self.clock.reschedule(loop.time() + max(0.0, left - spent))
        if result.timed_out:
            raise ToolTimeout(f"{argv[0]} ran for {left:.3g} s and was killed")
        return result


Handler = Callable[[Mapping[str, JSON], ToolContext], Awaitable[str]]
"""(arguments that satisfy the schema, context) -> the observation."""


@dataclass(frozen=True, slots=True)
class Tool:
    """Something a policy may call. Tool("lookup", "The number of a name.", {"type": "object", ...}, handler)

    `parameters` is a JSON Schema (draft 2020-12) of the arguments object. A handler says that it failed by raising: any
    exception but an InfrastructureError or IntegrityError becomes an observation. A bad declaration is a ConfigError.
    """

    name: str
    description: str
    parameters: Mapping[str, JSON]
    handler: Handler = field(repr=False)
    timeout_s: float = 10.0
    finishes: bool = False  # an accepted call ends the episode, and its arguments are the answer

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ConfigError(f"tool name {self.name!r}: expected a letter, then at most 63 of letters, digits and _.-")
        if not self.timeout_s > 0:
            raise ConfigError(f"tool {self.name}: timeout_s is {self.timeout_s}; use more than 0")
        if trouble := schema_trouble(self.parameters):
            raise ConfigError(f"tool {self.name}: its parameters are a schema {trouble}")


def signature(tool: Tool) -> str:
    """A tool as one short word: `lookup(key)`; optional arguments carry a question mark."""
    properties = tool.parameters.get("properties")
    required = tool.parameters.get("required")
    names = properties if isinstance(properties, dict) else {}
    needed = required if isinstance(required, list) else []
    return f"{tool.name}({', '.join(name if name in needed else f'{name}?' for name in names)})"


def openai_schema(tools: Sequence[Tool]) -> list[dict[str, JSON]]:
    """The tools as the `tools` argument of an OpenAI chat request."""
    return [
        {
            "type": "function",
            "function": {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)},
        }
        for tool in tools
    ]
