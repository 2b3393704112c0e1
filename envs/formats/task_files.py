"""The files of a task's folder, read into memory: no link, no special file, no more than a box can hold."""

from __future__ import annotations

import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from palestra.envs.errors import ConfigError

MAX_BYTES = 16 * 2**20


@dataclass(frozen=True, slots=True)
class Files:
    """Contents by path, with "/" between the parts. Files({"run.sh": b"..."}, frozenset({"run.sh"}))"""

    contents: Mapping[str, bytes] = field(default_factory=dict)
    executable: frozenset[str] = frozenset()  # of `contents`, those with an execute bit

    def under(self, folder: str) -> Files:
        """The same files in `folder`; "" is here."""
        before = f"{folder}/" if folder else ""
        moved = {f"{before}{path}": data for path, data in self.contents.items()}
        return Files(moved, frozenset(f"{before}{path}" for path in self.executable))

    def over(self, others: Files) -> Files:
        """`others`, with these in place of those of the same path."""
        kept = others.executable - set(self.contents)
        return Files({**others.contents, **self.contents}, kept | self.executable)


def read_text(path: Path) -> str:
    """A text file. Raises ConfigError."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as text ({error})") from error


def read_files(place: Path) -> Files:
    """A file by its name, or everything below a folder; nothing where there is none. Raises ConfigError."""
    if place.is_symlink():
        raise ConfigError(f"{place}: a symbolic link; a task's folder holds files and folders only")
    if not place.exists():
        return Files()
    paths = sorted(place.rglob("*")) if place.is_dir() else [place]
    base = place if place.is_dir() else place.parent
    contents: dict[str, bytes] = {}
    executable: set[str] = set()
    left = MAX_BYTES
    for path in paths:
        mode = path.lstat().st_mode
        if stat.S_ISDIR(mode):
            continue
        if not stat.S_ISREG(mode):
            raise ConfigError(f"{path}: a link or a special file; a task's folder holds files and folders only")
        left -= path.stat().st_size
        if left < 0:
            raise ConfigError(f"{place}: more than {MAX_BYTES} bytes; put large data into an image of its own")
        name = path.relative_to(base).as_posix()
        contents[name] = path.read_bytes()
        if mode & stat.S_IXUSR:
            executable.add(name)
    return Files(contents, frozenset(executable))
