"""What the commands of a box wrote beyond what was shown: on this host's disk, where no policy can reach it."""

from __future__ import annotations

import os
import secrets
import tempfile
from typing import Literal

STREAM_BYTES = 4 * 2**20  # kept of each stream of a command
COMMANDS = 4  # the last so many long ones; the file of a box never holds more
STREAMS = ("stdout", "stderr")

Stream = Literal["stdout", "stderr"]


class Spool:
    """One file without a name for each box that needs it, with a place for each stream of its last long commands.

    A full disk of ours costs the rest of an output, never a command. Close it.
    """

    def __init__(self) -> None:
        self._fd: int | None = None
        self._next = 0  # place for the next command
        self._sizes = [0, 0]  # of the streams of the command under way
        self._failed = False
        self._kept: dict[str, tuple[int, list[int]]] = {}  # handle -> place, sizes; the oldest first

    def take(self, stream: int, data: bytes) -> None:
        """More of a stream of the command under way."""
        if self._failed:
            return
        data = data[: STREAM_BYTES - self._sizes[stream]]
        try:
            if self._fd is None:
                self._fd = _nameless_file()
            if not any(self._sizes):  # now the oldest is overwritten
                self._kept = {handle: kept for handle, kept in self._kept.items() if kept[0] != self._next}
            self._sizes[stream] += os.pwrite(self._fd, data, _place(self._next, stream) + self._sizes[stream])
        except OSError:
            self._failed = True  # what comes later must not stand where this should

    def finish(self) -> str | None:
        """The command has ended: a handle that cannot be guessed; None when nothing of it was kept."""
        self._failed = False
        if not any(self._sizes):
            return None
        handle = secrets.token_hex(16)
        self._kept[handle] = (self._next, self._sizes)
        self._next = (self._next + 1) % COMMANDS
        self._sizes = [0, 0]
        return handle

    def read(self, handle: str, stream: Stream, start: int, stop: int) -> bytes:
        """Bytes [start, stop) of a stream. Raises KeyError for a handle that is not, or not any more, one of ours."""
        if handle not in self._kept or self._fd is None:
            raise KeyError(f"no output is kept under {handle!r}: only that of the last {COMMANDS} long commands is")
        place, sizes = self._kept[handle]
        number = STREAMS.index(stream)
        start, stop = max(0, start), min(stop, sizes[number])
        return os.pread(self._fd, stop - start, _place(place, number) + start) if start < stop else b""

    def clear(self) -> None:
        """Forget all of it."""
        self._kept.clear()
        self._sizes = [0, 0]
        self._failed = False
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    close = clear


def _nameless_file() -> int:
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _place(command: int, stream: int) -> int:
    return (2 * command + stream) * STREAM_BYTES
