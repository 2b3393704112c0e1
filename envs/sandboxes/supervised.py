"""A sandbox whose commands go to a supervisor that is already inside it. Backends make the box and remove it."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from palestra.envs.errors import SandboxError
from palestra.envs.sandboxes.channel import Channel, Transport
from palestra.envs.sandboxes.contract import Exec, Limits
from palestra.envs.sandboxes.waiting import to_the_end

WORKSPACE = "/workspace"
POLICY_UID = 65534
POLICY_ENV = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": WORKSPACE, "LANG": "C.UTF-8", "TZ": "UTC"}
FILES_S = 30.0  # for wiping, and for what is written or read beside the line itself
SUPERVISOR_BYTES = 32 * 2**20  # memory that stays free for the supervisor when the scratch is full


@dataclass(frozen=True, slots=True)
class Lease:
    """How long a box lives without its host, and at most. Lease(silence_s=300, beat_s=30, lifetime_s=86400)"""

    silence_s: float = 300.0
    beat_s: float = 30.0
    lifetime_s: float = 24 * 3600.0


@dataclass(frozen=True, slots=True)
class Scratch:
    """How the bytes that can be written are shared out; each directory is a file system of that size in memory."""

    workspace: int
    tmp: int
    shm: int

    @classmethod
    def of(cls, limits: Limits) -> Scratch:
        """An eighth for /dev/shm, a quarter for /tmp, the rest for the workspace. Raises SandboxError."""
        if limits.scratch_bytes + SUPERVISOR_BYTES > limits.memory_bytes:
            raise SandboxError(
                f"scratch_bytes is {limits.scratch_bytes} of memory_bytes {limits.memory_bytes}: scratch counts as "
                f"memory, and a full one would leave no command alive; leave {SUPERVISOR_BYTES} bytes free"
            )
        shm, tmp = limits.scratch_bytes // 8, limits.scratch_bytes // 4
        return cls(limits.scratch_bytes - shm - tmp, tmp, shm)


class SupervisedSandbox:
    """See the contract. `remove` is the backend's way to leave nothing behind; raises SandboxError where it cannot."""

    def __init__(
        self, id: str, transport: Transport, remove: Callable[[], Awaitable[None]], *, grace_s: float, lease: Lease
    ) -> None:
        self._id = id
        self._channel = Channel(id, transport, grace_s=grace_s, beat_s=lease.beat_s)
        self._remove = remove
        self._lease = lease
        self._removing = asyncio.Lock()
        self._removed = False

    @property
    def id(self) -> str:
        """The box's name in its backend's listing."""
        return self._id

    async def start(self, limits: Limits, *, rlimits: Mapping[str, int] | None = None) -> None:
        """Start the supervisor. Raises SandboxError."""
        await self._channel.open(
            {
                "uid": POLICY_UID,
                "gid": POLICY_UID,
                "workspace": WORKSPACE,
                "roots": {
                    WORKSPACE: [0o755, POLICY_UID, POLICY_UID],
                    "/tmp": [0o1777, 0, 0],
                    "/dev/shm": [0o1777, 0, 0],
                },
                "output_bytes": limits.output_bytes,
                "env": POLICY_ENV,
                "rlimits": {
                    "NOFILE": limits.open_files,
                    "FSIZE": limits.scratch_bytes,
                    "CORE": 0,
                    "MSGQUEUE": 0,  # POSIX queues would outlive their processes, unseen
                    **(rlimits or {}),
                },
                "lease_s": self._lease.silence_s,
                "lifetime_s": self._lease.lifetime_s,
            }
        )

    async def run(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float,
        stdin: bytes = b"",
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> Exec:
        """See the contract."""
        header = {"do": "run", "argv": list(argv), "cwd": cwd, "env": dict(env or {}), "timeout_s": timeout_s}
        reply, data = await self._channel.call(header, stdin, timeout_s=timeout_s)
        split = reply["lengths"][0]
        cuts = [tuple(cut) if cut else None for cut in reply["cuts"]]
        return Exec(
            exit_code=reply["exit_code"],
            signal=reply["signal"],
            timed_out=reply["timed_out"],
            out_of_memory=reply["out_of_memory"],
            stdout=data[:split],
            stderr=data[split:],
            stdout_cut=cuts[0],
            stderr_cut=cuts[1],
            stdout_total=reply["totals"][0],
            stderr_total=reply["totals"][1],
            survivors=reply["survivors"],
            seconds=reply["seconds"],
        )

    async def read(self, path: str, max_bytes: int) -> bytes:
        """See the contract."""
        reply, data = await self._channel.call({"do": "read", "path": path, "max_bytes": max_bytes}, timeout_s=FILES_S)
        _raise_error(reply)
        return data

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """See the contract."""
        reply, _ = await self._channel.call({"do": "write", "path": path, "mode": mode}, data, timeout_s=FILES_S)
        _raise_error(reply)

    async def reset(self, files: Mapping[str, bytes] | None = None) -> None:
        """See the contract."""
        files = files or {}
        listing = [[path, len(data), 0o644] for path, data in files.items()]
        header = {"do": "reset", "files": listing}
        reply, _ = await self._channel.call(header, b"".join(files.values()), timeout_s=FILES_S)
        if "error" in reply:
            raise SandboxError(f"{self._id}: the box is clean, but its files cannot be written: {reply['message']}")

    async def digest(self) -> str:
        """See the contract."""
        reply, _ = await self._channel.call({"do": "digest"}, timeout_s=FILES_S)
        if reply.get("error") == "os":  # the policy cannot do that: only the kernel can
            raise SandboxError(f"{self._id}: the state of the box cannot be read: {reply['message']}")
        _raise_error(reply)
        return str(reply["digest"])

    async def close(self) -> None:
        """See the contract."""
        await to_the_end(self._end())

    async def _end(self) -> None:
        async with self._removing:
            if not self._removed:
                await self._channel.close("it was closed")
                await self._remove()
                self._removed = True


def _raise_error(reply: dict[str, Any]) -> None:
    """The same built-in error as the call would have raised here, made from its number."""
    if reply.get("error") == "value":
        raise ValueError(reply["message"])
    if reply.get("error") == "os":
        number = reply["errno"]
        if number == errno.ENOTDIR:
            raise FileNotFoundError(number, reply["message"])
        if number == errno.ELOOP:
            raise PermissionError(number, reply["message"])
        raise OSError(number, reply["message"] or os.strerror(number))  # picks the subclass by the number
