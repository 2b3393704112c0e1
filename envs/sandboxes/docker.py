"""Boxes of a Docker engine, hardened; the only file that knows the engine's package.

The supervisor is user 0 of the container with six capabilities, enough to end and to clean up after the policy, whose
commands run as another user without any. The root file system is read-only; what can be written is memory of a fixed
size; there is no network interface, no host path and no credential (`egress` has the way out of a box that may have
one). The container ends when this process's connection to it does.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import re
import secrets
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import IO, Any

import docker
from docker.errors import APIError, DockerException, ImageNotFound, NotFound
from docker.types import LogConfig, Mount
from requests.exceptions import RequestException

from palestra.envs.errors import ConfigError, SandboxError
from palestra.envs.sandboxes.channel import SUPERVISOR_ARGV
from palestra.envs.sandboxes.contract import BoxSpec, EngineAway
from palestra.envs.sandboxes.egress import BOX_FOLDER, Gate
from palestra.envs.sandboxes.owner import PREFIX, PROJECT, Owner, Tag
from palestra.envs.sandboxes.supervised import (
    EXAMINER_UID,
    JUDGING,
    POLICY_UID,
    Lease,
    Scratch,
    SupervisedSandbox,
)
from palestra.envs.sandboxes.waiting import to_the_end

DEFAULT_IMAGE = "palestra/base:bookworm"
CAPABILITIES = ("KILL", "DAC_OVERRIDE", "FOWNER", "CHOWN", "SETUID", "SETGID")
BOX_PATH = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
CALL_S = 60  # the longest wait for the engine's answer to one call
GONE_S = 15.0
BYTES_PER_INODE = 4096
STDOUT = 1
HOST_KERNEL = ("runc", "crun", "io.containerd.runc.v2", "io.containerd.runtime.v1.linux")
OWN_THREADS = 256  # of a runtime with a kernel of its own, which count as the box's
OTHER_KERNEL_LACKS = ("CORE", "MSGQUEUE")  # limits that a runtime with a kernel of its own may not have; it is recorded
WORDS = 2000


@dataclass(frozen=True, slots=True)
class Found:
    """Something of ours on the engine. `tag` is None where its labels are not whole."""

    id: str
    name: str
    state: str
    tag: Tag | None


class Engine:
    """The blocking calls to one engine. Each raises SandboxError when the engine refuses or does not answer."""

    def __init__(self, socket_path: str) -> None:
        self.socket_path = socket_path
        with _engine_errors(f"connecting to {socket_path}"):
            self._api = docker.APIClient(base_url=f"unix://{socket_path}", timeout=CALL_S, version="auto")

    @functools.cached_property
    def unenforced(self) -> tuple[str, ...]:
        """Limits that this engine does not enforce, in words."""
        with _engine_errors("asking the engine what it can do"):
            info = self._api.info()
        lacking = {
            "processes": not info.get("PidsLimit", True),
            "memory": not info.get("MemoryLimit", True),
            "swap": not info.get("SwapLimit", True),
            "cpus": not info.get("CpuCfsQuota", True),
            "seccomp": not any("seccomp" in option for option in info.get("SecurityOptions") or ()),
        }
        return tuple(f"{name}: the engine does not support it" for name, lacks in lacking.items() if lacks)

    def check_runtime(self, name: str) -> None:
        """Raises SandboxError with those it has when the engine does not list the runtime."""
        with _engine_errors("asking the engine for its runtimes"):
            runtimes = sorted(self._api.info().get("Runtimes") or ())
        if name not in runtimes:
            raise SandboxError(
                f"the engine has no runtime {name!r}, only {', '.join(runtimes)}; register it in the engine's "
                "daemon.json, or choose no runtime to run without that wall"
            )

    def image(self, name: str) -> Mapping[str, Any]:
        """The image's configuration. Raises SandboxError with what to do when it is not there."""
        with _engine_errors(f"looking for the image {name}"):
            try:
                return dict(self._api.inspect_image(name)["Config"] or {})
            except ImageNotFound as error:
                advice = "`palestra sandbox build-image` makes it" if name == DEFAULT_IMAGE else "build or load it"
                raise SandboxError(f"the Docker engine has no image {name}; {advice}") from error

    def has_image(self, name: str) -> bool:
        """Whether the image is on the engine."""
        with _engine_errors(f"looking for the image {name}"):
            return bool(self._api.images(name=name))

    def import_image(self, tarball: IO[bytes], name: str, changes: list[str]) -> None:
        """Make an image from a root file system."""
        repository, _, tag = name.partition(":")
        with _engine_errors(f"importing the image {name}"):
            self._api.import_image_from_stream(tarball, repository=repository, tag=tag or "latest", changes=changes)

    def create(
        self, name: str, image: str, spec: BoxSpec, tag: Tag, gate: str | None = None, runtime: str | None = None
    ) -> None:
        """Create the container, not started. `gate`: the folder of its way out. `runtime` None: the engine's."""
        config = self.image(image)
        if config.get("Volumes"):
            volumes = ", ".join(config["Volumes"])
            raise SandboxError(f"{image}: declares VOLUME {volumes}, which a reset cannot wipe; build it without")
        names = [entry.partition("=")[0] for entry in config.get("Env") or ()]
        with _engine_errors(f"creating a container of {image}"):
            self._api.create_container(
                image,
                command=list(SUPERVISOR_ARGV[1:]),
                entrypoint=SUPERVISOR_ARGV[0],
                name=name,
                hostname="box",
                user="0:0",
                working_dir="/",
                stdin_open=True,
                environment=[*(name for name in names if name != "PATH"), BOX_PATH],  # a bare name unsets it
                healthcheck={"test": ["NONE"]},
                labels=tag.labels(),
                host_config=self._api.create_host_config(**_host_config(spec, runtime), **_way_out(gate)),
            )

    def attach(self, name: str) -> socket.socket:
        """The container's standard streams, multiplexed; the container's input ends with the socket."""
        with _engine_errors(f"attaching to {name}"):
            stream = self._api.attach_socket(name, params={"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1})
        try:
            return socket.socket(fileno=os.dup(stream.fileno()))
        finally:
            stream.close()

    def start(self, name: str) -> None:
        """Start the container."""
        with _engine_errors(f"starting {name}"):
            self._api.start(name)

    def boxes(self, lender: str | None = None) -> list[Found]:
        """Our containers in whatever state, of one lender or of everybody."""
        label = f"{PREFIX}project={PROJECT}" if lender is None else f"{PREFIX}lender={lender}"
        with _engine_errors("listing containers"):
            rows = self._api.containers(all=True, filters={"label": label})
        return [
            Found(row["Id"], row["Names"][0].lstrip("/") if row["Names"] else "", row["State"], Tag.of(row["Labels"]))
            for row in rows
        ]

    def remove(self, name: str) -> bool:
        """Kill and remove a container with its volumes, and see that it is gone. False when there was none."""
        try:
            self._api.remove_container(name, force=True, v=True)
        except NotFound:
            return False
        except (APIError, RequestException) as error:
            self._await_gone(name, error)  # it may be on its way already: it goes by itself when it has ended
        return True

    def _await_gone(self, name: str, cause: Exception) -> None:
        deadline = time.monotonic() + GONE_S
        while time.monotonic() < deadline:
            with contextlib.suppress(APIError, RequestException):
                try:
                    self._api.inspect_container(name)
                except NotFound:
                    return
                self._api.remove_container(name, force=True, v=True)
            time.sleep(0.1)
        raise SandboxError(f"{name}: still there {GONE_S:g} s after it was removed: {cause}") from cause

    def volumes(self) -> list[Found]:
        """Our volumes."""
        with _engine_errors("listing volumes"):
            rows = self._api.volumes(filters={"label": f"{PREFIX}project={PROJECT}"})["Volumes"] or []
        return [Found(row["Name"], row["Name"], "volume", Tag.of(row["Labels"])) for row in rows]

    def remove_volume(self, name: str) -> None:
        """Remove a volume."""
        with _engine_errors(f"removing the volume {name}"), contextlib.suppress(NotFound):
            self._api.remove_volume(name, force=True)


class DockerBackend:
    """Makes boxes on one engine. Raises ConfigError at once when the engine, the image or the runtime is not there."""

    name = "docker"

    def __init__(
        self,
        *,
        run: str,
        socket_path: str,
        image: str = DEFAULT_IMAGE,
        runtime: str | None = None,
        owner: Owner | None = None,
        lease: Lease | None = None,
        grace_s: float = 10.0,
    ) -> None:
        try:
            self._engine = Engine(socket_path)
            self._engine.image(image)
            if runtime is not None:
                self._engine.check_runtime(runtime)
            self.unenforced = self._engine.unenforced
        except SandboxError as error:
            raise ConfigError(f"sandbox docker: {error}") from error
        self._run = run
        self._image = image
        self._runtime = runtime
        self._owner = owner or Owner.this_process()
        self._lease = lease or Lease()
        self._grace_s = grace_s
        self._lender = secrets.token_hex(8)

    async def open(self, spec: BoxSpec, *, episode: str) -> SupervisedSandbox:
        """A new box. Leaves nothing behind when it fails or is cancelled. Raises SandboxError."""
        name = f"palestra-{re.sub('[^a-zA-Z0-9_.-]', '-', self._run)[:40]}-{secrets.token_hex(6)}"
        tag = Tag(self._owner, self._run, self._lender, episode, time.time() + self._lease.lifetime_s)
        opened = False
        if spec.network and self._runtime is not None:
            raise SandboxError(
                f"a box of the runtime {self._runtime!r} has a kernel of its own and cannot hand the host a socket, so "
                "it has no way out; leave `network` empty, or use the engine's default runtime"
            )
        gate = Gate(name, spec.network, self._owner) if spec.network else None
        try:
            folder = None if gate is None else str(gate.folder)
            image = spec.image or self._image
            await to_the_end(asyncio.to_thread(self._engine.create, name, image, spec, tag, folder, self._runtime))
            stream = await to_the_end(asyncio.to_thread(self._engine.attach, name))
            transport = await _Attached.over(stream)
            remove = functools.partial(self._remove, name)
            box = SupervisedSandbox(
                name,
                transport,
                remove,
                grace_s=self._grace_s,
                lease=self._lease,
                gate=gate,
                role=spec.role,
                workspace=spec.workspace,
            )
            await to_the_end(asyncio.to_thread(self._engine.start, name))
            await box.start(spec.limits, may_lack=OTHER_KERNEL_LACKS if _has_own_kernel(self._runtime) else ())
            opened = True
            return box
        finally:
            if not opened:
                if gate is not None:
                    gate.close()
                await to_the_end(asyncio.to_thread(self._engine.remove, name))

    async def probe(self) -> None:
        """See that a box comes up and works with the runtime, and what it cannot enforce. Raises SandboxError."""
        box = await self.open(BoxSpec(), episode="probe")
        try:
            done = await box.run(["true"], timeout_s=10)
            await box.reset()
        finally:
            await box.close()
        if not done.ok:
            raise SandboxError(f"{box.id}: `true` failed: {done}")
        if not _has_own_kernel(self._runtime):
            return
        self.unenforced += (f"processes: up to {OWN_THREADS} more, since threads of {self._runtime} count with them",)
        self.unenforced += tuple(f"{name}: the kernel of {self._runtime} has no such limit" for name in box.unset)

    async def owned(self) -> list[str]:
        """The boxes that this backend has made and that still exist, in whatever state."""
        return [found.name for found in await asyncio.to_thread(self._engine.boxes, self._lender)]

    async def sweep(self) -> None:
        """Remove whatever this backend has made and still exists, also what it never learned to exist."""
        for found in await asyncio.to_thread(self._engine.boxes, self._lender):
            await asyncio.to_thread(self._engine.remove, found.id)

    async def _remove(self, name: str) -> None:
        await asyncio.to_thread(self._engine.remove, name)


class _Attached:
    """The line to a container over its attached streams: the supervisor's answers and, beside them, its last words."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._answers = bytearray()
        self._words = b""

    @classmethod
    async def over(cls, stream: socket.socket) -> _Attached:
        """Take over the socket."""
        return cls(*await asyncio.open_connection(sock=stream))

    async def readexactly(self, size: int) -> bytes:
        """See Transport."""
        while len(self._answers) < size:
            header = await self._reader.readexactly(8)  # stream, three zero bytes, length
            payload = await self._reader.readexactly(int.from_bytes(header[4:], "big"))
            if header[0] == STDOUT:
                self._answers += payload
            else:
                self._words = (self._words + payload)[-WORDS:]
        data = bytes(self._answers[:size])
        del self._answers[:size]
        return data

    async def write(self, data: bytes) -> None:
        """See Transport."""
        self._writer.write(data)
        await self._writer.drain()

    def words(self) -> str:
        """See Transport."""
        return self._words.decode(errors="replace").strip()

    def hang_up(self) -> None:
        """See Transport."""
        self._writer.close()


def _has_own_kernel(runtime: str | None) -> bool:
    return runtime is not None and runtime not in HOST_KERNEL


def _host_config(spec: BoxSpec, runtime: str | None) -> dict[str, Any]:
    limits, scratch = spec.limits, Scratch.of(spec.limits, spec.role)
    owned = f"mode=0755,uid={POLICY_UID},gid={POLICY_UID}"

    def memory(size: int, rights: str) -> str:
        return f"rw,nosuid,nodev,exec,size={size},nr_inodes={max(64, size // BYTES_PER_INODE)},{rights}"

    owned_by_examiner = f"mode=0755,uid={EXAMINER_UID},gid={EXAMINER_UID}"
    judging = {path: memory(scratch.judging, owned_by_examiner) for path in JUDGING if spec.role == "verifier"}

    return {
        "network_mode": "none",
        "ipc_mode": "private",
        "cap_drop": ["ALL"],
        "cap_add": list(CAPABILITIES),
        "security_opt": ["no-new-privileges:true"],
        "read_only": True,
        "tmpfs": {
            spec.workspace: memory(scratch.workspace, owned),
            "/tmp": memory(scratch.tmp, "mode=1777"),
            **judging,
        },
        "shm_size": scratch.shm,
        "runtime": runtime,
        "pids_limit": limits.processes + (OWN_THREADS if _has_own_kernel(runtime) else 1),  # and the supervisor
        "mem_limit": limits.memory_bytes,
        "memswap_limit": limits.memory_bytes,  # memory and swap together: no swap
        "nano_cpus": int(limits.cpus * 1e9),
        "auto_remove": True,
        "log_config": LogConfig(type="none"),
    }


def plain_client(socket_path: str) -> docker.DockerClient:
    """The package's own client, as people use it: for measuring against. Raises SandboxError."""
    with _engine_errors(f"connecting to {socket_path}"):
        return docker.DockerClient(base_url=f"unix://{socket_path}", timeout=CALL_S)


def _way_out(folder: str | None) -> dict[str, Any]:
    """The one host folder that a box with a network sees, until its supervisor has started."""
    mount = Mount(BOX_FOLDER, folder, type="bind", read_only=True)
    return {} if folder is None else {"mounts": [mount]}


@contextlib.contextmanager
def _engine_errors(doing: str) -> Iterator[None]:
    try:
        yield
    except (DockerException, RequestException) as error:
        away = isinstance(error, RequestException) and not isinstance(error, APIError)  # an APIError is an answer
        raise (EngineAway if away else SandboxError)(f"the Docker engine failed while {doing}: {error}") from error
