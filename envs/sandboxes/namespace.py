"""Boxes made of kernel namespaces with bubblewrap, for machines without a container engine.

The box sees the host's /usr, read-only, and nothing else of it. Started by root, the policy is a user of its own, as in
a container; started by an ordinary user there is only one user to give, so the supervisor hides from it instead, and
the kernel keeps process 1 of a process namespace from being signalled. What cannot be enforced is in `unenforced`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
from typing import Literal

from palestra.envs.errors import ConfigError, SandboxError
from palestra.envs.sandboxes import cgroups
from palestra.envs.sandboxes.channel import SUPERVISOR_ARGV
from palestra.envs.sandboxes.contract import BoxSpec, Limits
from palestra.envs.sandboxes.egress import BOX_FOLDER, Gate
from palestra.envs.sandboxes.inbox_seccomp import filter_program
from palestra.envs.sandboxes.owner import Owner
from palestra.envs.sandboxes.supervised import (
    EXAMINER_UID,
    JUDGING,
    POLICY_UID,
    WORKSPACE,
    Lease,
    Scratch,
    SupervisedSandbox,
)
from palestra.envs.sandboxes.waiting import to_the_end

CAPABILITIES = ("CAP_KILL", "CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_CHOWN", "CAP_SETUID", "CAP_SETGID")
USERS = {
    "/etc/passwd": f"root:x:0:0:root:/:/bin/sh\nnobody:x:{POLICY_UID}:{POLICY_UID}:nobody:{WORKSPACE}:/bin/sh\n"
    f"examiner:x:{EXAMINER_UID}:{EXAMINER_UID}:examiner:/logs:/bin/sh\n",
    "/etc/group": f"root:x:0:\nnogroup:x:{POLICY_UID}:\nexaminer:x:{EXAMINER_UID}:\n",
}
ENTER_GROUPS = 'while [ "$1" != -- ]; do echo $$ > "$1" || exit 1; shift; done; shift; exec "$@"'
END_S = 5.0
WORDS = 2000


class NamespaceBackend:
    """Makes boxes with bubblewrap. Raises ConfigError at once when the machine does not let it."""

    name = "namespace"

    def __init__(
        self, *, run: str, owner: Owner | None = None, lease: Lease | None = None, grace_s: float = 10.0
    ) -> None:
        bwrap = shutil.which("bwrap")
        if bwrap is None:
            raise ConfigError("sandbox namespace: no `bwrap` on the PATH; install bubblewrap")
        self._bwrap = bwrap
        self._root = os.geteuid() == 0
        self._sized = "--size" in _said([bwrap, "--help"])
        self._grouped = cgroups.available()
        self.unenforced = self._unenforced()
        self._run = run
        self._owner = owner or Owner.this_process()
        self._lease = lease or Lease()
        self._grace_s = grace_s
        self._open: set[str] = set()
        self._try()

    async def open(self, spec: BoxSpec, *, episode: str) -> SupervisedSandbox:
        """A new box. Leaves nothing behind when it fails or is cancelled. Raises SandboxError."""
        if spec.image is not None:
            raise SandboxError(
                f"a namespace box has the host's /usr, not the image {spec.image}; use the docker sandbox"
            )
        run = re.sub("[^a-zA-Z0-9_.]", "-", self._run)[:40]
        name = f"palestra-{run}-{secrets.token_hex(6)}"
        self._open.add(name)
        group, process, opened = None, None, False
        gate = Gate(name, spec.network, self._owner) if spec.network else None
        try:
            if self._grouped:
                group = cgroups.create(name, self._owner, spec.limits)
            process = await to_the_end(_Process.start(self._argv(spec.limits, group, gate, spec.role, spec.workspace)))
            remove = functools.partial(self._remove, name, process, group)
            box = SupervisedSandbox(
                name,
                process,
                remove,
                grace_s=self._grace_s,
                lease=self._lease,
                gate=gate,
                role=spec.role,
                workspace=spec.workspace,
            )
            await box.start(spec.limits, rlimits=self._rlimits(spec.limits))
            process.hold()
            opened = True
            return box
        finally:
            if not opened:
                if gate is not None:
                    gate.close()
                await to_the_end(self._remove(name, process, group))

    async def owned(self) -> list[str]:
        """The boxes that this backend has made and that still exist."""
        return sorted(self._open)

    async def sweep(self) -> None:
        """Nothing to do: a box is a process of ours, so none is unknown to us."""

    def _argv(
        self,
        limits: Limits,
        group: cgroups.Group | None,
        gate: Gate | None = None,
        role: Literal["policy", "verifier"] = "policy",
        workspace: str = WORKSPACE,
    ) -> list[str]:
        scratch = Scratch.of(limits, role)
        judging = [(path, scratch.judging) for path in JUDGING] if role == "verifier" else []
        argv = [self._bwrap, "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
        argv += ["--hostname", "box", "--die-with-parent", "--new-session", "--as-pid-1", "--cap-drop", "ALL"]
        if self._root:
            for capability in CAPABILITIES:
                argv += ["--cap-add", capability]
        else:
            argv += ["--unshare-user", "--uid", str(POLICY_UID), "--gid", str(POLICY_UID)]
        argv += [*_host_files(), "--proc", "/proc", "--dev", "/dev"]
        for path, size in ((workspace, scratch.workspace), ("/tmp", scratch.tmp), ("/dev/shm", scratch.shm), *judging):
            argv += [*(("--size", str(size)) if self._sized else ()), "--tmpfs", path]
        if group is not None:
            for folder in ("/sys", "/sys/fs", f"{cgroups.ROOT}"):
                argv += ["--perms", "0755", "--dir", folder]
            argv += ["--ro-bind", str(group.memory_folder), f"{cgroups.ROOT}/memory"]
        if gate is not None:
            argv += ["--perms", "0755", "--dir", "/run", "--ro-bind", str(gate.folder), BOX_FOLDER]
        argv += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/", "--", *SUPERVISOR_ARGV]
        return argv if group is None else ["/bin/sh", "-c", ENTER_GROUPS, "sh", *group.entrances, "--", *argv]

    def _rlimits(self, limits: Limits) -> dict[str, int]:
        """What stands in for a control group: per process, and per user where the user is the box's own."""
        if self._grouped:
            return {}
        return {"AS": limits.memory_bytes} | ({} if self._root else {"NPROC": limits.processes + 1})

    def _unenforced(self) -> tuple[str, ...]:
        gaps = []
        if not self._sized:
            gaps.append("scratch_bytes: this bwrap cannot size a file system; only single files are limited")
        if not self._grouped:
            gaps.append("memory_bytes: of each process, not of the box; a kill for memory is not told from another")
            gaps.append("cpus: no control group can be made here")
            if self._root:
                gaps.append("processes: no control group can be made here")
        if filter_program(os.uname().machine) is None:
            gaps.append(f"seccomp: no filter for {os.uname().machine}")
        if not self._root:
            gaps.append("user: commands run as the user of their supervisor, which hides from them")
        return tuple(gaps)

    def _try(self) -> None:
        """A box that runs one program shows whether namespaces are allowed here."""
        argv = self._argv(Limits(), None)
        trial = [*argv[: argv.index("--")], "--", "python3", "-I", "-S", "-c", ""]
        result = subprocess.run(trial, capture_output=True, timeout=60, check=False, env={})
        if result.returncode != 0:
            raise ConfigError(f"sandbox namespace: bwrap cannot make a box here: {result.stderr.decode().strip()}")

    async def _remove(self, name: str, process: _Process | None, group: cgroups.Group | None) -> None:
        if process is not None:
            await process.end()
        if group is not None:
            await asyncio.to_thread(group.remove)
        self._open.discard(name)


class _Process:
    """A running bubblewrap, the line to the supervisor in it, and a hold on that supervisor itself."""

    def __init__(self, process: asyncio.subprocess.Process, words: int, info: int) -> None:
        assert process.stdin is not None, "it was asked for as a pipe"
        assert process.stdout is not None, "it was asked for as a pipe"
        self._process = process
        self._reader, self._writer = process.stdout, process.stdin
        self._words_fd, self._info_fd = words, info
        self._inner: int | None = None  # a descriptor of the supervisor's process

    @classmethod
    async def start(cls, argv: list[str]) -> _Process:
        """Start it. Raises SandboxError."""
        pipe = asyncio.subprocess.PIPE
        words = os.memfd_create("words")
        info, told = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        users = {path: _memory_file(text) for path, text in USERS.items()}
        made = ["--info-fd", str(told)]
        for path, fd in users.items():
            made += ["--perms", "0644", "--file", str(fd), path]
        at = argv.index("--proc")
        try:
            process = await asyncio.create_subprocess_exec(
                *argv[:at],
                *made,
                *argv[at:],
                stdin=pipe,
                stdout=pipe,
                stderr=words,
                pass_fds=[told, *users.values()],
                start_new_session=True,
                env={},
            )
        except OSError as error:
            os.close(words)
            os.close(info)
            raise SandboxError(f"cannot start bwrap: {error}") from error
        finally:
            for fd in (told, *users.values()):
                os.close(fd)
        return cls(process, words, info)

    def hold(self) -> None:
        """Once the supervisor has spoken: take hold of its process, so that its end can be seen and enforced."""
        self._inner = os.pidfd_open(int(json.loads(os.read(self._info_fd, 4096))["child-pid"]))

    async def readexactly(self, size: int) -> bytes:
        """See Transport."""
        return await self._reader.readexactly(size)

    async def write(self, data: bytes) -> None:
        """See Transport."""
        self._writer.write(data)
        await self._writer.drain()

    def words(self) -> str:
        """See Transport."""
        size = os.fstat(self._words_fd).st_size
        return os.pread(self._words_fd, WORDS, max(0, size - WORDS)).decode(errors="replace").strip()

    def hang_up(self) -> None:
        """See Transport."""
        self._writer.close()

    async def end(self) -> None:
        """See that it ends, now that its input has; kill what does not. Raises SandboxError when that fails."""
        self.hang_up()
        for kill in (False, True):
            if kill:
                with contextlib.suppress(ProcessLookupError):
                    self._process.kill()
                    if self._inner is not None:
                        signal.pidfd_send_signal(self._inner, signal.SIGKILL)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(END_S):
                    await self._process.wait()
                    if self._inner is not None:
                        await _readable(self._inner)
                    for fd in (self._words_fd, self._info_fd, self._inner):
                        if fd is not None:
                            os.close(fd)
                    return
        raise SandboxError(f"process {self._process.pid} of a box is still there after SIGKILL")


async def _readable(fd: int) -> None:
    """Wait until there is something to read; of a process's descriptor, until the process has ended."""
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(fd, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(fd)


def _host_files() -> list[str]:
    """The programs and libraries of the host, and users that are not the host's."""
    argv = ["--ro-bind", "/usr", "/usr"]
    for path in ("/bin", "/sbin", "/lib", "/lib32", "/lib64"):
        if os.path.islink(path):
            argv += ["--symlink", os.readlink(path), path]
        elif os.path.isdir(path):
            argv += ["--ro-bind", path, path]
    argv += ["--perms", "0755", "--dir", "/etc"]
    for path in ("/etc/alternatives", "/etc/ld.so.cache"):
        argv += ["--ro-bind-try", path, path]
    return argv


def _memory_file(text: str) -> int:
    fd = os.memfd_create("users")
    os.write(fd, text.encode())
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _said(argv: list[str]) -> str:
    result = subprocess.run(argv, capture_output=True, timeout=20, check=False)
    return (result.stdout + result.stderr).decode(errors="replace")
