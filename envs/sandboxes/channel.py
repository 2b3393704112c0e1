"""The host's side of the line to the supervisor in a box: one request at a time, and a deadline on every wait."""

from __future__ import annotations

import asyncio
import contextlib
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from palestra.envs.errors import SandboxError
from palestra.envs.sandboxes.contract import BoxClosed

FRAME = struct.Struct(">II")
MAX_FRAME = 256 * 2**20
PIECE = 2**20
START_S = 60.0
HANG_UP_S = 5.0
BYTES_PER_S = 4 * 2**20  # slower than any line, so that a big frame's deadline is never the line's fault
MODULES = (  # in the order in which they import each other
    "inbox_line",
    "inbox_policy",
    "inbox_seccomp",
    "inbox_walk",
    "inbox_files",
    "inbox_state",
    "inbox_digest",
    "inbox_export",
    "inbox_snapshot",
    "inbox_commands",
    "inbox_gate",
    "supervisor",
)
BOOTSTRAP = """\
import json, os, signal, sys, types
signal.signal(signal.SIGALRM, lambda *_: os._exit(1))
signal.alarm(60)
def take(size):
    data = b""
    while len(data) < size:
        data += os.read(0, size - len(data)) or os._exit(0)
    return data
for name, source in json.loads(take(int(take(8)))).items():
    module = sys.modules[name] = types.ModuleType(name)
    exec(compile(source, name, "exec"), module.__dict__)
module.main()
"""
SUPERVISOR_ARGV = ("python3", "-I", "-S", "-B", "-X", "utf8", "-c", BOOTSTRAP)
"""What a box runs as its first process. It takes its source, then its configuration, from its standard input."""


Part = Callable[[int, bytes], None]
"""Takes a piece of a stream, by the stream's number."""


class Transport(Protocol):
    """The bytes to and from a supervisor."""

    async def readexactly(self, size: int) -> bytes:
        """Raises EOFError or OSError when the box is gone."""
        ...

    async def write(self, data: bytes) -> None:
        """Raises OSError when the box is gone."""
        ...

    def hang_up(self) -> None:
        """Let go: the supervisor's input ends, at which it leaves, and whoever reads gets EOFError. Idempotent."""
        ...

    def words(self) -> str:
        """The last of what the supervisor has said about itself; for error messages."""
        ...


class Channel:
    """Requests and replies of one box. After a call that was cut short no reply is ever mistaken for another's."""

    def __init__(self, name: str, transport: Transport, *, grace_s: float, beat_s: float) -> None:
        self._name = name
        self._transport = transport
        self._grace_s = grace_s
        self._beat_s = beat_s
        self._lock = asyncio.Lock()
        self._sending = asyncio.Lock()  # no beat in the middle of a request
        self._broken: str | None = None
        self._gone = False
        self._beating: asyncio.Task[None] | None = None

    async def open(self, config: dict[str, Any]) -> dict[str, Any]:
        """Start the supervisor; what it says of itself. Raises SandboxError."""
        sources = json.dumps(_sources()).encode()
        first = b"%8d" % len(sources) + sources + _frame(config, b"")
        hello, _ = await self._exchange(first, START_S)
        if "error" in hello:
            raise SandboxError(f"{self._name}: {hello['message']}")
        self._beating = asyncio.create_task(self._beat())
        return hello

    async def call(
        self,
        header: dict[str, Any],
        body: bytes = b"",
        *,
        timeout_s: float,
        after: bytes = b"",
        part: Part | None = None,
    ) -> tuple[dict[str, Any], bytes]:
        """The reply to one request, waited for as long as the request may take and the grace.

        `after` goes behind the request, raw; its length is for the header to say. `part` gets the pieces that come
        before the reply. Raises BoxClosed when the box is gone and SandboxError when it is broken.
        """
        frame = _frame(header, body)
        async with self._lock:
            wait_s = timeout_s + self._grace_s + (len(frame) + len(after)) / BYTES_PER_S
            reply, data = await self._exchange(frame, wait_s, after, part)
        if reply.get("error") == "broken":
            self._broken = str(reply["message"])
            raise SandboxError(f"{self._name}: {self._broken}")
        return reply, data

    def check(self) -> None:
        """Raises what a call would raise at once: BoxClosed when the box is gone, SandboxError when it is broken."""
        if self._broken is not None and not self._lock.locked():
            raise (BoxClosed if self._gone else SandboxError)(f"{self._name}: {self._broken}")

    async def close(self, reason: str) -> None:
        """No more calls and no more beats; a call under way raises BoxClosed. Idempotent."""
        self._gone = True
        self._broken = self._broken or reason
        self._transport.hang_up()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HANG_UP_S), self._lock:
                self._broken = self._broken or reason  # not cleared by a reply that came at the same moment
        if self._beating is not None:
            self._beating.cancel()
            await asyncio.wait({self._beating})

    async def _exchange(
        self, frame: bytes, wait_s: float, after: bytes = b"", part: Part | None = None
    ) -> tuple[dict[str, Any], bytes]:
        if self._broken is not None:
            raise (BoxClosed if self._gone else SandboxError)(f"{self._name}: {self._broken}")
        self._broken = "a call was cut short, so the next reply could be its; close the box"
        try:
            async with asyncio.timeout(wait_s):
                async with self._sending:
                    await self._transport.write(frame)
                    for at in range(0, len(after), PIECE):
                        await self._transport.write(after[at : at + PIECE])
                reply, data = await self._receive()
                while "part" in reply:
                    if part is None:
                        raise EOFError("a piece that nobody asked for")
                    part(reply["part"], data)
                    reply, data = await self._receive()
        except TimeoutError as error:
            self._broken = f"no answer within {wait_s:.1f} s"
            raise SandboxError(f"{self._name}: {self._broken}") from error
        except (EOFError, OSError) as error:
            self._broken = "it was closed" if self._gone else f"the box is gone ({self._transport.words() or error})"
            self._gone = True
            raise BoxClosed(f"{self._name}: {self._broken}") from error
        self._broken = None
        return reply, data

    async def _receive(self) -> tuple[dict[str, Any], bytes]:
        head, size = FRAME.unpack(await self._transport.readexactly(FRAME.size))
        if head + size > MAX_FRAME:
            raise EOFError(f"a frame of {head + size} bytes, expected at most {MAX_FRAME}")
        header: dict[str, Any] = json.loads(await self._transport.readexactly(head))
        return header, await self._transport.readexactly(size)

    async def _beat(self) -> None:
        """Tell the box that we live; one that is gone shows at its next call."""
        beat = _frame({"do": "beat"}, b"")
        with contextlib.suppress(OSError):
            while True:
                await asyncio.sleep(self._beat_s)
                async with self._sending:
                    await self._transport.write(beat)


def _frame(header: dict[str, Any], body: bytes) -> bytes:
    head = json.dumps(header).encode()
    return FRAME.pack(len(head), len(body)) + head + body


def _sources() -> dict[str, str]:
    here, package = Path(__file__).parent, __name__.rpartition(".")[0]
    return {f"{package}.{name}": (here / f"{name}.py").read_text(encoding="utf-8") for name in MODULES}
