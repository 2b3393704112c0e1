"""What judged episodes handed over, kept beside their records, so that they can be judged again.

One file for each file of records: a line for each artefact that differs from those before it, under its digest, which
the episode's record carries. It is written first: a record never names an artefact that is not there.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from palestra.envs.types import Artefact
from palestra.rollout.types import Trajectory

log = logging.getLogger(__name__)
SUFFIX = ".artefacts"
FACT = "artefact"  # the key of the digest in a trajectory's facts
MAX_BYTES = 64 * 2**20  # of one artefact as JSON; a larger one is not kept


def beside(records: Path) -> Path:
    """Where the artefacts of a file of records lie."""
    return records.with_suffix(SUFFIX)


def to_json(artefact: Artefact) -> dict[str, Any]:
    """The artefact as plain JSON values. `from_json` gives it back, names that are no UTF-8 included."""
    return {
        "answer": artefact.answer,
        "files": {path: base64.b64encode(data).decode("ascii") for path, data in artefact.files.items()},
        "executable": sorted(artefact.executable),
        "links": dict(artefact.links),
        "skipped": dict(artefact.skipped),
        "flags": list(artefact.flags),
        "failure": artefact.failure,
    }


def from_json(values: Mapping[str, Any]) -> Artefact:
    """The artefact of such values. Raises KeyError, TypeError or ValueError for others."""
    return Artefact(
        answer=values["answer"],
        files={path: base64.b64decode(data, validate=True) for path, data in values["files"].items()},
        executable=frozenset(values["executable"]),
        links=dict(values["links"]),
        skipped=dict(values["skipped"]),
        flags=tuple(values["flags"]),
        failure=values["failure"],
    )


def keep(records: Path, trajectories: Sequence[Trajectory]) -> tuple[list[Trajectory], int]:
    """Write what the episodes handed over, and see it on the disk.

    Returns the trajectories without their artefacts and with the digests in their facts, and the bytes written. What
    is no JSON or too large is left out and logged: it says nothing against the episode. Raises OSError.
    """
    lines: dict[str, bytes] = {}
    linked = [_link(trajectory, lines) for trajectory in trajectories]
    data = b"".join(lines.values())
    if data:
        with beside(records).open("ab") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    return linked, len(data)


def read(records: Path) -> Iterator[tuple[str, Artefact]]:
    """Digests and artefacts of the file that belongs to `records`; nothing where there is none any more.

    A line that is damaged or does not have the digest that it says is left out, so whoever looks for it finds it gone.
    """
    path = beside(records)
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            found = _artefact(line)
            if found is not None:
                yield found


def _link(trajectory: Trajectory, lines: dict[str, bytes]) -> Trajectory:
    artefact = trajectory.artefact
    if artefact is None:
        return trajectory
    try:
        text = _canonical(to_json(artefact))
    except (TypeError, ValueError, RecursionError) as error:  # an answer of a user's environment that is no JSON
        log.warning("%s: its artefact is not kept: %s: %s", trajectory.id, type(error).__name__, error)
        return replace(trajectory, artefact=None)
    if len(text) > MAX_BYTES:
        log.warning("%s: its artefact of %d bytes is not kept; the limit is %d", trajectory.id, len(text), MAX_BYTES)
        return replace(trajectory, artefact=None)
    digest = hashlib.sha256(text).hexdigest()
    lines.setdefault(digest, digest.encode() + b" " + base64.b64encode(zlib.compress(text)) + b"\n")
    return replace(trajectory, artefact=None, facts={**trajectory.facts, FACT: digest})


def _artefact(line: bytes) -> tuple[str, Artefact] | None:
    try:
        digest, data = line.decode("ascii").split()
        inflate = zlib.decompressobj()
        text = inflate.decompress(base64.b64decode(data, validate=True), MAX_BYTES)
        if hashlib.sha256(text).hexdigest() != digest:
            return None
        return digest, from_json(json.loads(text))
    except (ValueError, TypeError, KeyError, zlib.error):
        return None


def _canonical(values: Mapping[str, Any]) -> bytes:
    return json.dumps(values, sort_keys=True, separators=(",", ":")).encode("ascii")
