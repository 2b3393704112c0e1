"""A sandbox in memory whose commands are answered by a function: for tests of everything that stands above a box."""

from __future__ import annotations

import asyncio
import hashlib
import posixpath
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from palestra.envs.errors import SandboxError
from palestra.envs.sandboxes.contract import BoxClosed, BoxSpec, Exec, Sandbox

WORKSPACE = "/workspace"


class Trouble(StrEnum):
    """What can go wrong with a box, for no fault of the command in it."""

    STALL = "stall"  # the box never answers; the host's own deadline ends the wait
    DIE = "die"  # the box is gone, in the middle of the call
    FAIL = "fail"  # the box says that it cannot


@dataclass(frozen=True, slots=True)
class Command:
    """What was asked of a box. Command(("cat", "a.txt"), cwd="/workspace")"""

    argv: tuple[str, ...]
    stdin: bytes = b""
    cwd: str = WORKSPACE
    env: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float = 0.0


Answer = Callable[[Command, dict[str, bytes]], Exec | Trouble]
"""Plays the program: gets the command and the box's files (path -> content, may edit them), says how it ended."""


def exits_zero(command: Command, files: dict[str, bytes]) -> Exec:
    """Every command succeeds and prints nothing."""
    return Exec(exit_code=0)


class ScriptedSandbox:
    """A box of files in a dictionary. `trouble` strikes the next call of any method, once."""

    def __init__(self, answer: Answer = exits_zero, *, id: str = "scripted-0", grace_s: float = 0.05) -> None:
        self._id = id
        self._answer = answer
        self._grace_s = grace_s
        self._closed: str | None = None
        self._lock = asyncio.Lock()
        self.files: dict[str, bytes] = {}
        self.modes: dict[str, int] = {}
        self.commands: list[Command] = []  # everything that was run since the box was made
        self.resets = 0
        self.trouble: Trouble | None = None

    @property
    def id(self) -> str:
        """The name given at the start."""
        return self._id

    async def run(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float,
        stdin: bytes = b"",
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> Exec:
        """The answer of the function. Raises SandboxError or BoxClosed where it answers with a Trouble."""
        async with self._lock:
            await self._strike(timeout_s)
            where = posixpath.normpath(posixpath.join(WORKSPACE, cwd or ""))
            command = Command(tuple(argv), stdin, where, dict(env or {}), timeout_s)
            self.commands.append(command)
            result = self._answer(command, self.files)
            if isinstance(result, Trouble):
                self.trouble = result
                await self._strike(timeout_s)
                raise AssertionError("a trouble always raises")
            return result

    async def read(self, path: str, max_bytes: int) -> bytes:
        """See the contract."""
        async with self._lock:
            await self._strike()
            full = _absolute(path)
            if full in self.files:
                data = self.files[full]
                if len(data) > max_bytes:
                    raise ValueError(f"{path}: {len(data)} bytes, but at most {max_bytes} were asked for")
                return data
            if full == WORKSPACE or any(name.startswith(full + "/") for name in self.files):
                raise IsADirectoryError(f"{path}: is a directory")
            raise FileNotFoundError(f"{path}: no such file in the box")

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """See the contract."""
        async with self._lock:
            await self._strike()
            self._put(path, data, mode)

    async def reset(self, files: Mapping[str, bytes] | None = None) -> None:
        """See the contract."""
        async with self._lock:
            await self._strike()
            self.files.clear()
            self.modes.clear()
            self.resets += 1
            for path, data in (files or {}).items():
                self._put(path, data, 0o644)

    async def digest(self) -> str:
        """See the contract; a file that a command made has mode 0o644."""
        async with self._lock:
            await self._strike()
            state = sorted((path, self.modes.get(path, 0o644), data) for path, data in self.files.items())
            return hashlib.sha256(repr(state).encode()).hexdigest()

    async def close(self) -> None:
        """Forget everything. Idempotent."""
        self._closed = self._closed or "it was closed"
        self.files.clear()

    def _put(self, path: str, data: bytes, mode: int) -> None:
        full = _absolute(path)
        if not full.startswith(WORKSPACE + "/"):
            raise PermissionError(f"{path}: outside the workspace")
        if any(name.startswith(full + "/") for name in self.files):
            raise IsADirectoryError(f"{path}: is a directory")
        self.files[full] = data
        self.modes[full] = mode

    async def _strike(self, timeout_s: float = 0.0) -> None:
        if self._closed:
            raise BoxClosed(f"{self.id}: {self._closed}")
        trouble, self.trouble = self.trouble, None
        if trouble is Trouble.STALL:
            await asyncio.sleep(timeout_s + self._grace_s)
            self._closed = "it did not answer before"
            raise SandboxError(f"{self.id}: no answer within {timeout_s + self._grace_s:.2f} s")
        if trouble is Trouble.DIE:
            self._closed = "it died"
            raise BoxClosed(f"{self.id}: the box died")
        if trouble is Trouble.FAIL:
            raise SandboxError(f"{self.id}: the box failed")


class ScriptedBoxes:
    """Lends scripted boxes, a fresh one for each episode. `create` is asked first and may refuse with a Trouble."""

    def __init__(
        self,
        answer: Answer = exits_zero,
        *,
        create: Callable[[BoxSpec, str], Trouble | None] = lambda spec, episode: None,
        grace_s: float = 0.05,
    ) -> None:
        self._answer = answer
        self._create = create
        self._grace_s = grace_s
        self.boxes: list[ScriptedSandbox] = []  # every box ever lent, in order
        self.episodes: list[str] = []  # whom each was lent to, in the same order
        self.specs: list[BoxSpec] = []
        self.lent = 0  # boxes that are out now

    async def acquire(self, spec: BoxSpec, files: Mapping[str, bytes], *, episode: str) -> ScriptedSandbox:
        """A fresh box with `files`. Raises SandboxError where `create` says so."""
        trouble = self._create(spec, episode)
        if trouble is not None:
            await asyncio.sleep(self._grace_s if trouble is Trouble.STALL else 0)
            raise SandboxError(f"no box for {episode}: {trouble}")
        box = ScriptedSandbox(self._answer, id=f"scripted-{len(self.boxes)}", grace_s=self._grace_s)
        await box.reset(files)
        self.boxes.append(box)
        self.episodes.append(episode)
        self.specs.append(spec)
        self.lent += 1
        return box

    async def release(self, box: Sandbox) -> None:
        """Take it back; nobody gets it again."""
        self.lent -= 1
        await box.close()


def _absolute(path: str) -> str:
    if "\0" in path:
        raise PermissionError("a path cannot hold a zero byte")
    return posixpath.normpath(posixpath.join(WORKSPACE, path))
