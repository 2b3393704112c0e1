"""The file of `--json`: whether it can be written is asked before the work, not after it."""

from __future__ import annotations

import os
from pathlib import Path

from palestra.envs.errors import ConfigError


def check_json_file(path: Path | None) -> None:
    """Raise ConfigError for a file that cannot be written."""
    if path is not None and (path.is_dir() or not os.access(path.absolute().parent, os.W_OK)):
        raise ConfigError(f"--json {path} cannot be written; give a file in a folder that exists")
