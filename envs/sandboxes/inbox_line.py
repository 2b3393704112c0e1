"""In the box: the line to the host, and streams kept within a bound.

Every `inbox_*` module runs inside a box from source, with nothing but the standard library of python 3.9 or newer.

Frames travel on the supervisor's standard input and output, which no command inherits: two big-endian 32-bit lengths,
a JSON header, raw bytes. One request gets one reply, in order; a "beat" gets none and only says that the host lives.
What is long travels in pieces, so that neither side holds all of it: before a reply as frames of their own, each with
the number of its stream under "part", and after a request as raw bytes whose number is in its header.
"""

from __future__ import annotations

import json
import os
import select
import struct
import time
from collections.abc import Callable
from typing import Any, NoReturn

FRAME = struct.Struct(">II")
CHUNK = 1 << 16
PIECE = 1 << 18
SILENT = "nothing was heard from the host for the length of the lease, or the lifetime of the box is over"


class BoxBrokenError(Exception):
    """The box cannot do any more what it promises."""


def end(reason: str) -> NoReturn:
    """Leave; the kernel kills the rest of the box with its process 1."""
    os.write(2, f"palestra supervisor: {reason}\n".encode())
    os._exit(0)


class Line:
    """The frames from and to the host. Silence longer than the lease ends the box, so that nothing outlives a host."""

    def __init__(self) -> None:
        self.lease_s = 60.0
        self.ends_at = float("inf")
        self.heard_at = time.monotonic()
        os.set_blocking(1, False)

    def left(self) -> float:
        """Seconds until the box ends unless the host is heard before. Ends it when there are none."""
        left = min(self.heard_at + self.lease_s, self.ends_at) - time.monotonic()
        return left if left > 0 else end(SILENT)

    def receive(self) -> tuple[dict[str, Any], bytes]:
        """The next frame of the host."""
        head, body = FRAME.unpack(self.exactly(FRAME.size))
        header: dict[str, Any] = json.loads(self.exactly(head))
        return header, self.exactly(body)

    def send(self, header: dict[str, Any], body: bytes = b"") -> None:
        """Answer; a host that does not read it is a dead host."""
        head = json.dumps(header).encode()
        data = memoryview(FRAME.pack(len(head), len(body)) + head + body)
        while data:
            try:
                data = data[os.write(1, data) :]
            except BlockingIOError:
                select.select([], [1], [], self.left())
            except BrokenPipeError:
                end("the host is gone")

    def skip(self, size: int) -> None:
        """Pass over what the host still sends after a request."""
        while size:
            size -= len(self.exactly(min(size, PIECE)))

    def exactly(self, size: int) -> bytes:
        """The next bytes of the host, as many as that."""
        data = bytearray()
        while len(data) < size:
            if not select.select([0], [], [], self.left())[0]:
                continue
            chunk = os.read(0, min(size - len(data), 1 << 20))
            if not chunk:
                end("the host is gone")
            self.heard_at = time.monotonic()
            data += chunk
        return bytes(data)


class Pieces:
    """Sends bytes ahead of a reply, in frames of a sensible size."""

    def __init__(self, line: Line) -> None:
        self.line = line
        self.waiting = bytearray()

    def add(self, data: bytes) -> None:
        """More of them."""
        self.waiting += data
        if len(self.waiting) >= PIECE:
            self.flush()

    def flush(self) -> None:
        """Send what waits."""
        if self.waiting:
            self.line.send({"part": 0}, bytes(self.waiting))
            self.waiting.clear()


class Kept:
    """The first and the last bytes of a stream, and how long it was. Memory stays bounded whatever is written.

    Once the stream is longer than the limit, `spill` gets it from its first byte on, as it comes.
    """

    def __init__(self, limit: int, spill: Callable[[bytes], None]) -> None:
        self.limit = limit
        self.spill = spill
        self.tail_size = limit // 2
        self.head_size = limit - self.tail_size
        self.head, self.tail, self.total = bytearray(), bytearray(), 0

    def take(self, fd: int) -> bool:
        """Read a chunk; False at the end of the stream. Raises BlockingIOError when there is nothing to read."""
        chunk = os.read(fd, CHUNK)
        spilling = self.total > self.limit
        self.total += len(chunk)
        room = self.head_size - len(self.head)
        self.head += chunk[:room]
        self.tail += chunk[room:]
        if self.total > self.limit:
            self.spill(chunk if spilling else bytes(self.head + self.tail))  # nothing of the tail was dropped before
        if len(self.tail) > 2 * self.tail_size + CHUNK:
            del self.tail[: len(self.tail) - self.tail_size]
        return bool(chunk)

    def parts(self) -> tuple[bytes, list[int] | None]:
        """What was kept, and which bytes [from, to) of the stream are not in it."""
        tail = self.tail[max(0, len(self.tail) - self.tail_size) :]
        missing = self.total - len(self.head) - len(tail)
        return bytes(self.head + tail), [len(self.head), len(self.head) + missing] if missing else None
