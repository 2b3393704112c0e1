"""What we own on this machine, and removing what dead owners left. A live run's boxes are never touched."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from palestra.envs.errors import SandboxError
from palestra.envs.sandboxes import cgroups, egress
from palestra.envs.sandboxes.owner import Tag

if TYPE_CHECKING:
    from palestra.envs.sandboxes.docker import Engine


@dataclass(frozen=True, slots=True)
class Listed:
    """A line of `palestra sandbox ls`. Listed("palestra-gsm8k-3f", "running", "gsm8k", "t7/2", "node3:4711", False)"""

    name: str
    state: str
    run: str
    episode: str
    owner: str
    abandoned: bool


@dataclass(frozen=True, slots=True)
class ReapReport:
    """What a reaping did. ReapReport(removed=("palestra-gsm8k-3f...",), kept=8)"""

    removed: tuple[str, ...] = ()  # containers, volumes and control groups of dead owners
    kept: int = 0  # containers of owners that live, or that cannot be seen from here and are not over their time
    errors: tuple[str, ...] = ()  # what could not be removed, and why


def list_boxes(socket_path: str) -> list[Listed]:
    """Every container of the project on the engine, whoever owns it. Raises SandboxError."""
    now = time.time()
    return [_listed(found.name, found.state, found.tag, now) for found in _engine(socket_path).boxes()]


def reap(socket_path: str | None) -> ReapReport:
    """Remove what dead owners of this host left: containers in any state, volumes, control groups of namespace boxes.

    `socket_path` None: there is no engine, and only control groups are looked at. Raises SandboxError when the engine
    cannot be listed; a single thing that stays is an error in the report.
    """
    engine = None if socket_path is None else _engine(socket_path)
    removed, errors = [], []
    kept = 0
    for name, remove in _remains(engine):
        if remove is None:
            kept += 1
            continue
        try:
            remove()
            removed.append(name)
        except SandboxError as error:
            errors.append(str(error))
    return ReapReport(tuple(removed), kept, tuple(errors))


def _remains(engine: Engine | None) -> Iterator[tuple[str, Callable[[], object] | None]]:
    """Everything of ours, with how to remove it; None for what is somebody's."""
    now = time.time()
    if engine is not None:
        for box in engine.boxes():
            gone = box.tag is not None and box.tag.abandoned(now)
            yield box.name, functools.partial(engine.remove, box.id) if gone else None
        for volume in engine.volumes():
            if volume.tag is not None and volume.tag.abandoned(now):
                yield volume.name, functools.partial(engine.remove_volume, volume.name)
    for group in cgroups.abandoned():
        yield group.name, group.remove
    for folder in egress.abandoned():
        yield folder.name, functools.partial(egress.remove, folder)


def _listed(name: str, state: str, tag: Tag | None, now: float) -> Listed:
    if tag is None:
        return Listed(name, state, "?", "?", "?", abandoned=False)
    return Listed(name, state, tag.run, tag.episode, f"{tag.owner.host}:{tag.owner.pid}", tag.abandoned(now))


def _engine(socket_path: str) -> Engine:
    # here, because a machine without the Docker package still has namespace boxes to reap
    from palestra.envs.sandboxes.docker import Engine

    return Engine(socket_path)
