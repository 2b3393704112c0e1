"""Tables of a task's settings, read with the place of each fault."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from palestra.envs.errors import ConfigError
from palestra.envs.formats.task_files import read_text

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)i?B?", re.IGNORECASE)
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True, slots=True)
class Table:
    """Settings and where they stand. Table("task.toml: agent", {"timeout_sec": 900.0})"""

    place: str
    values: Mapping[str, object]

    def value(self, key: str) -> object:
        """Whatever it is; None where it is absent."""
        return self.values.get(key)

    def inner(self, key: str) -> Table:
        """A table in this one; an empty one where it is absent."""
        found = self.values.get(key, {})
        if not isinstance(found, Mapping):
            raise ConfigError(f"{self.place}: {key} is {found!r}; expected a table")
        return Table(f"{self.place}: {key}", found)

    def text(self, key: str) -> str:
        """A text; "" where it is absent."""
        found = self.values.get(key)
        if found is not None and not isinstance(found, str):
            raise ConfigError(f"{self.place}: {key} is {found!r}; expected text")
        return found or ""

    def texts(self, key: str) -> list[str]:
        """A list of texts; an empty one where it is absent."""
        found = self.values.get(key, [])
        if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
            raise ConfigError(f"{self.place}: {key} is {found!r}; expected a list of texts")
        return list(found)

    def number(self, key: str, otherwise: float) -> float:
        """A finite number of 0 or more."""
        found = self.values.get(key, otherwise)
        if isinstance(found, bool) or not isinstance(found, int | float) or not math.isfinite(found) or found < 0:
            raise ConfigError(f"{self.place}: {key} is {found!r}; expected a number of 0 or more")
        return float(found)

    def variables(self, key: str) -> dict[str, str]:
        """Variables of commands. One that would come from this machine's own environment is refused."""
        found = self.inner(key)
        for name, value in found.values.items():
            if not isinstance(value, str):
                raise ConfigError(f"{found.place}: {name} is {value!r}; expected text")
            if "${" in value:
                raise ConfigError(f"{found.place}: {name} is {value!r}; nothing of this machine goes into a box")
        return {name: str(value) for name, value in found.values.items()}


def read_toml(path: Path) -> Table:
    """A file's table. Raises ConfigError."""
    try:
        return Table(str(path), tomllib.loads(read_text(path)))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: no TOML: {error}") from error


def seconds(table: Table, key: str, otherwise: float) -> float:
    """A time, more than 0."""
    found = table.number(key, otherwise)
    if found <= 0:
        raise ConfigError(f"{table.place}: {key} is {found:g}; use more than 0")
    return found


def megabytes(table: Table, key: str, old: str) -> int | None:
    """A size in bytes: `key` in MB, else the older `old` as text ("2G"); None where neither is there."""
    if table.value(key) is not None:
        return int(table.number(key, 0) * 2**20) or None
    text = table.text(old)
    if not text:
        return None
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"{table.place}: {old} is {text!r}; expected a size such as '2G'")
    return int(float(match[1]) * _UNITS[match[2].upper()])
