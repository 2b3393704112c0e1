"""A sandbox whose commands go to a supervisor that is already inside it. Backends make the box and remove it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from palestra.envs.errors import SandboxError
from palestra.envs.sandboxes.channel import Channel, Transport
from palestra.envs.sandboxes.contract import Denial, Exec, ExportLimits, Limits, Snapshot, Tree
from palestra.envs.sandboxes.egress import BOX_FOLDER, DOOR, PORT, PROXY_ENV, Gate
from palestra.envs.sandboxes.replies import Gathered, raise_error, tree
from palestra.envs.sandboxes.spool import STREAM_BYTES, Spool, Stream
from palestra.envs.sandboxes.waiting import to_the_end

WORKSPACE = "/workspace"
POLICY_UID = 65534
EXAMINER_UID = 65533  # of boxes for judging
JUDGING = ("/tests", "/logs")  # directories of the examiner's, in such boxes only
POLICY_ENV = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8", "TZ": "UTC"}
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
    judging: int = 0  # of each directory of `JUDGING`

    @classmethod
    def of(cls, limits: Limits, role: Literal["policy", "verifier"] = "policy") -> Scratch:
        """An eighth for /dev/shm, a quarter for /tmp, the rest for the workspace; where something is judged, a third
        of the rest for each of the examiner's. Raises SandboxError."""
        if limits.scratch_bytes + SUPERVISOR_BYTES > limits.memory_bytes:
            raise SandboxError(
                f"scratch_bytes is {limits.scratch_bytes} of memory_bytes {limits.memory_bytes}: scratch counts as "
                f"memory, and a full one would leave no command alive; leave {SUPERVISOR_BYTES} bytes free"
            )
        shm, tmp = limits.scratch_bytes // 8, limits.scratch_bytes // 4
        workspace = limits.scratch_bytes - shm - tmp
        judging = workspace // 3 if role == "verifier" else 0
        return cls(workspace - len(JUDGING) * judging, tmp, shm, judging)


class SupervisedSandbox:
    """See the contract. `remove` is the backend's way to leave nothing behind; raises SandboxError where it cannot."""

    def __init__(
        self,
        id: str,
        transport: Transport,
        remove: Callable[[], Awaitable[None]],
        *,
        grace_s: float,
        lease: Lease,
        gate: Gate | None = None,
        role: Literal["policy", "verifier"] = "policy",
        workspace: str = WORKSPACE,
    ) -> None:
        self._id = id
        self._workspace = workspace
        self._channel = Channel(id, transport, grace_s=grace_s, beat_s=lease.beat_s)
        self._remove = remove
        self._lease = lease
        self._gate = gate
        self._role = role
        self._spool = Spool()
        self.unset: tuple[str, ...] = ()  # limits of processes that the box's kernel does not know
        self._removing = asyncio.Lock()
        self._removed = False

    @property
    def id(self) -> str:
        """The box's name in its backend's listing."""
        return self._id

    async def start(
        self, limits: Limits, *, rlimits: Mapping[str, int] | None = None, may_lack: Sequence[str] = ()
    ) -> None:
        """Start the supervisor. Raises SandboxError, also where a limit cannot be set that is not in `may_lack`."""
        opening = asyncio.create_task(self._gate.open()) if self._gate is not None else None
        try:
            config = self._config(limits, rlimits or {}) | {"may_lack": list(may_lack)}
            self.unset = tuple((await self._channel.open(config))["unset"])
            if opening is not None:
                await opening
        except OSError as error:
            raise SandboxError(f"{self._id}: its way out could not be opened: {error}") from error
        finally:
            if opening is not None and not opening.cancel() and not opening.cancelled():
                opening.exception()  # seen, so that it is not reported as forgotten

    def _config(self, limits: Limits, rlimits: Mapping[str, int]) -> dict[str, Any]:
        return {
            "uid": POLICY_UID,
            "gid": POLICY_UID,
            "examiner": EXAMINER_UID if self._role == "verifier" else None,
            "workspace": self._workspace,
            "roots": {
                self._workspace: [0o755, POLICY_UID, POLICY_UID],
                "/tmp": [0o1777, 0, 0],
                "/dev/shm": [0o1777, 0, 0],
                **({path: [0o755, EXAMINER_UID, EXAMINER_UID] for path in JUDGING} if self._role == "verifier" else {}),
            },
            "output_bytes": limits.output_bytes,
            "spool_bytes": STREAM_BYTES,
            "env": POLICY_ENV | {"HOME": self._workspace} | (PROXY_ENV if self._gate is not None else {}),
            "rlimits": {
                "NOFILE": limits.open_files,
                "FSIZE": limits.scratch_bytes,
                "CORE": 0,
                "MSGQUEUE": 0,  # POSIX queues would outlive their processes, unseen
                **rlimits,
            },
            "lease_s": self._lease.silence_s,
            "lifetime_s": self._lease.lifetime_s,
            "gate": [f"{BOX_FOLDER}/{DOOR}", PORT] if self._gate is not None else None,
        }

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
        """See the contract."""
        if user == "examiner" and self._role != "verifier":
            raise ValueError(f'{self._id} is a policy\'s box and has no examiner; ask for one of the role "verifier"')
        header = {"do": "run", "argv": list(argv), "cwd": cwd, "env": dict(env or {}), "timeout_s": timeout_s}
        header |= {"user": user, "beside": list(beside)}
        reply, data = await self._channel.call(header, stdin, timeout_s=timeout_s, part=self._spool.take)
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
            handle=self._spool.finish(),
        )

    async def read(self, path: str, max_bytes: int) -> bytes:
        """See the contract."""
        reply, data = await self._channel.call({"do": "read", "path": path, "max_bytes": max_bytes}, timeout_s=FILES_S)
        raise_error(reply)
        return data

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """See the contract."""
        reply, _ = await self._channel.call({"do": "write", "path": path, "mode": mode}, data, timeout_s=FILES_S)
        raise_error(reply)

    async def reset(self, files: Mapping[str, bytes] | None = None) -> None:
        """See the contract."""
        files = files or {}
        self._spool.clear()
        if self._gate is not None:
            self._gate.drop()
        listing = [[path, len(data), 0o644] for path, data in files.items()]
        header = {"do": "reset", "files": listing}
        reply, _ = await self._channel.call(header, b"".join(files.values()), timeout_s=FILES_S)
        if "error" in reply:
            raise SandboxError(f"{self._id}: the box is clean, but its files cannot be written: {reply['message']}")

    async def digest(self) -> str:
        """See the contract."""
        reply, _ = await self._channel.call({"do": "digest"}, timeout_s=FILES_S)
        self._raise_trouble(reply)
        return str(reply["digest"])

    async def output(self, handle: str, stream: Stream, start: int, stop: int) -> bytes:
        """See the contract; the first STREAM_BYTES of each stream are kept, of the last commands."""
        self._channel.check()
        return self._spool.read(handle, stream, start, stop)

    async def export(self, paths: Sequence[str], limits: ExportLimits) -> Tree:
        """See the contract."""
        header = {"do": "export", "paths": list(paths), "limits": asdict(limits)}
        body = Gathered(limits.total_bytes)
        reply, _ = await self._channel.call(header, timeout_s=FILES_S, part=body.take)
        self._raise_trouble(reply)
        return tree(reply, bytes(body.data))

    async def snapshot(self, max_bytes: int = 64 * 2**20) -> Snapshot:
        """See the contract."""
        body = Gathered(max_bytes)
        reply, _ = await self._channel.call(
            {"do": "snapshot", "max_bytes": max_bytes}, timeout_s=2 * FILES_S, part=body.take
        )
        self._raise_trouble(reply)
        return Snapshot(bytes(body.data), reply["digest"])

    async def restore(self, snapshot: Snapshot) -> None:
        """See the contract."""
        self._spool.clear()
        if self._gate is not None:
            self._gate.drop()
        header = {"do": "restore", "bytes": len(snapshot.data), "digest": snapshot.digest}
        reply, _ = await self._channel.call(header, timeout_s=3 * FILES_S, after=snapshot.data)
        self._raise_trouble(reply)

    def denials(self) -> tuple[Denial, ...]:
        """See the contract."""
        return () if self._gate is None else tuple(self._gate.denials)

    def _raise_trouble(self, reply: dict[str, Any]) -> None:
        """For what the policy cannot hinder: an error of the kernel is the box's own."""
        if reply.get("error") == "os":
            raise SandboxError(f"{self._id}: the state of the box cannot be read: {reply['message']}")
        raise_error(reply)

    async def close(self) -> None:
        """See the contract."""
        await to_the_end(self._end())

    async def _end(self) -> None:
        async with self._removing:
            if not self._removed:
                if self._gate is not None:
                    self._gate.close()
                await self._channel.close("it was closed")
                self._spool.close()
                await self._remove()
                self._removed = True
