"""Where the public data sets lie, and how one is read."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from palestra.envs.errors import ConfigError
from palestra.envs.strict_json import JsonError, loads
from palestra.envs.types import JSON


def data_folder() -> Path:
    """PALESTRA_DATA, else `shared/data` beside the current folder or beside one that holds it. Raises ConfigError."""
    named = os.environ.get("PALESTRA_DATA")
    if named:
        folder = Path(named)
        if not folder.is_dir():
            raise ConfigError(f"PALESTRA_DATA is {named}, which is no folder; set it to the folder of the data sets")
        return folder
    here = Path.cwd()
    for parent in here.parents:
        if (parent / "shared" / "data").is_dir():
            return parent / "shared" / "data"
    raise ConfigError(f"no data: neither {here} nor a folder above has ../shared/data; set PALESTRA_DATA")


def json_lines(path: Path) -> Iterator[dict[str, JSON]]:
    """The objects of a file, one a line. Raises ConfigError with the line's number."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}); set PALESTRA_DATA to the data's folder") from error
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = loads(line)
        except JsonError as error:
            raise ConfigError(f"{path}:{number}: no JSON ({error}); expected one object a line") from error
        if not isinstance(row, dict):
            raise ConfigError(f"{path}:{number}: expected an object, found {type(row).__name__}")
        yield row
