"""In the box: everything that can be written, as a stream of records that makes the same state again.

A record is a JSON header after its length, and for blocks of a file raw bytes. The tree is told by going down and up,
so that no path is ever written out; times and hard links are not kept: two names of one file become two files.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import struct
from collections.abc import Callable
from typing import Any

from palestra.envs.sandboxes.inbox_line import Pieces
from palestra.envs.sandboxes.inbox_policy import Policy
from palestra.envs.sandboxes.inbox_walk import FILE, FOLDER, Bounds, Entry, data_blocks, opened_up, walk

LENGTH = struct.Struct(">I")
KEPT_KINDS = (stat.S_IFIFO, stat.S_IFSOCK)  # without a process behind them they are only names

Take = Callable[[int], bytes]
"""The next bytes of a stream, as many as asked for."""


class Snapshot:
    """Writes the records, at most `max_bytes` of them."""

    def __init__(self, pieces: Pieces, max_bytes: int, until: float) -> None:
        self.pieces = pieces
        self.max_bytes = max_bytes
        self.left = max_bytes
        self.bounds = Bounds(until)

    def take(self, roots: dict[str, Any], policy: Policy) -> None:
        """All of it. Raises ValueError when it is too large, or something in it cannot be made again."""
        with policy.acting():
            for root in sorted(roots):
                facts = os.stat(root)
                self._add({"root": root, "mode": stat.S_IMODE(facts.st_mode)})
                with opened_up(root, None, facts), contextlib.closing(walk(os.open(root, FOLDER), self.bounds)) as all_:
                    for entry in all_:
                        self._take(entry)
        self._add({"end": True})
        self.pieces.flush()

    def _take(self, entry: Entry | None) -> None:
        if entry is None:
            self._add({"up": True})
            return
        name, mode = entry.name, stat.S_IMODE(entry.facts.st_mode)
        kind = stat.S_IFMT(entry.facts.st_mode)
        if kind == stat.S_IFDIR:
            self._add({"folder": name, "mode": mode})
        elif kind == stat.S_IFLNK:
            self._add({"link": name, "target": os.readlink(name, dir_fd=entry.folder)})
        elif kind == stat.S_IFREG:
            self._take_file(entry, mode)
        elif kind in KEPT_KINDS:
            self._add({"special": name, "kind": kind, "mode": mode})
        else:
            raise ValueError(f"{name!r} is a device, which cannot be made again in another box")

    def _take_file(self, entry: Entry, mode: int) -> None:
        size = entry.facts.st_size
        self._add({"file": entry.name, "mode": mode, "size": size})
        with opened_up(entry.name, entry.folder, entry.facts):
            fd = os.open(entry.name, FILE, dir_fd=entry.folder)
        try:
            for at, block in data_blocks(fd, size, self.bounds):
                self._add({"at": at, "length": len(block)}, block)
        finally:
            os.close(fd)
        self._add({"closed": True})

    def _add(self, header: dict[str, Any], data: bytes = b"") -> None:
        head = json.dumps(header).encode()
        self.left -= LENGTH.size + len(head) + len(data)
        if self.left < 0:
            raise ValueError(f"the snapshot is larger than {self.max_bytes} bytes")
        self.pieces.add(LENGTH.pack(len(head)) + head + data)


class Restoring:
    """Makes from the records what they tell, in directories that are empty. `take` yields the stream."""

    def __init__(self, take: Take) -> None:
        self.take = take

    def put(self, roots: dict[str, Any], policy: Policy) -> None:
        """All of it. Raises ValueError when the stream is not a snapshot of such roots, OSError."""
        while "root" in (header := self._next()):
            root = header["root"]
            if root not in roots:
                raise ValueError(f"the snapshot has a directory {root!r}, which this box does not have")
            with policy.acting():
                self._put_tree(os.open(root, FOLDER))
                if stat.S_IMODE(os.stat(root).st_mode) != header["mode"]:
                    os.chmod(root, header["mode"])  # the owner keeps a set-group bit, which the supervisor may not set
        if "end" not in header:
            raise ValueError(f"the snapshot goes on with {sorted(header)}, expected a directory or its end")

    def _put_tree(self, folder: int) -> None:
        """Takes the descriptor over. A directory gets its mode when it is left: it may forbid what goes into it."""
        modes: list[int] = []
        try:
            while True:
                header = self._next()
                if "up" not in header:
                    folder = self._put(header, folder, modes)
                elif modes:
                    parent = os.open("..", FOLDER, dir_fd=folder)
                    os.fchmod(folder, modes.pop())
                    os.close(folder)
                    folder = parent
                else:
                    return
        finally:
            os.close(folder)

    def _put(self, header: dict[str, Any], folder: int, modes: list[int]) -> int:
        """Make one entry; the directory to go on in."""
        if "folder" in header:
            os.mkdir(header["folder"], 0o700, dir_fd=folder)
            modes.append(header["mode"])
            inner = os.open(header["folder"], FOLDER, dir_fd=folder)
            os.close(folder)
            return inner
        if "link" in header:
            os.symlink(header["target"], header["link"], dir_fd=folder)
        elif "special" in header:
            os.mknod(header["special"], header["kind"] | 0o600, dir_fd=folder)
            os.chmod(header["special"], header["mode"], dir_fd=folder)
        else:
            self._put_file(header, folder)
        return folder

    def _put_file(self, header: dict[str, Any], folder: int) -> None:
        fd = os.open(header["file"], os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=folder)
        try:
            os.ftruncate(fd, header["size"])
            while "at" in (block := self._next()):
                rest = memoryview(self.take(block["length"]))
                at = block["at"]
                while rest:
                    written = os.pwrite(fd, rest, at)
                    rest, at = rest[written:], at + written
            os.fchmod(fd, header["mode"])
        finally:
            os.close(fd)

    def _next(self) -> dict[str, Any]:
        header: dict[str, Any] = json.loads(self.take(*LENGTH.unpack(self.take(LENGTH.size))))
        return header
