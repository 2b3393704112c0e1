"""In the box: one number for everything that the policy could have written, the same for the same state.

It covers the path, kind, mode and content of every entry below the writable directories, and nothing that differs
between two boxes with the same content: no times, no inode numbers, no order of creation, no holes in files.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import struct
from typing import Any

from palestra.envs.sandboxes.inbox_policy import Policy
from palestra.envs.sandboxes.inbox_walk import FILE, FOLDER, Bounds, Entry, data_blocks, opened_up, walk


def digest(roots: dict[str, Any], policy: Policy, deadline: float) -> str:
    """Hexadecimal sha256 of the state. Raises ValueError when there is too much to read before the deadline."""
    total, bounds = hashlib.sha256(), Bounds(deadline)
    with policy.acting():
        for root in sorted(roots):
            facts = os.stat(root)
            _add(total, b"root", os.fsencode(root), b"%o" % facts.st_mode)
            with opened_up(root, None, facts), contextlib.closing(walk(os.open(root, FOLDER), bounds)) as entries:
                for entry in entries:
                    _add_entry(total, entry, bounds)
    return total.hexdigest()


def _add_entry(total: Any, entry: Entry | None, bounds: Bounds) -> None:
    if entry is None:
        total.update(b"up")
        return
    mode = entry.facts.st_mode
    _add(total, b"entry", os.fsencode(entry.name), b"%o" % mode)
    if stat.S_ISREG(mode):
        with opened_up(entry.name, entry.folder, entry.facts):
            _add_file(entry.name, entry.folder, total, bounds)
    elif stat.S_ISLNK(mode):
        _add(total, b"link", os.fsencode(os.readlink(entry.name, dir_fd=entry.folder)))


def _add_file(name: str, folder: int, total: Any, bounds: Bounds) -> None:
    """The length, and the blocks that are not all zero."""
    fd = os.open(name, FILE, dir_fd=folder)
    try:
        size = os.fstat(fd).st_size
        _add(total, b"file", b"%d" % size)
        for at, block in data_blocks(fd, size, bounds):
            _add(total, b"%d" % at, block)
    finally:
        os.close(fd)


def _add(total: Any, *parts: bytes) -> None:
    for part in parts:
        total.update(struct.pack(">Q", len(part)) + part)
