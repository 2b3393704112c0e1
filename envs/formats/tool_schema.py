"""Declarations of functions as people write them, read as JSON Schema (draft 2020-12), or refused with a reason.

`{"type": "dict", "properties": {"x": {"type": "float"}}}` is what someone meant as an object with a number. Such words
are translated, and what was translated is said. Nothing is guessed: a word that could mean two things is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from palestra.envs.errors import ConfigError
from palestra.envs.schemas import echo
from palestra.envs.tools import Tool, ToolContext
from palestra.envs.types import JSON

_TYPES: Mapping[str, str | None] = {
    **{word: word for word in ("object", "array", "string", "integer", "number", "boolean", "null")},
    **{"dict": "object", "map": "object", "hashmap": "object"},
    **{"list": "array", "tuple": "array", "set": "array"},
    **{"str": "string", "text": "string", "char": "string"},
    **{"int": "integer", "long": "integer"},
    **{"float": "number", "double": "number"},
    **{"bool": "boolean", "none": "null"},
    "any": None,
}
_SCHEMA_MAPS = ("properties", "$defs", "definitions", "patternProperties")  # name -> schema
_SCHEMA_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SCHEMAS = ("items", "not", "contains")


async def declared_only(arguments: Mapping[str, JSON], context: ToolContext) -> str:
    """The handler of a function that nobody wrote."""
    return "accepted"


@dataclass(frozen=True, slots=True)
class Declaration:
    """A function that can be called, as a tool, and what was written otherwise.

    Declaration(Tool("math.hypot", ...), ("math.hypot: parameters.x: type \"float\" read as \"number\"",))
    """

    tool: Tool  # its handler runs nothing; `dataclasses.replace` gives it another
    changes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """What it is called by."""
        return self.tool.name


class DeclarationError(ConfigError):
    """A declaration means nothing certain. The message names the place, what was found and what is expected there."""


def read_declaration(raw: JSON) -> Declaration:
    """The function that `raw` declares: `{"name", "description", "parameters"}`, bare or as OpenAI wraps it.

    Raises DeclarationError.
    """
    if not isinstance(raw, Mapping):
        raise DeclarationError(f"a declaration is an object with name and parameters, found {echo(raw)}")
    inner = raw.get("function") if raw.get("type") == "function" else raw
    if not isinstance(inner, Mapping):
        raise DeclarationError(f'"function" is {echo(inner)}; expected an object with name and parameters')
    name, description = inner.get("name"), inner.get("description", "")
    if not isinstance(name, str) or not name:
        raise DeclarationError(f"name is {echo(name)}; expected text")
    if not isinstance(description, str):
        raise DeclarationError(f"{name}: description is {echo(description)}; expected text")
    changes: list[str] = []
    parameters = _arguments(name, inner.get("parameters"), changes)
    try:
        tool = Tool(name, description, parameters, declared_only)
    except ConfigError as error:  # of its name, or of a keyword that is used wrongly
        raise DeclarationError(str(error)) from error
    return Declaration(tool, tuple(changes))


def _arguments(name: str, raw: JSON, changes: list[str]) -> dict[str, JSON]:
    """The schema of the whole object of arguments; without parameters it is empty."""
    if raw is None or raw == {}:
        changes.append("parameters: none declared, read as an object without properties")
        return {"type": "object", "properties": {}, "additionalProperties": False}
    schema = _schema(f"{name}: parameters", raw, changes)
    if "type" not in schema:
        changes.append("parameters: without a type, read as object")
        schema["type"] = "object"
    schema.setdefault("properties", {})
    return schema


def _schema(place: str, raw: JSON, changes: list[str]) -> dict[str, JSON]:
    """One schema, with the schemas inside it. Raises DeclarationError."""
    if not isinstance(raw, Mapping):
        raise DeclarationError(f"{place} is {echo(raw)}; expected a schema such as {{'type': 'string'}}")
    schema: dict[str, JSON] = dict(raw)
    _translate_type(place, schema, changes)
    for keyword in _SCHEMA_MAPS:
        if keyword in schema:
            schema[keyword] = _named(f"{place}.{keyword}", schema[keyword], changes)
    for keyword in _SCHEMA_LISTS:
        if keyword in schema:
            schema[keyword] = _listed(f"{place}.{keyword}", schema[keyword], changes)
    for keyword in _SCHEMAS:
        if isinstance(schema.get(keyword), list) and keyword == "items":
            changes.append(f"{place}.items: a list of schemas, read as prefixItems")
            schema["prefixItems"] = _listed(f"{place}.items", schema.pop("items"), changes)
        elif keyword in schema and not isinstance(schema[keyword], bool):
            schema[keyword] = _schema(f"{place}.{keyword}", schema[keyword], changes)
    if schema.get("type") == "object":
        _close(place, schema, changes)
    return schema


def _translate_type(place: str, schema: dict[str, JSON], changes: list[str]) -> None:
    """`type` in the words of JSON Schema; "any" is no type at all."""
    if "type" not in schema:
        return
    written = schema["type"]
    words = [_word(place, word) for word in (written if isinstance(written, list) else [written])]
    if None in words:
        changes.append(f"{place}: type any read as no type")
        del schema["type"]
        return
    types: list[JSON] = list(words)
    meant: JSON = types if isinstance(written, list) else types[0]
    if meant != written:
        changes.append(f"{place}: type {echo(written)} read as {echo(meant)}")
        schema["type"] = meant


def _word(place: str, word: JSON) -> str | None:
    if not isinstance(word, str) or word.strip().lower() not in _TYPES:
        known = ", ".join(_TYPES)
        raise DeclarationError(f"{place}: type is {echo(word)}, which is none that is known. Use one of: {known}")
    return _TYPES[word.strip().lower()]


def _named(place: str, raw: JSON, changes: list[str]) -> dict[str, JSON]:
    if not isinstance(raw, Mapping):
        raise DeclarationError(f"{place} is {echo(raw)}; expected an object of schemas by name")
    return {name: _schema(f"{place}.{name}", schema, changes) for name, schema in raw.items()}


def _listed(place: str, raw: JSON, changes: list[str]) -> list[JSON]:
    if not isinstance(raw, list):
        raise DeclarationError(f"{place} is {echo(raw)}; expected a list of schemas")
    return [_schema(f"{place}.{n}", schema, changes) for n, schema in enumerate(raw)]


def _close(place: str, schema: dict[str, JSON], changes: list[str]) -> None:
    """Required names exist, and where the properties are known no other is taken. No properties: any are."""
    properties, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise DeclarationError(f"{place}.required is {echo(required)}; expected a list of names")
    if properties is None:
        changes.append(f"{place}: no properties declared, so any are taken")
        return
    known = list(properties) if isinstance(properties, Mapping) else []
    for name in required:
        if name not in known:
            have = ", ".join(known) or "none"
            raise DeclarationError(f"{place}.required names {echo(name)}, which is no property. Have: {have}")
    schema.setdefault("additionalProperties", False)
