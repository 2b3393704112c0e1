"""A sandbox in memory whose commands are answered by a function: for tests of everything that stands above a box."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import posixpath
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Literal

from palestra.envs.errors import SandboxError
from palestra.envs.sandboxes.contract import (
    BoxClosed,
    BoxSpec,
    Denial,
    Exec,
    ExportLimits,
    Limits,
    Sandbox,
    Snapshot,
    Tree,
)
from palestra.envs.sandboxes.spool import Spool, Stream

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
    user: Literal["policy", "examiner"] = "policy"
    beside: tuple[str, ...] = ()


Answer = Callable[[Command, dict[str, bytes]], Exec | Trouble]
"""Plays the program: gets the command and the box's files (path -> content, may edit them), says how it ended."""


def exits_zero(command: Command, files: dict[str, bytes]) -> Exec:
    """Every command succeeds and prints nothing."""
    return Exec(exit_code=0)


class ScriptedSandbox:
    """A box of files in a dictionary. `trouble` strikes the next call of any method, once.

    An answer longer than `output_bytes` is cut as a real box cuts it.
    """

    def __init__(
        self,
        answer: Answer = exits_zero,
        *,
        id: str = "scripted-0",
        grace_s: float = 0.05,
        output_bytes: int = Limits().output_bytes,
    ) -> None:
        self._id = id
        self._answer = answer
        self._grace_s = grace_s
        self._output_bytes = output_bytes
        self._spool = Spool()
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
        user: Literal["policy", "examiner"] = "policy",
        beside: Sequence[str] = (),
    ) -> Exec:
        """The answer of the function. Raises SandboxError or BoxClosed where it answers with a Trouble."""
        async with self._lock:
            await self._strike(timeout_s)
            where = posixpath.normpath(posixpath.join(WORKSPACE, cwd or ""))
            command = Command(tuple(argv), stdin, where, dict(env or {}), timeout_s, user, tuple(beside))
            self.commands.append(command)
            result = self._answer(command, self.files)
            if isinstance(result, Trouble):
                self.trouble = result
                await self._strike(timeout_s)
                raise AssertionError("a trouble always raises")
            return self._cut(result)

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
            self._empty()
            self.resets += 1
            for path, data in (files or {}).items():
                self._put(path, data, 0o644)

    async def digest(self) -> str:
        """See the contract; a file that a command made has mode 0o644."""
        async with self._lock:
            await self._strike()
            return hashlib.sha256(self._state()).hexdigest()

    async def output(self, handle: str, stream: Stream, start: int, stop: int) -> bytes:
        """See the contract."""
        async with self._lock:
            await self._strike()
            return self._spool.read(handle, stream, start, stop)

    async def export(self, paths: Sequence[str], limits: ExportLimits) -> Tree:
        """See the contract; there are no links here."""
        async with self._lock:
            await self._strike()
            tops = [_absolute(path) for path in paths]
            if outside := [top for top in tops if top != WORKSPACE and not top.startswith(WORKSPACE + "/")]:
                raise ValueError(f"{outside[0]}: outside the workspace, so it cannot be exported")
            names = [name for name in sorted(self.files) if any((name + "/").startswith(top + "/") for top in tops)]
            files = {posixpath.relpath(name, WORKSPACE): self.files[name] for name in names}
            runs = {posixpath.relpath(name, WORKSPACE) for name in names if self.modes.get(name, 0o644) & 0o111}
            over = _over(files, limits)
            return Tree({}, over=over) if over else Tree(files, frozenset(runs))

    async def snapshot(self, max_bytes: int = 64 * 2**20) -> Snapshot:
        """See the contract."""
        async with self._lock:
            await self._strike()
            data = self._state()
            if len(data) > max_bytes:
                raise ValueError(f"the snapshot is larger than {max_bytes} bytes")
            return Snapshot(data, hashlib.sha256(data).hexdigest())

    async def restore(self, snapshot: Snapshot) -> None:
        """See the contract."""
        async with self._lock:
            await self._strike()
            self._empty()
            if hashlib.sha256(snapshot.data).hexdigest() != snapshot.digest:
                raise SandboxError(f"{self.id}: what was put back is not what the snapshot says")
            for path, mode, content in json.loads(snapshot.data):
                self.files[path], self.modes[path] = base64.b64decode(content), mode

    def denials(self) -> tuple[Denial, ...]:
        """None: there is no network to ask for."""
        return ()

    async def close(self) -> None:
        """Forget everything. Idempotent."""
        self._closed = self._closed or "it was closed"
        self._spool.close()
        self.files.clear()

    def _empty(self) -> None:
        self.files.clear()
        self.modes.clear()
        self._spool.clear()

    def _state(self) -> bytes:
        """Everything in the box: what a snapshot holds."""
        rows = [
            (path, self.modes.get(path, 0o644), base64.b64encode(data).decode()) for path, data in self.files.items()
        ]
        return json.dumps(sorted(rows)).encode()

    def _cut(self, result: Exec) -> Exec:
        """Head and tail of what is too long, and a handle to all of it."""
        limit = self._output_bytes
        streams = {name: getattr(result, name) for name in ("stdout", "stderr")}
        changes: dict[str, object] = {}
        for number, (name, data) in enumerate(streams.items()):
            if len(data) > limit:
                self._spool.take(number, data)
                head, tail = limit - limit // 2, len(data) - limit // 2
                changes |= {name: data[:head] + data[tail:], f"{name}_cut": (head, tail), f"{name}_total": len(data)}
        return replace(result, handle=self._spool.finish(), **changes) if changes else result  # type: ignore[arg-type]

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

    async def fork(self, box: Sandbox, *, episode: str) -> ScriptedSandbox:
        """A fresh box in the state of `box`."""
        at = [lent.id for lent in self.boxes].index(box.id)
        other = await self.acquire(self.specs[at], {}, episode=episode)
        await other.restore(await box.snapshot())
        return other

    async def release(self, box: Sandbox) -> None:
        """Take it back; nobody gets it again."""
        self.lent -= 1
        await box.close()


def _over(files: Mapping[str, bytes], limits: ExportLimits) -> str | None:
    """Which limit is passed, in words."""
    if len(files) > limits.files:
        return f"more than {limits.files} files"
    if sum(len(path) + len(data) for path, data in files.items()) > limits.total_bytes:
        return f"more than {limits.total_bytes} bytes"
    if any(path.count("/") > limits.depth for path in files):
        return f"directories are more than {limits.depth} deep"
    return None


def _absolute(path: str) -> str:
    if "\0" in path:
        raise PermissionError("a path cannot hold a zero byte")
    return posixpath.normpath(posixpath.join(WORKSPACE, path))
