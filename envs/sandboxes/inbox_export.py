"""In the box: what an episode hands over, taken out of the workspace without following a link.

Only regular files and links that stay inside leave the box; everything else stays there and is named with the reason.
"""

from __future__ import annotations

import contextlib
import os
import posixpath
import stat
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from palestra.envs.sandboxes.inbox_files import Files, folder_of
from palestra.envs.sandboxes.inbox_line import Pieces
from palestra.envs.sandboxes.inbox_walk import FILE, FOLDER, Bounds, Entry, OverError, opened_up, walk

ENTRIES_PER_FILE = 4  # directories and what is skipped: looked at, so counted, but not so strictly
KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
}


class Export:
    """One export: collects the listing and sends the contents ahead of it, in the order of the listing."""

    def __init__(self, files: Files, pieces: Pieces, limits: dict[str, int], until: float) -> None:
        self.files = files
        self.pieces = pieces
        self.bytes_left, self.files_left = limits["total_bytes"], limits["files"]
        self.limits = limits
        self.bounds = Bounds(until, ENTRIES_PER_FILE * limits["files"] + 1000, limits["depth"])
        self.listing: list[tuple[str, int, bool]] = []  # path, size, executable
        self.links: dict[str, str] = {}
        self.skipped: dict[str, str] = {}

    def take(self, paths: Sequence[str]) -> dict[str, Any]:
        """What is below `paths`, or which limit was passed. Raises ValueError (outside the workspace)."""
        tops = {self._relative(path) for path in paths}
        try:
            with self.files.policy.acting():
                for top in sorted(tops):
                    if not any(other != top and _is_below(top, other) for other in tops):
                        self._take_top(top)
            self.pieces.flush()
        except OverError as error:
            return {"over": str(error)}
        return {"over": None, "files": self.listing, "links": self.links, "skipped": self.skipped}

    def _relative(self, path: str) -> str:
        full = self.files.absolute(path)
        if full != self.files.workspace and not full.startswith(self.files.workspace + "/"):
            raise ValueError(f"{path}: outside the workspace, so it cannot be exported")
        return posixpath.relpath(full, self.files.workspace)

    def _take_top(self, path: str) -> None:
        try:
            folder, name = folder_of(self.files.absolute(path), make=False)
            try:
                facts = os.stat(name, dir_fd=folder, follow_symlinks=False)
            except OSError:
                os.close(folder)
                raise
        except FileNotFoundError:
            return
        except OSError as error:  # a link, a file or a closed directory on the way
            self._skip(path, error.strerror or "cannot be reached")
            return
        try:
            if not stat.S_ISDIR(facts.st_mode):
                self._take(path, Entry(name, folder, facts))
                return
            with opened_up(name, folder, facts):
                self._take_tree(path, os.open(name, FOLDER, dir_fd=folder))
        finally:
            os.close(folder)

    def _take_tree(self, top: str, folder: int) -> None:
        parents = [] if top == "." else top.split("/")
        bounds = replace(self.bounds, depth=self.bounds.depth - len(parents))
        with contextlib.closing(walk(folder, bounds)) as entries:
            for entry in entries:
                if entry is None:
                    parents = parents[:-1]
                    continue
                self._take("/".join([*parents, entry.name]), entry)
                if stat.S_ISDIR(entry.facts.st_mode):
                    parents.append(entry.name)

    def _take(self, path: str, entry: Entry) -> None:
        kind = stat.S_IFMT(entry.facts.st_mode)
        if kind == stat.S_IFREG:
            self._count(path)
            self._take_file(path, entry)
        elif kind == stat.S_IFLNK:
            self._count(path)
            self._take_link(path, os.readlink(entry.name, dir_fd=entry.folder))
        elif kind != stat.S_IFDIR:
            self._skip(path, KINDS.get(kind, "neither a file, a directory nor a link"))

    def _take_file(self, path: str, entry: Entry) -> None:
        size = entry.facts.st_size
        self._spend(size)  # before a byte of it is read: a file of holes is as large as it says
        with opened_up(entry.name, entry.folder, entry.facts):
            fd = os.open(entry.name, FILE, dir_fd=entry.folder)
        with open(fd, "rb", buffering=0) as file:
            left = size
            while left and (data := file.read(min(left, 1 << 18))):
                self.pieces.add(data)
                left -= len(data)
                self.bounds.check_time()
        self.listing.append((path, size - left, bool(entry.facts.st_mode & 0o111)))

    def _take_link(self, path: str, target: str) -> None:
        if stays_inside(path, target):
            self._spend(len(target))
            self.links[path] = target
        else:
            self._skip(path, f"a link that leaves the workspace or may: {target[:200]}")

    def _skip(self, path: str, reason: str) -> None:
        self._spend(len(path) + len(reason))
        self.skipped[path] = reason

    def _count(self, path: str) -> None:
        if self.files_left == 0:
            raise OverError(f"more than {self.limits['files']} files")
        self.files_left -= 1
        self._spend(len(path))

    def _spend(self, size: int) -> None:
        """Contents, names and reasons all leave the box, so they all count."""
        if size > self.bytes_left:
            raise OverError(f"more than {self.limits['total_bytes']} bytes")
        self.bytes_left -= size


def stays_inside(path: str, target: str) -> bool:
    """Whether a link at `path` leads to a place of the tree, whatever other such links are in it.

    Going up is allowed only at the beginning: after the name of another link "..", taken by the letter, says nothing.
    """
    parts = [part for part in target.split("/") if part not in ("", ".")]
    ups = next((at for at, part in enumerate(parts) if part != ".."), len(parts))
    return not target.startswith("/") and ".." not in parts[ups:] and ups <= path.count("/")


def _is_below(path: str, other: str) -> bool:
    return other == "." or path.startswith(other + "/")
