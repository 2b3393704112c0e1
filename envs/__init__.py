"""What a task is: tasks, tools, sandboxes, verifiers and environments. Knows text and bytes, never tokens.

The names below are what a first environment of one's own needs. Each is imported when it is asked for, so that whoever
needs one small part of this package does not load the rest.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from palestra.envs.tool_functions import answer, tool
    from palestra.envs.tool_taskset import ToolTaskset
    from palestra.envs.tools import Tool, ToolContext, ToolError
    from palestra.envs.types import Message, Task
    from palestra.envs.verifiers.verdict import Bounds

_HOMES = {
    "Bounds": "verifiers.verdict",
    "Message": "types",
    "Task": "types",
    "Tool": "tools",
    "ToolContext": "tools",
    "ToolError": "tools",
    "ToolTaskset": "tool_taskset",
    "answer": "tool_functions",
    "tool": "tool_functions",
}

__all__ = ["Bounds", "Message", "Task", "Tool", "ToolContext", "ToolError", "ToolTaskset", "answer", "tool"]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
