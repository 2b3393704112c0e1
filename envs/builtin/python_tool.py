"""A Python tool: code in, what it prints out. It runs in the box, never here."""

from __future__ import annotations

from collections.abc import Mapping

from palestra.envs.sandboxes.contract import Exec
from palestra.envs.tools import Tool, ToolContext, ToolError
from palestra.envs.types import JSON


def python_tool(timeout_s: float, output_chars: int) -> Tool:
    """`python(code)`: a fresh interpreter per call, at most `output_chars` characters of its output."""

    async def run(arguments: Mapping[str, JSON], context: ToolContext) -> str:
        # -I: nothing in the workspace or the environment changes what the interpreter imports at its start
        result = await context.run(["python3", "-I", "-"], stdin=str(arguments["code"]).encode())
        output = cut(result.stdout.decode(errors="replace").rstrip(), output_chars)
        if not result.ok:
            raise ToolError("\n".join(part for part in (output, _why(result)) if part))
        return output or "(nothing printed; use print)"

    parameters: dict[str, JSON] = {
        "type": "object",
        "properties": {"code": {"type": "string"}},
        "required": ["code"],
        "additionalProperties": False,
    }
    return Tool("python", "Run a Python program and see what it prints.", parameters, run, timeout_s=timeout_s)


def cut(text: str, limit: int) -> str:
    """The head and the tail of a text that is longer than `limit`, and how much is missing between."""
    if len(text) <= limit:
        return text
    head, tail = limit - limit // 3, limit // 3
    return f"{text[:head]}\n[{len(text) - limit} characters cut]\n{text[-tail:]}"


def _why(result: Exec) -> str:
    """The last line of the traceback, or what ended the program."""
    if result.out_of_memory:
        return "the program ran out of memory"
    if result.exit_code is None:
        return f"the program was ended by signal {result.signal}"
    lines = result.stderr.decode(errors="replace").strip().split("\n")
    return lines[-1][:300] or f"the program ended with status {result.exit_code}"
