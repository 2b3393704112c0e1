"""The record files of a run, a folder or one file, read line by line; a damaged line is one sentence with its place."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from palestra.envs.errors import ConfigError
from palestra.rollout import record
from palestra.rollout.types import Trajectory


def record_files(place: Path) -> list[Path]:
    """Files of `place` in the order of their names: of a run's folder, its training episodes.

    Raises ConfigError when there is none.
    """
    if place.is_file():
        return [place]
    inner = place / "trajectories"
    folder = inner if inner.is_dir() else place
    if not folder.is_dir():
        raise ConfigError(
            f"warm_start.recorded is {str(place)!r}, and nothing is there; give a run's folder, a folder of .jsonl "
            "files, or one such file"
        )
    files = sorted(folder.glob("*.jsonl"))
    if not files:
        raise ConfigError(f"warm_start.recorded: {folder} holds no .jsonl file; record episodes with `palestra train`")
    return files


def read_records(files: Sequence[Path]) -> Iterator[tuple[str, Trajectory]]:
    """Each episode and where it stands, as "FILE, line 3". A last line that was cut by a crash is left out.

    Raises ConfigError for a line that is no record.
    """
    for path in files:
        try:
            lines = path.open("rb")
        except OSError as error:
            raise ConfigError(f"warm_start.recorded: {path} cannot be read: {error.strerror}") from error
        with lines:
            for number, line in enumerate(lines, 1):
                if line.endswith(b"\n"):
                    where = f"{path}, line {number}"
                    yield where, _trajectory(line, where)


def records_digest(place: Path) -> str:
    """SHA-256 of the names and the bytes of the record files."""
    sha = hashlib.sha256()
    for path in record_files(place):
        with path.open("rb") as file:
            sha.update(path.name.encode() + hashlib.file_digest(file, "sha256").digest())
    return sha.hexdigest()


def _trajectory(line: bytes, where: str) -> Trajectory:
    try:
        trajectory = record.from_json(json.loads(line))
        _check_shape(trajectory)
        return trajectory
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ConfigError(
            f"{where}: no record of an episode ({type(error).__name__}: {str(error)[:160]}); take the line out, or "
            "give records that are whole"
        ) from error


def _check_shape(trajectory: Trajectory) -> None:
    """Raise ValueError for what reads as a record and can be none."""
    if trajectory.reward is not None and not isinstance(trajectory.reward, int | float):
        raise ValueError(f"a reward that is {trajectory.reward!r}")
    if any(sample.ids.ndim != 1 or sample.sampled[:1].any() for sample in trajectory.samples):
        raise ValueError("a row whose first token is sampled, with nothing before it")
    if any(not 0 <= turn.sample < len(trajectory.samples) for turn in trajectory.turns):
        raise ValueError("a turn in a row that is not there")
