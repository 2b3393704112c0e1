"""In the box: one command from its start to the last process it left behind."""

from __future__ import annotations

import contextlib
import errno
import os
import posixpath
import select
import signal
import socket
import time
from collections.abc import Iterator
from typing import Any

from palestra.envs.sandboxes.inbox_line import BoxBrokenError, Kept, Line, end
from palestra.envs.sandboxes.inbox_policy import Policy

SWEEP_S = 5.0
OOM_COUNTERS = ("/sys/fs/cgroup/memory/memory.oom_control", "/sys/fs/cgroup/memory.events")  # cgroup v1, v2


class Spool:
    """Hands a long stream on to the host, up to a number of bytes; it is kept there, out of the policy's reach."""

    def __init__(self, line: Line, stream: int, size: int) -> None:
        self.line = line
        self.stream = stream
        self.left = size

    def add(self, data: bytes) -> None:
        """More of it."""
        if self.left:
            self.line.send({"part": self.stream}, data[: self.left])
            self.left -= min(self.left, len(data))


class Commands:
    """Starts the policy's commands and ends them. Needs to be process 1, whose children all orphans become."""

    def __init__(self, config: dict[str, Any], line: Line, policy: Policy) -> None:
        self.line = line
        self.policy = policy
        self.workspace: str = config["workspace"]
        self.output_bytes: int = config["output_bytes"]
        self.spool_bytes: int = config["spool_bytes"]
        self.env: dict[str, str] = config["env"]
        self.oom_fd = next((os.open(path, os.O_RDONLY) for path in OOM_COUNTERS if os.path.exists(path)), None)
        self.wake, wake_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake_end, warn_on_full_buffer=False)

    def run(self, header: dict[str, Any], stdin: bytes) -> tuple[dict[str, Any], bytes]:
        """Run one command to its end or its limit, then kill what is left of it."""
        began = time.monotonic()
        oom_before = self._oom_kills()
        with contextlib.ExitStack() as opened:
            kept: dict[int, Kept] = {}
            spools = [Spool(self.line, stream, self.spool_bytes) for stream in range(2)]
            with contextlib.ExitStack() as given:
                fds = [_stdin(stdin)]
                given.callback(os.close, fds[0])
                for spool in spools:
                    reader, writer = os.pipe2(os.O_CLOEXEC)
                    opened.callback(os.close, reader)
                    given.callback(os.close, writer)
                    os.set_blocking(reader, False)
                    kept[reader] = Kept(self.output_bytes, spool.add)
                    fds.append(writer)
                joined = [given.enter_context(end) for end in socket.socketpair()] if header["beside"] else []
                pid, status = self._start(header, [*fds, *(end.fileno() for end in joined[:1])])
                if joined:
                    self._start_beside(header, joined[1].fileno())
            if status is None:
                status = self._follow(pid, began + header["timeout_s"], kept)
            late = status is None
            survivors, ended = self.sweep(pid)
            for reader, stream in kept.items():  # what is still in the pipes; nobody writes to them any more
                with contextlib.suppress(BlockingIOError):
                    while stream.take(reader):
                        pass
        facts = _outcome(ended if status is None else status, late, list(kept.values()))
        facts["out_of_memory"] = self._oom_kills() > oom_before
        facts["survivors"] = survivors
        facts["seconds"] = time.monotonic() - began
        return facts, b"".join(stream.parts()[0] for stream in kept.values())

    def _start_beside(self, header: dict[str, Any], joined: int) -> None:
        """The second command, which says nothing to anyone but over the socket; one that cannot start hangs up."""
        null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
        try:
            self._start({**header, "argv": header["beside"], "user": "policy"}, [null, null, null, joined])
        finally:
            os.close(null)

    def _start(self, header: dict[str, Any], fds: list[int]) -> tuple[int, int | None]:
        """The new process; or 0 and a wait status as of a shell that could not start it, and why on its stderr.

        Spawned, not forked: no page of this process is copied, which takes a third of the time.
        """
        argv, env = header["argv"], {**self.env, **header["env"]}
        cwd = posixpath.join(self.workspace, header["cwd"] or "")
        try:
            with self.policy.lending(header["user"]):
                os.chdir(cwd)
                pid = os.posix_spawn(
                    _program(argv, env),
                    argv,
                    env,
                    file_actions=[(os.POSIX_SPAWN_DUP2, source, target) for target, source in enumerate(fds)],
                    setsid=True,
                    setsigdef=(signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT),  # python ignores these
                )
        except (OSError, ValueError) as error:
            if isinstance(error, OSError) and error.errno in (errno.EAGAIN, errno.ENOMEM):
                raise
            what = error.strerror if isinstance(error, OSError) else error
            os.write(fds[2], f"cannot run {argv[:1]} in {cwd!r}: {what}"[:2000].encode(errors="replace") + b"\n")
            missing = isinstance(error, (FileNotFoundError, NotADirectoryError))
            return 0, (127 if missing else 126) << 8
        finally:
            os.chdir("/")
        return pid, None

    def _follow(self, pid: int, deadline: float, streams: dict[int, Kept]) -> int | None:
        """Read the streams until the command has exited; its wait status, or None at the deadline."""
        poller = select.poll()
        for fd in (0, self.wake, *streams):
            poller.register(fd, select.POLLIN)
        while (left_s := deadline - time.monotonic()) > 0:
            for fd, _ in poller.poll(min(left_s, self.line.left()) * 1000 + 1):
                if fd == self.wake:
                    self._drain_wake()
                    for reaped, status in self._reap():
                        if reaped == pid:
                            return status
                elif fd == 0:
                    header, _ = self.line.receive()
                    if header["do"] != "beat":
                        end(f"{header['do']!r} was asked for during a command")
                elif not streams[fd].take(fd):
                    poller.unregister(fd)
        return None

    def sweep(self, main: int | None = None) -> tuple[int, int | None]:
        """Kill every process of the box but this one, until the kernel says that none is left.

        Returns how many were killed, and the wait status of `main` if it was still to be collected.
        """
        killed, main_status = 0, None
        deadline = time.monotonic() + SWEEP_S
        while True:
            alive = False
            for pid, status in self._reap():
                alive = alive or pid == 0
                if pid and pid == main:
                    main_status = status
                elif pid and os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
                    killed += 1
            if not alive:
                return killed, main_status
            if time.monotonic() > deadline:
                raise BoxBrokenError(f"processes are left {SWEEP_S:g} s after SIGKILL")
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)
            select.select([self.wake], [], [], 0.01)
            self._drain_wake()

    def _reap(self) -> Iterator[tuple[int, int]]:
        """Processes that have ended and were not collected yet: (pid, wait status); a last (0, 0) if others live."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                yield pid, status
                if pid == 0:
                    return

    def _drain_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self.wake, 512)

    def _oom_kills(self) -> int:
        """How often the kernel has killed for memory in this box; always 0 where nothing tells."""
        if self.oom_fd is None:
            return 0
        words = os.pread(self.oom_fd, 512, 0).split()
        return int(words[words.index(b"oom_kill") + 1]) if b"oom_kill" in words else 0


def _program(argv: list[str], env: dict[str, str]) -> str:
    """The file that a shell would run for `argv`, as the policy may find it."""
    name = argv[0] if argv else ""
    if "/" in name or "\0" in name:
        return name
    denied = False
    for folder in env.get("PATH", "").split(":") if name else ():
        path = posixpath.join(folder or ".", name)
        if os.path.isfile(path):
            if os.access(path, os.X_OK):
                return path
            denied = True
    if denied:
        raise PermissionError(errno.EACCES, "Permission denied", name)
    raise FileNotFoundError(errno.ENOENT, "No such file or directory", name)


def _stdin(data: bytes) -> int:
    """A descriptor that yields `data` and then its end: nothing ever waits for input that will not come."""
    if not data:
        return os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
    fd = os.memfd_create("stdin", os.MFD_CLOEXEC)
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _outcome(status: int | None, late: bool, streams: list[Kept]) -> dict[str, Any]:
    """The facts of the kernel and the clock. A command that ended by itself at the last moment was in time."""
    killed = status is None or os.WIFSIGNALED(status)
    code = None if status is None or killed else os.WEXITSTATUS(status)
    number = os.WTERMSIG(status) if status is not None and killed else None
    kept = [stream.parts() for stream in streams]
    return {
        "exit_code": code,
        "signal": number,
        "timed_out": late and killed,
        "lengths": [len(data) for data, _ in kept],
        "cuts": [cut for _, cut in kept],
        "totals": [stream.total for stream in streams],
    }
