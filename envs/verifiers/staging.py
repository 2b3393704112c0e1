"""Putting files into a box for judging, each with the user whose they are."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Collection, Iterable, Mapping
from typing import Literal

from palestra.envs.errors import SandboxError
from palestra.envs.sandboxes.contract import Sandbox
from palestra.envs.verifiers.inbox_text import program

STAGE_S = 30.0
MAX_NAME, MAX_PATH = 255, 3500  # bytes; leaves room for where the tree lies


async def stage(
    box: Sandbox,
    top: str,
    files: Mapping[str, bytes],
    *,
    user: Literal["policy", "examiner"],
    executable: Collection[str] = (),
    links: Mapping[str, str] | None = None,
) -> None:
    """A tree below `top`. The examiner's can be changed by the examiner alone; the policy's by everyone in the box.

    Raises SandboxError: the box is clean, so what cannot be written there is no policy's doing.
    """
    job = {
        "top": top,
        "open": user == "policy",
        "files": [[_name(path), _text(files[path]), path in executable] for path in _storable(files, ())],
        "links": [[_name(path), _name((links or {})[path])] for path in _storable(links or {}, files)],
    }
    argv = ["python3", "-I", "-S", "-B", "-c", program("inbox_stage")]
    ended = await box.run(argv, timeout_s=STAGE_S, stdin=json.dumps(job).encode(), user=user)
    if not ended.ok:
        said = ended.stderr[-300:].decode(errors="replace")
        raise SandboxError(f"{box.id}: files cannot be staged in {top}, exit status {ended.exit_code}: {said}")


def _storable(paths: Iterable[str], others: Iterable[str]) -> list[str]:
    """Of the paths, those that can be in one tree with all the rest: none of a policy's making breaks the staging."""
    paths = list(paths)
    folders = {path[:at] for path in (*paths, *others) for at, letter in enumerate(path) if letter == "/"}
    taken = folders | set(others)
    return [path for path in paths if path not in taken and _is_plain(path)]


def _is_plain(path: str) -> bool:
    parts = os.fsencode(path).split(b"/")
    return len(os.fsencode(path)) <= MAX_PATH and all(
        part not in (b"", b".", b"..") and b"\0" not in part and len(part) <= MAX_NAME for part in parts
    )


def _name(path: str) -> str:
    return _text(os.fsencode(path))


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")
