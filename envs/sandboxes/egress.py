"""The host's end of a box's way out: takes over a listening socket from inside the box and answers what comes to it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import socket
import struct
import tempfile
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from palestra.envs.errors import SandboxError
from palestra.envs.sandboxes.contract import Denial
from palestra.envs.sandboxes.egress_proxy import HEAD_BYTES, serve
from palestra.envs.sandboxes.egress_rules import AllowList, DeniedError
from palestra.envs.sandboxes.owner import Owner

log = logging.getLogger(__name__)
PREFIX = "palestra-gate-"
DOOR, BOX_FOLDER, PORT = "door", "/run/palestra", 3128
CONNECTIONS = 32  # of one box at once
DENIALS = 100  # the latest of an episode; no more are logged either
TAKE_S = 5.0
PROXY = f"http://127.0.0.1:{PORT}"
PROXY_ENV = {
    **dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), PROXY),
    **dict.fromkeys(("no_proxy", "NO_PROXY"), "localhost,127.0.0.1,::1"),
}
"""For the commands of such a box; programs that do not follow it have no network."""


class Gate:
    """The way out of one box. Its folder is shown to the box at `BOX_FOLDER` and is gone once the socket was taken."""

    def __init__(self, name: str, network: Sequence[str], owner: Owner) -> None:
        self.denials: deque[Denial] = deque(maxlen=DENIALS)
        self._name = name
        self._allowed = AllowList.of(network)
        self._clients: dict[asyncio.StreamWriter, asyncio.Task[None]] = {}
        self._server: asyncio.Server | None = None
        try:
            self.folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{owner.namespace}-{owner.pid}-{owner.started}-"))
            self._door = _listening(self.folder)
        except OSError as error:
            raise SandboxError(f"{name}: no way out can be made: {error}") from error

    async def open(self) -> None:
        """Take the socket that the supervisor hands over, and begin to answer. Cancel it when the box fails."""
        host, _ = await asyncio.get_running_loop().sock_accept(self._door)
        with host:
            listener = await asyncio.to_thread(_taken, host)
            self._lock_door()  # before the box looks at its mounts, which tell of it
            self._server = await asyncio.start_server(self._serve, sock=listener, limit=HEAD_BYTES)
            await asyncio.get_running_loop().sock_sendall(host, b"g")

    def drop(self) -> None:
        """End every connection at once, and forget the episode's denials."""
        for writer, task in self._clients.items():
            raw = writer.get_extra_info("socket")
            with contextlib.suppress(OSError):  # a reset: no half of the connection lingers in the box
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
            task.cancel()
        self.denials.clear()

    def close(self) -> None:
        """Let nothing through any more. Idempotent."""
        self._lock_door()
        self.drop()
        if self._server is not None:
            self._server.close()

    def _lock_door(self) -> None:
        self._door.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None, "a client is served in a task"
        if len(self._clients) < CONNECTIONS:
            self._clients[writer] = task
            try:
                await serve(reader, writer, self._allowed, self._audit)
            except asyncio.CancelledError:
                pass  # dropped; nobody waits for this task
            finally:
                del self._clients[writer]
        writer.close()

    def _audit(self, denied: DeniedError) -> None:
        if len(self.denials) < DENIALS:
            log.info("%s: no way to %r, port %d: %s", self._name, denied.host, denied.port, denied.reason)
        self.denials.append(Denial(denied.host, denied.port, denied.reason, denied.probe))


def abandoned() -> list[Path]:
    """Folders of gates whose owner died in the moment between making one and its box taking it."""
    us = Owner.this_process()
    found = []
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*-*-*-*"):
        namespace, pid, started, _ = folder.name.removeprefix(PREFIX).split("-", 3)
        if Owner(us.host, us.boot, namespace, int(pid), int(started)).alive is False:
            found.append(folder)
    return found


def remove(folder: Path) -> None:
    """Remove such a folder. Raises SandboxError."""
    try:
        shutil.rmtree(folder)
    except FileNotFoundError:
        return
    except OSError as error:
        raise SandboxError(f"{folder}: cannot be removed: {error}") from error


def _listening(folder: Path) -> socket.socket:
    """A door in the folder, whatever the length of its path. Raises OSError."""
    door = socket.socket(socket.AF_UNIX)
    fd = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    try:
        door.bind(f"/proc/self/fd/{fd}/{DOOR}")
    finally:
        os.close(fd)
    door.listen(1)
    door.setblocking(False)
    return door


def _taken(host: socket.socket) -> socket.socket:
    """The one socket that is handed over. Raises OSError."""
    host.settimeout(TAKE_S)
    _, fds, _, _ = socket.recv_fds(host, 1, 1)
    if not fds:
        raise OSError("the box handed no socket over; does its runtime pass descriptors?")
    os.set_inheritable(fds[0], False)
    listener = socket.socket(fileno=fds[0])
    listener.setblocking(False)
    host.setblocking(False)
    return listener
