"""What a supervisor answers, made into what the contract says: a tree of files, or the error that it is."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from typing import Any

from palestra.envs.errors import SandboxError
from palestra.envs.sandboxes.contract import Tree


class Gathered:
    """Pieces of a reply, put together; never more than was asked for."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.data = bytearray()

    def take(self, stream: int, data: bytes) -> None:
        """The next piece. Raises SandboxError."""
        self.data += data
        if len(self.data) > self.most:
            raise SandboxError(f"the box sends more than the {self.most} bytes that were asked for")


def tree(listing: Mapping[str, Any], data: bytes) -> Tree:
    """The exported files, cut out of their contents one after the other."""
    if listing["over"] is not None:
        return Tree({}, over=listing["over"])
    files, at = {}, 0
    for path, size, _ in listing["files"]:
        files[path] = data[at : at + size]
        at += size
    executable = frozenset(path for path, _, runs in listing["files"] if runs)
    return Tree(files, executable, listing["links"], listing["skipped"])


def raise_error(reply: dict[str, Any]) -> None:
    """The same built-in error as the call would have raised here, made from its number."""
    if reply.get("error") == "value":
        raise ValueError(reply["message"])
    if reply.get("error") == "os":
        number = reply["errno"]
        if number == errno.ENOTDIR:
            raise FileNotFoundError(number, reply["message"])
        if number == errno.ELOOP:
            raise PermissionError(number, reply["message"])
        raise OSError(number, reply["message"] or os.strerror(number))  # picks the subclass by the number
