"""JSON Schema for tool arguments: checked when a tool is declared, and explained when a call breaks it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

import jsonschema
import referencing
import referencing.exceptions
import referencing.jsonschema

from palestra.envs.types import JSON

_MAX_ECHO = 40  # characters of the policy's own text in a message
_BOUNDS = {
    "pattern": "text that matches",
    "const": "exactly",
    "minimum": "at least",
    "maximum": "at most",
    "exclusiveMinimum": "more than",
    "exclusiveMaximum": "less than",
    "multipleOf": "a multiple of",
    "minLength": "a length of at least",
    "maxLength": "a length of at most",
    "minItems": "a number of items of at least",
    "maxItems": "a number of items of at most",
}


def schema_trouble(schema: Mapping[str, JSON]) -> str | None:
    """Why `schema` cannot describe arguments (draft 2020-12), or None. Nothing is ever fetched from elsewhere."""
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER  # so that a pattern must be a regular expression
    try:
        jsonschema.Draft202012Validator.check_schema(dict(schema), format_checker=checker)
    except jsonschema.SchemaError as error:
        return f"no JSON Schema: {error.message}"
    if schema.get("type") != "object":
        return 'without "type": "object"; arguments are always an object'
    resource = referencing.jsonschema.DRAFT202012.create_resource(dict(schema))
    resolver = referencing.Registry().with_resource("", resource).resolver()
    for reference in _references(dict(schema)):
        try:
            resolver.lookup(reference)
        except referencing.exceptions.Unresolvable:
            return f"refers to {reference!r}, which is not in it"
    return None


def validator(schema: Mapping[str, JSON]) -> jsonschema.Draft202012Validator:
    """What checks arguments against a schema without trouble."""
    return jsonschema.Draft202012Validator(dict(schema), registry=referencing.Registry())


def violations(check: jsonschema.Draft202012Validator, arguments: Mapping[str, JSON]) -> list[str]:
    """Every way in which the arguments break the schema: which argument, what was expected, what was found."""
    found = (text for error in check.iter_errors(dict(arguments)) for text in _explain(error))
    return list(dict.fromkeys(found))


def echo(value: object) -> str:
    """A value as JSON, ASCII, cut short: the policy's own text never fills its observation."""
    text = json.dumps(value, ensure_ascii=True, default=str)
    return text if len(text) <= _MAX_ECHO else f'{text[: _MAX_ECHO - 4]}..."'


def _references(value: JSON) -> Iterator[str]:
    if isinstance(value, dict):
        reference = value.get("$ref")
        if isinstance(reference, str):
            yield reference
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _references(item)


def _explain(error: jsonschema.ValidationError) -> Iterator[str]:
    """A violation in few words: which argument, what was expected, what was found."""
    where = ".".join(str(part) for part in error.absolute_path) or "arguments"
    found = f"found {echo(error.instance)}"
    wanted, keyword = error.validator_value, str(error.validator)
    if keyword == "required":
        yield from (f"{where}: {name} is missing" for name in wanted if name not in error.instance)
    elif keyword == "additionalProperties" and wanted is False:
        known = list(error.schema.get("properties", {}))
        extra = [name for name in error.instance if name not in known]
        yield f"{where}: {', '.join(echo(name) for name in extra[:3])} not known. Have: {', '.join(known)}"
    elif keyword == "type":
        yield f"{where}: expected {wanted if isinstance(wanted, str) else ' or '.join(wanted)}, {found}"
    elif keyword == "enum":
        yield f"{where}: expected one of {', '.join(map(echo, wanted))}, {found}"
    elif keyword in _BOUNDS:
        yield f"{where}: expected {_BOUNDS[keyword]} {wanted}, {found}"
    else:
        yield f"{where}: expected {keyword} {echo(wanted)}, {found}"
