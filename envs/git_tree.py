"""A git work tree as plain files: objects, one branch, an index. Made by computing; no git runs on this machine.

Nothing is in it but the commits that it was made from: no later object, no other ref, no reflog, no remote, no hook.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

CONFIG = b"""[core]
\trepositoryformatversion = 0
\tfilemode = true
\tbare = false
[user]
\tname = Developer
\temail = developer@example.invalid
"""
_AUTHOR = "Developer <developer@example.invalid>"
_EPOCH = 1_700_000_000  # of the first commit; each later one is a day younger
_DAY = 86_400


@dataclass(frozen=True, slots=True)
class Commit:
    """One state of the repository. Commit("Add the parser", {"parser.py": b"..."}); `files` are all of them."""

    message: str
    files: Mapping[str, bytes]


def git_files(history: Sequence[Commit]) -> dict[str, bytes]:
    """What a `.git` holds after the commits, as path -> content, without the work tree itself. At least one commit."""
    objects: dict[str, bytes] = {}
    parent: str | None = None
    for number, commit in enumerate(history):
        tree = _tree(objects, commit.files)
        parent = _add(objects, "commit", _commit(tree, parent, commit.message, _EPOCH + number * _DAY))
    assert parent is not None, "a history has a commit"
    stored = {f".git/objects/{name[:2]}/{name[2:]}": data for name, data in objects.items()}
    return {
        **stored,
        ".git/HEAD": b"ref: refs/heads/main\n",
        ".git/config": CONFIG,
        ".git/index": _index(history[-1].files),
        ".git/refs/heads/main": f"{parent}\n".encode(),
    }


def blob_name(data: bytes) -> str:
    """The name that git gives to a file's content: 40 hex digits."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def _add(objects: dict[str, bytes], kind: str, body: bytes) -> str:
    """Put one object among the others; its name."""
    whole = f"{kind} {len(body)}\0".encode() + body
    name = hashlib.sha1(whole, usedforsecurity=False).hexdigest()
    objects[name] = zlib.compress(whole)
    return name


def _tree(objects: dict[str, bytes], files: Mapping[str, bytes]) -> str:
    """The tree of the files and all trees below it."""
    entries: dict[str, tuple[str, str]] = {}  # name -> (mode, object)
    folders: dict[str, dict[str, bytes]] = {}
    for path, data in files.items():
        first, slash, rest = path.partition("/")
        if slash:
            folders.setdefault(first, {})[rest] = data
        else:
            entries[first] = ("100644", _add(objects, "blob", data))
    for folder, inside in folders.items():
        entries[folder] = ("40000", _tree(objects, inside))
    # git sorts a folder as if its name ended in a slash
    order = sorted(entries, key=lambda name: name + "/" if name in folders else name)
    body = b"".join(f"{entries[name][0]} {name}".encode() + b"\0" + bytes.fromhex(entries[name][1]) for name in order)
    return _add(objects, "tree", body)


def _commit(tree: str, parent: str | None, message: str, time: int) -> bytes:
    parents = f"parent {parent}\n" if parent else ""
    who = f"{_AUTHOR} {time} +0000"
    return f"tree {tree}\n{parents}author {who}\ncommitter {who}\n\n{message}\n".encode()


def _index(files: Mapping[str, bytes]) -> bytes:
    """Version 2 of the index. Times are zero, so that git looks at each file's content when it first compares."""
    body = b"DIRC" + struct.pack(">II", 2, len(files))
    for path in sorted(files, key=str.encode):
        name, data = path.encode(), files[path]
        stat = struct.pack(">10I", 0, 0, 0, 0, 0, 0, 0o100644, 0, 0, len(data))
        entry = stat + bytes.fromhex(blob_name(data)) + struct.pack(">H", min(len(name), 0xFFF)) + name
        body += entry + b"\0" * (8 - len(entry) % 8)
    return body + hashlib.sha1(body, usedforsecurity=False).digest()
