"""In the box: files read and written without following a link, and directories wiped whatever is in them."""

from __future__ import annotations

import contextlib
import errno
import os
import posixpath
import stat
import time

from palestra.envs.sandboxes.inbox_line import BoxBrokenError
from palestra.envs.sandboxes.inbox_policy import Policy


class Files:
    """The box's files as the policy may reach them. Paths are absolute or start in the workspace."""

    def __init__(self, workspace: str, policy: Policy) -> None:
        self.workspace = workspace
        self.policy = policy

    def absolute(self, path: str) -> str:
        """`path` without dots, from the root of the box."""
        if "\0" in path:
            raise PermissionError(errno.EPERM, "a path cannot hold a zero byte", path)
        return "/" + posixpath.normpath(posixpath.join(self.workspace, path)).lstrip("/")

    def read(self, path: str, max_bytes: int) -> bytes:
        """The bytes of a regular file."""
        full = self.absolute(path)
        if full == "/":
            raise IsADirectoryError(errno.EISDIR, "is a directory", path)
        with self.policy.acting():
            folder, name = folder_of(full, make=False)
            try:
                kind = _kind(name, folder)
                if kind == stat.S_IFDIR:
                    raise IsADirectoryError(errno.EISDIR, "is a directory", path)
                if kind is not None and kind != stat.S_IFREG:
                    raise PermissionError(errno.EPERM, "a link or a special file", path)
                fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
            finally:
                os.close(folder)
        with open(fd, "rb") as file:
            data = file.read(max_bytes + 1)
        if len(data) > max_bytes:
            raise ValueError(f"{path}: longer than the {max_bytes} bytes that were asked for")
        return data

    def write(self, path: str, data: bytes, mode: int) -> None:
        """Create or replace a file of the workspace, with its parents; nothing is left of it when space runs out."""
        full = self.absolute(path)
        if not full.startswith(self.workspace + "/"):
            raise PermissionError(errno.EPERM, "outside the workspace", path)
        with self.policy.acting():
            folder, name = folder_of(full, make=True)
            try:
                if _kind(name, folder) not in (None, stat.S_IFREG, stat.S_IFDIR):
                    raise PermissionError(errno.EPERM, "a link or a special file", path)
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=folder)
                fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode, dir_fd=folder)
                try:
                    with open(fd, "wb", buffering=0) as file:
                        os.fchmod(fd, mode)
                        rest = memoryview(data)
                        while rest:
                            rest = rest[file.write(rest) :]
                except OSError:
                    os.unlink(name, dir_fd=folder)
                    raise
            finally:
                os.close(folder)


def _kind(name: str, folder: int) -> int | None:
    try:
        return stat.S_IFMT(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return None


def folder_of(path: str, make: bool) -> tuple[int, str]:
    """A descriptor of the directory that holds the last part of `path`, reached without following a link; that part."""
    *parents, name = path.strip("/").split("/")
    fd = os.open("/", os.O_PATH | os.O_DIRECTORY)
    for part in parents:
        try:
            if make:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, 0o755, dir_fd=fd)
            if _kind(part, fd) == stat.S_IFLNK:
                raise PermissionError(errno.EPERM, f"the link {part!r} is on the way", path)
            inner = os.open(part, os.O_PATH | os.O_NOFOLLOW | os.O_DIRECTORY, dir_fd=fd)
        finally:
            os.close(fd)
        fd = inner
    return fd, name


def wipe(root: str, deadline: float) -> None:
    """Remove everything below `root`, whatever its depth, names and modes, with two descriptors.

    A directory inside a directory is moved to the top before its parent is removed, so no path ever gets long.
    """
    top = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    moved = 0
    try:
        while True:
            with os.scandir(top) as entries:
                names = [entry.name for entry, _ in zip(entries, range(1000))]  # noqa: B905 (cut off on purpose)
            if not names:
                return
            for name in names:
                moved = _remove(name, top, moved)
            if time.monotonic() > deadline:
                raise BoxBrokenError(f"{root} could not be wiped in time")
    finally:
        os.close(top)


def _remove(name: str, top: int, moved: int) -> int:
    if _kind(name, top) != stat.S_IFDIR:
        os.unlink(name, dir_fd=top)
        return moved
    os.chmod(name, 0o700, dir_fd=top)  # the policy may have closed it
    folder = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=top)
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if not entry.is_dir(follow_symlinks=False):
                    os.unlink(entry.name, dir_fd=folder)
                    continue
                os.chmod(entry.name, 0o700, dir_fd=folder)
                moved = _move_up(entry.name, folder, top, moved)
    finally:
        os.close(folder)
    with contextlib.suppress(OSError):  # a listing that changed under us left something: the next round takes it
        os.rmdir(name, dir_fd=top)
    return moved


def _move_up(name: str, folder: int, top: int, moved: int) -> int:
    while True:
        moved += 1
        try:
            os.rename(name, f"wiped-{moved}", src_dir_fd=folder, dst_dir_fd=top)
            return moved
        except OSError as error:  # the policy has a directory or a file of that name
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
