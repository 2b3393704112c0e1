"""What every sandbox promises, whatever it is made of.

A command runs in a box as an unprivileged user without capabilities, network or credentials, under limits that the
box was made with. The contract says which error each method raises; a backend's own failure is never shown to the
policy as the output of its command.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from palestra.envs.errors import SandboxError


@dataclass(frozen=True, slots=True)
class Exec:
    """How one command ended. Exec(exit_code=0, stdout=b"hi\\n", stdout_total=3, ...)

    `exit_code` is None when a signal ended it; the classification comes from the kernel and the supervisor's clock,
    never from the text that the command printed.
    """

    exit_code: int | None
    signal: int | None = None
    timed_out: bool = False
    out_of_memory: bool = False
    stdout: bytes = b""  # at most the output limit: the head, then the tail, see `stdout_cut`
    stderr: bytes = b""
    stdout_cut: tuple[int, int] | None = None  # [from, to) of the bytes left out of `stdout`; None: all is there
    stderr_cut: tuple[int, int] | None = None
    stdout_total: int = 0  # bytes written by the command, kept or not
    stderr_total: int = 0
    survivors: int = 0  # processes that outlived the command and were killed
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Ended by itself with status 0."""
        return self.exit_code == 0 and not self.timed_out


@dataclass(frozen=True, slots=True)
class Limits:
    """What a box may use. Enforced by the kernel; a backend that cannot enforce one refuses it or records it."""

    memory_bytes: int = 256 * 2**20
    processes: int = 64
    cpus: float = 1.0
    scratch_bytes: int = 64 * 2**20  # everything that can be written, in all
    output_bytes: int = 64 * 2**10  # kept of each stream of a command; the rest is counted and dropped
    open_files: int = 256


@dataclass(frozen=True, slots=True)
class BoxSpec:
    """What kind of box: two boxes of one spec are interchangeable after a reset."""

    image: str | None = None  # None: the backend's default
    limits: Limits = field(default_factory=Limits)


class BoxClosed(SandboxError):
    """A method was called on a box after `close`, or the box died under it."""


class Sandbox(Protocol):
    """A box with a workspace. One command at a time; paths are relative to the workspace or absolute in the box."""

    @property
    def id(self) -> str:
        """Unique for the life of the machine; the name in the engine's listing."""
        ...

    async def run(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float,
        stdin: bytes = b"",
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> Exec:
        """Run one command to its end, or to `timeout_s`, and kill what it leaves behind.

        A command that cannot be found or started is an Exec with exit code 127 or 126, as in a shell.
        Raises SandboxError when the box is broken, BoxClosed when it is gone. Never raises for what a command does.
        """
        ...

    async def read(self, path: str, max_bytes: int) -> bytes:
        """A regular file's bytes. Raises FileNotFoundError, IsADirectoryError, PermissionError (a link or a special
        file on the way), ValueError (longer than `max_bytes`), SandboxError."""
        ...

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Create or replace a file of the workspace, with its parents. Raises PermissionError for a path that leaves
        it or passes through a link, OSError (no space), SandboxError."""
        ...

    async def reset(self, files: Mapping[str, bytes] | None = None) -> None:
        """Kill every process of the policy, wipe everything that can be written, restore modes, then write `files`.
        Raises SandboxError when the box cannot be proved clean; such a box must be closed."""
        ...

    async def digest(self) -> str:
        """A sha256 over paths, modes and contents of everything that can be written: equal for equal states, in this
        box or another. Changes nothing. Raises ValueError (too much to read in time), SandboxError."""
        ...

    async def close(self) -> None:
        """Remove the box and all it holds. Idempotent; shielded from cancellation; raises SandboxError only when
        something of it is left behind."""
        ...


class Boxes(Protocol):
    """Lends clean boxes. Environments borrow and give back; the pool owns."""

    async def acquire(self, spec: BoxSpec, files: Mapping[str, bytes], *, episode: str) -> Sandbox:
        """A clean box with `files` in its workspace. Waits for a free one, but not longer than the pool's deadline.
        Raises SandboxError."""
        ...

    async def release(self, box: Sandbox) -> None:
        """Take a box back; it is reset before anyone else gets it, or replaced. Never raises."""
        ...
