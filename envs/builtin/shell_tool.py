"""A shell in the box, and the call that hands the work in."""

from __future__ import annotations

from collections.abc import Mapping

from palestra.envs.builtin.python_tool import cut
from palestra.envs.tools import Tool, ToolContext, ToolError
from palestra.envs.types import JSON


def run_tool(
    timeout_s: float,
    output_chars: int,
    env: Mapping[str, str] | None = None,
    *,
    name: str = "run",
    shell: str = "/bin/sh",
) -> Tool:
    """`run(command)`, or another name: a fresh shell per call in the workspace, at most `output_chars` of its output.

    A command that fails is a failed call whose message holds the output and the exit status.
    """

    async def run(arguments: Mapping[str, JSON], context: ToolContext) -> str:
        result = await context.run([shell, "-c", str(arguments["command"])], env=env)
        printed = (result.stdout + result.stderr).decode(errors="replace").rstrip()
        told = [cut(printed, output_chars)] if printed else []
        if result.out_of_memory:
            told.append("[the box ran out of memory]")
        if result.survivors:
            told.append(f"[{result.survivors} background processes were ended]")
        if not result.ok:
            how = f"signal {result.signal}" if result.exit_code is None else f"exit status {result.exit_code}"
            raise ToolError("\n".join([*told, f"[{how}]"]))
        return "\n".join(told) or "(nothing printed)"

    parameters: dict[str, JSON] = {
        "type": "object",
        "properties": {"command": {"type": "string"}},
        "required": ["command"],
        "additionalProperties": False,
    }
    return Tool(name, "Run a shell command and read what it prints.", parameters, run, timeout_s=timeout_s)


def submit_tool() -> Tool:
    """`submit()`: the work is done, and the episode ends."""

    async def submit(arguments: Mapping[str, JSON], context: ToolContext) -> str:
        return "submitted"

    nothing: dict[str, JSON] = {"type": "object", "properties": {}, "additionalProperties": False}
    return Tool("submit", "Hand the work in; this ends the task.", nothing, submit, finishes=True)
