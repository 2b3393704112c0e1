"""What every sandbox promises, whatever it is made of.

A command runs in a box as an unprivileged user without capabilities, network or credentials, under limits that the
box was made with. The contract says which error each method raises; a backend's own failure is never shown to the
policy as the output of its command.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

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
    handle: str | None = None  # for `Sandbox.output`, when a stream was cut; None: all of it is here

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
    network: tuple[str, ...] = ()
    """Where commands may connect to, through a proxy: "host:port" each, and nowhere else. Empty: no network at all."""
    role: Literal["policy", "verifier"] = "policy"
    """Whose commands run in it. A box is never lent for both."""
    workspace: str = "/workspace"
    """Where commands start and files are relative to: an absolute path. What the image has there is hidden by it."""


@dataclass(frozen=True, slots=True)
class ExportLimits:
    """What may leave a box at once. Apparent sizes count, so that a sparse file is as large as it says."""

    total_bytes: int = 2 * 2**20
    files: int = 2000
    depth: int = 64


@dataclass(frozen=True, slots=True)
class Tree:
    """What was found below some paths of a box: regular files, links that stay inside, and what was left there.

    Names are relative to the workspace; bytes that are no UTF-8 are lone surrogates (`os.fsdecode`).
    """

    files: Mapping[str, bytes]
    executable: frozenset[str] = frozenset()
    links: Mapping[str, str] = field(default_factory=dict)
    skipped: Mapping[str, str] = field(default_factory=dict)  # devices, sockets, pipes, links that leave: path -> why
    over: str | None = None  # which limit was passed, in words; then `files` is empty


@dataclass(frozen=True, slots=True)
class Denial:
    """A connection that a command asked the proxy for and did not get. Denial("10.0.0.5", 22, "not on the list ...")"""

    host: str
    port: int
    reason: str
    probe: bool = False  # it went for this machine, its network or its metadata: `control_plane_probe`


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything that could be written in a box, as it was: bytes that only `restore` reads."""

    data: bytes
    digest: str  # as `Sandbox.digest` said it


class BoxClosed(SandboxError):
    """A method was called on a box after `close`, or the box died under it."""


class EngineAway(SandboxError):
    """Whatever makes boxes does not answer just now. It may come back, so it is worth asking again."""


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
        user: Literal["policy", "examiner"] = "policy",
        beside: Sequence[str] = (),
    ) -> Exec:
        """Run one command to its end, or to `timeout_s`, and kill what it leaves behind.

        Only boxes of the role "verifier" have an examiner: another user, whose files and processes the policy's user
        cannot reach. `beside` is a second command, always of the policy's user and seen nowhere: the two are joined by
        a socket, which is descriptor 3 of both, and the second is killed when the first has ended.
        Raises ValueError where the box has no examiner.

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

    async def output(self, handle: str, stream: Literal["stdout", "stderr"], start: int, stop: int) -> bytes:
        """Bytes [start, stop) of what a command wrote, up to the backend's bound on kept output; fewer at its end.
        Handles end with the next reset. Raises KeyError (unknown, or of an earlier episode), SandboxError."""
        ...

    async def export(self, paths: Sequence[str], limits: ExportLimits) -> Tree:
        """Regular files and inner links below `paths` (relative to the workspace; "." is all of it), read without
        following a link. Names and reasons count as bytes too. Never raises for what the policy left there. Raises
        ValueError (a path outside the workspace), SandboxError."""
        ...

    async def snapshot(self, max_bytes: int = 64 * 2**20) -> Snapshot:
        """The state of everything that can be written; two names of one file become two files. Changes nothing.
        Raises ValueError (larger than `max_bytes`, too much to read in time, or a device in it), SandboxError."""
        ...

    async def restore(self, snapshot: Snapshot) -> None:
        """Kill every process of the policy and put that state back, here or in another box of the same spec, proved by
        its digest. Raises SandboxError; such a box must be closed."""
        ...

    def denials(self) -> tuple[Denial, ...]:
        """What the proxy refused since the last reset, the latest of it; nothing for a box without a network."""
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

    async def fork(self, box: Sandbox, *, episode: str) -> Sandbox:
        """Another lent box in the state that `box` is in; what happens in one does not reach the other.
        Raises SandboxError."""
        ...

    async def release(self, box: Sandbox) -> None:
        """Take a box back; it is reset before anyone else gets it, or replaced. Never raises."""
        ...
