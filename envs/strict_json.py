"""JSON from someone who may be hostile: one reading per text, bounded, or an error that says where."""

from __future__ import annotations

import json
import math

from palestra.envs.types import JSON

MAX_DEPTH = 32
_MAX_INT = 2**63 - 1


class JsonError(ValueError):
    """The text is no acceptable JSON. `position` is the offset of the trouble; None: somewhere in the value."""

    def __init__(self, message: str, position: int | None = None) -> None:
        super().__init__(message)
        self.position = position


def loads(text: str) -> JSON:
    """The one value that `text` holds. Raises JsonError, also for anything after it."""
    start = len(text) - len(text.lstrip(" \t\r\n"))
    value, end = decode(text, start)
    if text[end:].strip(" \t\r\n"):
        raise JsonError("text after the value", end)
    return value


def decode(text: str, start: int) -> tuple[JSON, int]:
    """The value that begins at `start`, and the offset behind it. O(length of the value). Raises JsonError for what
    the standard forbids and for duplicate keys, NaN, Infinity, numbers beyond 64 bits, lone surrogates and more than
    32 levels."""
    try:
        value, end = _DECODER.raw_decode(text, start)
    except json.JSONDecodeError as error:
        raise JsonError(error.msg, error.pos) from error
    except RecursionError as error:
        raise JsonError(f"nested deeper than {MAX_DEPTH} levels") from error
    _check(value, MAX_DEPTH)
    return value, end


def _check(value: JSON, depth: int) -> None:
    if isinstance(value, str):
        _check_text(value)
    elif isinstance(value, dict | list):
        if depth == 0:
            raise JsonError(f"nested deeper than {MAX_DEPTH} levels")
        if isinstance(value, dict):
            for key in value:
                _check_text(key)
        for item in value.values() if isinstance(value, dict) else value:
            _check(item, depth - 1)


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise JsonError("a lone surrogate, which no text can hold") from error


def _unique(pairs: list[tuple[str, JSON]]) -> dict[str, JSON]:
    value: dict[str, JSON] = {}
    for name, item in pairs:
        if name in value:
            raise JsonError(f"the key {name[:40]!r} twice in one object")
        value[name] = item
    return value


def _integer(digits: str) -> int:
    if len(digits) > 20:
        raise JsonError("an integer beyond 64 bits")
    number = int(digits)
    if not -_MAX_INT - 1 <= number <= _MAX_INT:
        raise JsonError("an integer beyond 64 bits")
    return number


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise JsonError("a number beyond double precision")
    return number


def _constant(word: str) -> float:
    raise JsonError(f"{word}, which is no JSON number")


_DECODER = json.JSONDecoder(
    object_pairs_hook=_unique, parse_int=_integer, parse_float=_finite, parse_constant=_constant, strict=True
)
