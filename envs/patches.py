"""What a policy changed in a repository, by content: two trees are compared file by file, and git is never asked.

So an index flag, an ignore rule, an attribute or a filter of the policy's hides nothing, and runs nothing here.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

JUNK = (".git", "__pycache__", ".pytest_cache")
"""What running tests leaves behind. `.git` counts only at the top: a nested one is files like any other."""


@dataclass(frozen=True, slots=True)
class Changes:
    """The way from one tree to another. Changes(written={"calc.py": b"..."}, deleted=frozenset({"old.py"}))

    Paths are as in `Artefact`.
    """

    written: Mapping[str, bytes] = field(default_factory=dict)  # added or changed, all of the content
    deleted: frozenset[str] = frozenset()
    executable: frozenset[str] = frozenset()  # that got an execute bit; a base has none
    links: Mapping[str, str] = field(default_factory=dict)  # path -> target

    @property
    def size(self) -> int:
        """Bytes of names, contents and targets."""
        named = sum(len(_raw(path)) + len(data) for path, data in self.written.items())
        linked = sum(len(_raw(path)) + len(_raw(target)) for path, target in self.links.items())
        return named + linked + sum(len(_raw(path)) for path in (*self.deleted, *self.executable))

    def applied(self, base: Mapping[str, bytes]) -> dict[str, bytes]:
        """The regular files after the changes."""
        return {**{path: data for path, data in base.items() if path not in self.deleted}, **self.written}


def changes(
    base: Mapping[str, bytes],
    files: Mapping[str, bytes],
    *,
    executable: Collection[str] = (),
    links: Mapping[str, str] | None = None,
) -> Changes:
    """What became of `base`, whose files are all regular and not executable."""
    return Changes(
        {path: data for path, data in files.items() if base.get(path) != data},
        frozenset(set(base) - set(files)),
        frozenset(executable),
        dict(links or {}),
    )


def is_junk(path: str) -> bool:
    """Whether the path is no part of a patch."""
    parts = path.split("/")
    return parts[0] == ".git" or any(part in JUNK[1:] for part in parts)


def unified_diff(base: Mapping[str, bytes], made: Changes) -> str:
    """The changes for people and for records, as git would print them; a file that is no UTF-8 is only named."""
    pieces = []
    for path in sorted({*made.written, *made.deleted, *made.executable, *made.links}, key=_raw):
        pieces.append(_file_diff(path, base.get(path), made))
    return "".join(pieces)


def _file_diff(path: str, old: bytes | None, made: Changes) -> str:
    new = _raw(made.links[path]) if path in made.links else made.written.get(path, old)
    if path in made.deleted and path not in made.links:
        new = None
    before, after = _quoted(f"a/{path}"), _quoted(f"b/{path}")
    head = f"diff --git {before} {after}\n{_modes(path, old, new, made)}"
    if old == new:
        return head
    sides = ("/dev/null" if old is None else before, "/dev/null" if new is None else after)
    try:
        texts = [(side or b"").decode() for side in (old, new)]
    except UnicodeDecodeError:
        return f"{head}Binary files {sides[0]} and {sides[1]} differ\n"
    # not splitlines: a form feed or a lone carriage return is no end of a line to git
    lines = [[line + "\n" for line in text.split("\n")] for text in texts]
    for side in lines:
        last = side.pop()[:-1]
        if last:
            side.append(f"{last}\n\\ No newline at end of file\n")
    return head + "".join(difflib.unified_diff(lines[0], lines[1], *sides))


def _modes(path: str, old: bytes | None, new: bytes | None, made: Changes) -> str:
    mode = "120000" if path in made.links else "100755" if path in made.executable else "100644"
    if new is None:
        return "deleted file mode 100644\n"
    if old is None:
        return f"new file mode {mode}\n"
    return "" if mode == "100644" else f"old mode 100644\nnew mode {mode}\n"


def _quoted(path: str) -> str:
    """As git writes a name: in quotes with octal escapes where it is not plain."""
    raw = _raw(path)
    if all(32 <= byte < 127 and byte not in b'"\\' for byte in raw):
        return path
    return '"' + "".join(_escaped(byte) for byte in raw) + '"'


def _escaped(byte: int) -> str:
    if byte in b'"\\':
        return f"\\{chr(byte)}"
    return chr(byte) if 32 <= byte < 127 else f"\\{byte:03o}"


def _raw(text: str) -> bytes:
    return text.encode(errors="surrogateescape")
