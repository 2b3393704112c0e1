"""In the box: one number for everything that the policy could have written, the same for the same state.

It covers the path, kind, mode and content of every entry below the writable directories, and nothing that differs
between two boxes with the same content: no times, no inode numbers, no order of creation, no holes in files.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
import struct
import time
from collections.abc import Iterator
from typing import Any

from palestra.envs.sandboxes.inbox_policy import Policy

BLOCK = 1 << 16
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK


def digest(roots: dict[str, Any], policy: Policy, deadline: float) -> str:
    """Hexadecimal sha256 of the state. Raises ValueError when there is too much to read before the deadline.

    No process of the policy lives meanwhile, so nothing moves; modes that are in the way are opened and put back.
    """
    total = hashlib.sha256()
    with policy.acting():
        for root in sorted(roots):
            facts = os.stat(root)
            _add(total, b"root", os.fsencode(root), b"%o" % facts.st_mode)
            with _opened_up(root, None, facts):
                _walk(os.open(root, FOLDER), total, deadline)
    return total.hexdigest()


def _walk(folder: int, total: Any, deadline: float) -> None:
    """Add everything below `folder`, in the order of the names, with two descriptors whatever the depth.

    Takes the descriptor over. On the way back the parent is "..", since long paths could not be opened.
    """
    levels = [_names(folder)]  # what is left to visit in each directory on the way down
    modes: list[int] = []  # those of the directories below the root, to be put back
    try:
        while levels:
            if not levels[-1]:
                levels.pop()
                total.update(b"up")
                if levels:
                    folder = _leave(folder, modes.pop())
                continue
            if time.monotonic() > deadline:
                raise ValueError("there is more in the box than could be read in time")
            name = levels[-1].pop()
            facts = os.stat(name, dir_fd=folder, follow_symlinks=False)
            _add(total, b"entry", os.fsencode(name), b"%o" % facts.st_mode)
            if stat.S_ISDIR(facts.st_mode):
                modes.append(stat.S_IMODE(facts.st_mode))
                if facts.st_mode & 0o700 != 0o700:
                    os.chmod(name, modes[-1] | 0o700, dir_fd=folder)
                inner = os.open(name, FOLDER, dir_fd=folder)
                os.close(folder)
                folder = inner
                levels.append(_names(folder))
            elif stat.S_ISREG(facts.st_mode):
                with _opened_up(name, folder, facts):
                    _add_file(name, folder, total, deadline)
            elif stat.S_ISLNK(facts.st_mode):
                _add(total, b"link", os.fsencode(os.readlink(name, dir_fd=folder)))
    finally:
        while modes:
            folder = _leave(folder, modes.pop())
        os.close(folder)


def _names(folder: int) -> list[str]:
    """In reverse, since they are taken from the end."""
    return sorted(os.listdir(folder), key=os.fsencode, reverse=True)


def _leave(folder: int, mode: int) -> int:
    parent = os.open("..", FOLDER, dir_fd=folder)
    if stat.S_IMODE(os.fstat(folder).st_mode) != mode:
        os.fchmod(folder, mode)
    os.close(folder)
    return parent


@contextlib.contextmanager
def _opened_up(name: str, folder: int | None, facts: os.stat_result) -> Iterator[None]:
    """The owner may read (and list) in here, whatever the policy has set."""
    needed = 0o700 if stat.S_ISDIR(facts.st_mode) else 0o400
    mode = stat.S_IMODE(facts.st_mode)
    if mode & needed == needed:
        yield
        return
    os.chmod(name, mode | needed, dir_fd=folder)
    try:
        yield
    finally:
        os.chmod(name, mode, dir_fd=folder)


def _add_file(name: str, folder: int, total: Any, deadline: float) -> None:
    """The length, and the blocks that are not all zero: a file of holes takes no longer than what it really holds."""
    fd = os.open(name, FILE, dir_fd=folder)
    try:
        size = os.fstat(fd).st_size
        _add(total, b"file", b"%d" % size)
        at = 0
        while (at := _data_from(fd, at, size)) < size:
            block = os.pread(fd, BLOCK, at)
            if block.count(0) != len(block):
                _add(total, b"%d" % at, block)
            at += BLOCK
            if time.monotonic() > deadline:
                raise ValueError("there is more in the box than could be read in time")
    finally:
        os.close(fd)


def _data_from(fd: int, at: int, size: int) -> int:
    """Where the next block with data begins, at or after `at`; `size` at the end."""
    if at >= size:
        return size
    try:
        return os.lseek(fd, at, os.SEEK_DATA) // BLOCK * BLOCK
    except OSError as error:
        if error.errno == errno.ENXIO:  # nothing but a hole
            return size
        raise


def _add(total: Any, *parts: bytes) -> None:
    for part in parts:
        total.update(struct.pack(">Q", len(part)) + part)
