"""In the box: everything below a directory, visited with two descriptors whatever the depth, and no link followed."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import stat
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
BLOCK = 1 << 16


class OverError(ValueError):
    """There is more than was asked for; which limit was passed, in words."""


@dataclass(frozen=True)
class Bounds:
    """How far to go: until a time of the monotonic clock, how many entries in all, how many directories deep."""

    until: float
    entries: int = 1 << 62
    depth: int = 1 << 62

    def check_time(self) -> None:
        """Raises OverError when the time is up."""
        if time.monotonic() > self.until:
            raise OverError("there is more in the box than could be read in time")


@dataclass(frozen=True)
class Entry:
    """A name in an open directory; the descriptor is good until the next entry is asked for."""

    name: str
    folder: int
    facts: os.stat_result


def walk(folder: int, bounds: Bounds) -> Generator[Entry | None, None, None]:
    """Every entry below `folder`, by name, a directory before what is in it; None where a directory ends.

    Takes the descriptor over. Modes that are in the way are opened and put back; no process of the policy lives
    meanwhile, so nothing moves. On the way back the parent is "..", since long paths could not be opened.
    Raises OverError. Close it when it is not used up.
    """
    left = bounds.entries
    levels: list[list[str]] = []  # what is left to visit in each directory on the way down
    modes: list[int] = []  # those of the directories below the first, to be put back
    try:
        levels.append(_names(folder, left))
        left -= len(levels[-1])
        while levels:
            if not levels[-1]:
                levels.pop()
                yield None
                if levels:
                    folder = _leave(folder, modes.pop())
                continue
            bounds.check_time()
            name = levels[-1].pop()
            facts = os.stat(name, dir_fd=folder, follow_symlinks=False)
            yield Entry(name, folder, facts)
            if stat.S_ISDIR(facts.st_mode):
                if len(levels) > bounds.depth:
                    raise OverError(f"directories are more than {bounds.depth} deep")
                folder = _enter(name, folder, facts, modes)
                levels.append(_names(folder, left))
                left -= len(levels[-1])
    finally:
        while modes:
            folder = _leave(folder, modes.pop())
        os.close(folder)


@contextlib.contextmanager
def opened_up(name: str, folder: int | None, facts: os.stat_result) -> Iterator[None]:
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


def data_blocks(fd: int, size: int, bounds: Bounds) -> Iterator[tuple[int, bytes]]:
    """The blocks that are not all zero, with their places: a file of holes takes as long as what it holds."""
    at = 0
    while (at := _data_from(fd, at, size)) < size:
        block = os.pread(fd, BLOCK, at)
        if block.count(0) != len(block):
            yield at, block
        at += BLOCK
        bounds.check_time()


def _enter(name: str, folder: int, facts: os.stat_result, modes: list[int]) -> int:
    mode = stat.S_IMODE(facts.st_mode)
    modes.append(mode)
    try:
        if mode & 0o700 != 0o700:
            os.chmod(name, mode | 0o700, dir_fd=folder)
        inner = os.open(name, FOLDER, dir_fd=folder)
    except OSError:
        modes.pop()
        raise
    os.close(folder)
    return inner


def _leave(folder: int, mode: int) -> int:
    parent = os.open("..", FOLDER, dir_fd=folder)
    if stat.S_IMODE(os.fstat(folder).st_mode) != mode:
        os.fchmod(folder, mode)
    os.close(folder)
    return parent


def _names(folder: int, most: int) -> list[str]:
    """In reverse, since they are taken from the end. Raises OverError instead of holding more than `most`."""
    with os.scandir(folder) as entries:
        names = [entry.name for entry in itertools.islice(entries, most + 1)]
    if len(names) > most:
        raise OverError("there are more entries than may be visited")
    return sorted(names, key=os.fsencode, reverse=True)


def _data_from(fd: int, at: int, size: int) -> int:
    """Where the next block with data begins, at or after `at`; `size` at the end."""
    if at >= size:
        return size
    try:
        return os.lseek(fd, at, os.SEEK_DATA) // BLOCK * BLOCK
    except OSError as error:
        if error.errno == errno.ENXIO:  # nothing but a hole
            return size
        if error.errno == errno.EINVAL:  # this kernel does not know; then everything is read
            return at
        raise
