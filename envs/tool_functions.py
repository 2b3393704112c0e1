"""Tools from typed functions: the name, the docstring and the annotations of an async function are the declaration.

@tool
async def shell(context: ToolContext, command: str) -> str:
    "Run a command and read what it prints."
    return (await context.run(["sh", "-c", command])).stdout.decode()
"""

from __future__ import annotations

import inspect
import json
import typing
from collections.abc import Awaitable, Callable, Mapping

import pydantic

from palestra.envs.errors import ConfigError
from palestra.envs.tools import Tool, ToolContext, ToolError
from palestra.envs.types import JSON

ToolFunction = Callable[..., Awaitable[object]]
_KINDS = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@typing.overload
def tool(function: ToolFunction, /) -> Tool: ...


@typing.overload
def tool(*, timeout_s: float = 10.0, finishes: bool = False) -> Callable[[ToolFunction], Tool]: ...


def tool(
    function: ToolFunction | None = None, /, *, timeout_s: float = 10.0, finishes: bool = False
) -> Tool | Callable[[ToolFunction], Tool]:
    """The Tool of an async function; used as `@tool` or `@tool(finishes=True)`.

    A parameter annotated ToolContext gets the context, the others are the arguments, typed as pydantic types them. What
    the function returns is the observation: text as it is, anything else as JSON. Raises ConfigError for a function
    that declares no tool.
    """
    if function is None:
        return lambda given: _tool(given, timeout_s, finishes)
    return _tool(function, timeout_s, finishes)


def _tool(function: ToolFunction, timeout_s: float, finishes: bool) -> Tool:
    name = function.__name__
    if not inspect.iscoroutinefunction(function):
        raise ConfigError(f"tool {name}: expected a function that begins with `async def`")
    description = (inspect.getdoc(function) or "").split("\n\n")[0].replace("\n", " ").strip()
    if not description:
        raise ConfigError(f"tool {name}: it has no docstring, which is what the policy is told about it; write one")
    types = _types(function, name)
    context = next((parameter for parameter, kind in types.items() if kind is ToolContext), None)
    types.pop(context or "", None)
    checks = {parameter: _adapter(name, parameter, kind) for parameter, kind in types.items()}

    async def handler(arguments: Mapping[str, JSON], handed: ToolContext) -> str:
        values = {parameter: _checked(parameter, checks[parameter], value) for parameter, value in arguments.items()}
        if context is not None:
            values[context] = handed
        result = await function(**values)
        return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)

    return Tool(name, description, _schema(function, checks), handler, timeout_s=timeout_s, finishes=finishes)


def _types(function: ToolFunction, name: str) -> dict[str, typing.Any]:
    """The annotation of each parameter, in their order."""
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except NameError as error:
        raise ConfigError(
            f"tool {name}: an annotation cannot be read: {error}; annotations name what the module has"
        ) from error
    types = {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in _KINDS or parameter.name not in hints:
            raise ConfigError(
                f"tool {name}: parameter {parameter} has no annotation, or no name that a call could use; write "
                "each one as `word: str`"
            )
        types[parameter.name] = hints[parameter.name]
    return types


def _adapter(name: str, parameter: str, kind: typing.Any) -> pydantic.TypeAdapter[object]:
    try:
        adapter: pydantic.TypeAdapter[object] = pydantic.TypeAdapter(kind)
        adapter.json_schema()
    except pydantic.errors.PydanticUserError as error:
        raise ConfigError(f"tool {name}: {parameter} is {kind}, which JSON cannot carry; use a plain type") from error
    return adapter


def _schema(function: ToolFunction, checks: Mapping[str, pydantic.TypeAdapter[object]]) -> dict[str, JSON]:
    """JSON Schema of the arguments object; nothing but the parameters may be in it."""
    properties: dict[str, JSON] = {}
    shared: dict[str, JSON] = {}
    for parameter, adapter in checks.items():
        schema = adapter.json_schema()
        shared |= schema.pop("$defs", {})
        properties[parameter] = _plain(schema)
    defaults = {name: p.default for name, p in inspect.signature(function).parameters.items()}
    required: list[JSON] = [name for name in checks if defaults[name] is inspect.Parameter.empty]
    whole: dict[str, JSON] = {"type": "object", "properties": properties, "required": required}
    return whole | {"additionalProperties": False} | ({"$defs": shared} if shared else {})


def _plain(schema: dict[str, JSON]) -> dict[str, JSON]:
    """`int | str` as one list of types, which a wrong call is told in fewer words."""
    ways = schema.get("anyOf")
    if isinstance(ways, list) and all(isinstance(way, dict) and set(way) == {"type"} for way in ways):
        types: list[JSON] = [way["type"] for way in ways if isinstance(way, dict)]
        return {key: value for key, value in schema.items() if key != "anyOf"} | {"type": types}
    return schema


def _checked(parameter: str, adapter: pydantic.TypeAdapter[object], value: JSON) -> object:
    """The argument as the function wants it: a schema cannot say everything that a type can."""
    try:
        return adapter.validate_python(value)
    except pydantic.ValidationError as error:
        raise ToolError(f"{parameter}: {error.errors()[0]['msg']}") from error


@tool(finishes=True)
async def answer(value: int | float | str) -> str:
    """Give the final answer; this ends the task."""
    return "done"
