"""Tools on the box's files: read one, write one, replace a piece of one. A path is the box's to allow or refuse."""

from __future__ import annotations

from collections.abc import Mapping

from palestra.envs.builtin.python_tool import cut
from palestra.envs.tools import Tool, ToolContext, ToolError
from palestra.envs.types import JSON

MAX_FILE_BYTES = 2**20  # of a file that is read or edited


def file_tools(output_chars: int) -> tuple[Tool, Tool, Tool]:
    """`read_file(path)`, of which at most `output_chars` characters are shown; `edit_file`; `write_file`."""

    async def read_file(arguments: Mapping[str, JSON], context: ToolContext) -> str:
        text = (await _read(context, str(arguments["path"]))).decode(errors="replace")
        return cut(text, output_chars) or "(an empty file)"

    return (
        Tool("read_file", "Show a file.", _texts("path"), read_file),
        Tool(
            "edit_file",
            "Replace the text `old`, which must stand in the file exactly once, by `new`.",
            _texts("path", "old", "new"),
            _edit_file,
        ),
        Tool("write_file", "Create a file or replace all of it.", _texts("path", "text"), _write_file),
    )


async def _edit_file(arguments: Mapping[str, JSON], context: ToolContext) -> str:
    path, old, new = (str(arguments[name]).encode() for name in ("path", "old", "new"))
    name = path.decode()
    data = await _read(context, name)
    if not old:
        raise ToolError("`old` is empty; give the text that is to be replaced")
    if (found := data.count(old)) != 1:
        advice = "give more of the text around it" if found else "copy it from the file, spaces and all"
        raise ToolError(f"`old` stands in {name} {found} times; expected once: {advice}")
    await _write(context, name, data.replace(old, new))
    return "edited"


async def _write_file(arguments: Mapping[str, JSON], context: ToolContext) -> str:
    await _write(context, str(arguments["path"]), str(arguments["text"]).encode())
    return "written"


async def _read(context: ToolContext, path: str) -> bytes:
    """All of a file. Raises ToolError for what the policy asked wrongly, SandboxError."""
    try:
        async with context.turn:
            return await context.box.read(path, MAX_FILE_BYTES)
    except (OSError, ValueError) as error:
        raise ToolError(f"{path} cannot be read: {error or type(error).__name__}") from error


async def _write(context: ToolContext, path: str, data: bytes) -> None:
    """Raises ToolError for what the policy asked wrongly, SandboxError."""
    try:
        async with context.turn:
            await context.box.write(path, data)
    except (OSError, ValueError) as error:
        raise ToolError(f"{path} cannot be written: {error or type(error).__name__}") from error


def _texts(*names: str) -> dict[str, JSON]:
    """The schema of an object with those texts, all of them required."""
    return {
        "type": "object",
        "properties": {name: {"type": "string"} for name in names},
        "required": [*names],
        "additionalProperties": False,
    }
