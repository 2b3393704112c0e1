"""A Dockerfile that needs no build: a base, files copied into the working directory, and variables.

No registry may be reachable and nothing is built here, so whatever runs a command while building is refused, with the
line and what to do instead. The base is not pulled either: it is said what the box has in its place.
"""

from __future__ import annotations

import json
import posixpath
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from palestra.envs.errors import ConfigError
from palestra.envs.formats.task_files import Files, read_files, read_text

_WITHOUT_EFFECT = ("CMD", "ENTRYPOINT", "LABEL", "MAINTAINER", "EXPOSE", "STOPSIGNAL", "SHELL")
_ADVICE = "build the image yourself and name it in [environment].docker_image"


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a Dockerfile comes to. Recipe("python:3.12", "/app", Files({"main.py": b"..."}), {"LANG": "C"})"""

    base: str
    workdir: str | None  # None: it names none
    files: Files = field(default_factory=Files)  # below the working directory
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class _Reading:
    """What was read so far; files by absolute path."""

    base: str | None = None
    workdir: str | None = None
    files: Files = field(default_factory=Files)
    env: dict[str, str] = field(default_factory=dict)


def read_dockerfile(path: Path, workdir: str | None = None) -> Recipe:
    """The recipe in `path`, whose folder is the build's context. `workdir`: what the task says that it is.

    Raises ConfigError for what needs a build, and for files that are copied elsewhere than below the working directory.
    """
    reading = _Reading()
    for number, (word, rest) in _instructions(read_text(path)):
        _apply(reading, word, rest, path, f"{path}:{number}")
    if reading.base is None:
        raise ConfigError(f"{path}: no FROM; a Dockerfile begins with one")
    workspace = workdir or reading.workdir
    return Recipe(reading.base, workspace, _below(reading.files, workspace, path), reading.env)


def _instructions(text: str) -> list[tuple[int, tuple[str, str]]]:
    """(number of its first line, (word, rest)) of each instruction; comments and line ends with \\ taken out."""
    found: list[tuple[int, tuple[str, str]]] = []
    begun, parts = 0, ""
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        begun = begun if parts else number
        parts += line.removesuffix("\\") + " "
        if not line.endswith("\\"):
            word, _, rest = parts.strip().partition(" ")
            found.append((begun, (word.upper(), rest.strip())))
            parts = ""
    return found


def _apply(reading: _Reading, word: str, rest: str, path: Path, place: str) -> None:
    if word == "FROM":
        if reading.base is not None:
            raise ConfigError(f"{place}: a second FROM; builds in stages are not done here, {_ADVICE}")
        reading.base = rest.split()[0] if rest else ""
    elif word == "WORKDIR":
        reading.workdir = posixpath.normpath(posixpath.join(reading.workdir or "/", rest))
    elif word == "ENV":
        reading.env |= _variables(rest, place)
    elif word in ("COPY", "ADD"):
        reading.files = _copied(rest, path.parent, reading.workdir, place).over(reading.files)
    elif word not in _WITHOUT_EFFECT:
        raise ConfigError(f"{place}: {word} needs a build, and none is done here; {_ADVICE}")


def _variables(rest: str, place: str) -> dict[str, str]:
    words = _words(rest, place)
    if words and "=" not in words[0]:  # the old form: one name, then its value
        return {words[0]: " ".join(words[1:])}
    pairs = {name: value for name, _, value in (word.partition("=") for word in words)}
    if any("$" in value for value in pairs.values()):
        raise ConfigError(f"{place}: ENV with a variable in its value; write the value out")
    return pairs


def _copied(rest: str, context: Path, workdir: str | None, place: str) -> Files:
    """What COPY brings, by absolute path."""
    words = json.loads(rest) if rest.startswith("[") else _words(rest, place)
    flags = [word for word in words if word.startswith("--")]
    if any(not re.fullmatch(r"--(chown|chmod|link)(=.*)?", flag) for flag in flags):
        raise ConfigError(
            f"{place}: {' '.join(flags)} is not read; copy files of the environment's folder, or {_ADVICE}"
        )
    paths = [word for word in words if not word.startswith("--")]
    if len(paths) < 2:
        raise ConfigError(f"{place}: expected a source and a target, found {rest!r}")
    *sources, target = paths
    into = target.endswith("/") or target in (".", "..") or len(sources) > 1
    absolute = posixpath.normpath(posixpath.join(workdir or "/", target))
    found = Files()
    for source in sources:
        for entry in _matches(context, source, place):
            here = read_files(entry)
            if entry.is_dir() or into:
                found = here.under(absolute).over(found)
            else:  # the target is the file's new name
                [data] = here.contents.values()
                found = Files({absolute: data}, frozenset({absolute} if here.executable else ())).over(found)
    made = posixpath.join(absolute, "Dockerfile")  # of `COPY . .`; it says how the task was made
    return Files({name: data for name, data in found.contents.items() if name != made}, found.executable - {made})


def _matches(context: Path, source: str, place: str) -> list[Path]:
    if "://" in source:
        raise ConfigError(f"{place}: {source} would be fetched, and no network is used here; put the file beside it")
    relative = posixpath.normpath(source.lstrip("/") or ".")
    if relative.startswith(".."):
        raise ConfigError(f"{place}: {source} is outside the folder of the Dockerfile")
    if relative == ".":
        return [context]
    found = sorted(context.glob(relative))
    if not found:
        raise ConfigError(f"{place}: no {source} in the folder of the Dockerfile")
    return found


def _below(files: Files, workspace: str | None, path: Path) -> Files:
    """The files by their path from the workspace."""
    moved: dict[str, bytes] = {}
    for name, data in files.contents.items():
        if workspace is None or not name.startswith(f"{workspace}/"):
            raise ConfigError(
                f"{path}: copies a file to {name}; only what is below the working directory ({workspace or 'none'}) "
                f"can be put into a box, so copy it there, or {_ADVICE}"
            )
        moved[name[len(workspace) + 1 :]] = data
    start = len(workspace or "") + 1
    return Files(moved, frozenset(name[start:] for name in files.executable))


def _words(text: str, place: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"{place}: {error}") from error
