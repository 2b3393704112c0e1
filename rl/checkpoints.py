"""Checkpoints that are complete or absent.

A checkpoint is written into a hidden folder beside its place, flushed, listed with hashes in a manifest that is written
last, and moved into place by one rename. What a crash or a full disk leaves is never taken for a checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file, save_file

from palestra.envs.errors import ConfigError, IntegrityError
from palestra.envs.types import JSON
from palestra.rl.learner_state import LearnerState

_MANIFEST = "manifest.json"
_TENSORS = "learner.safetensors"
_FACTS = "learner.json"
_EXTRA = "extra.json"
_NAME = re.compile(r"step_[0-9]{6,}")


@dataclass(frozen=True, slots=True)
class Found:
    """The newest complete checkpoint; `skipped` says, in words, which newer ones are broken and why."""

    step: int
    folder: Path
    skipped: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """The checkpoints of one run: folder/step_000010 and so on, the newest `keep` of them."""

    folder: Path
    base: str
    """Digest of the base model, which an adapter and its optimizer belong to; see `base_digest`."""
    keep: int = 2

    def __post_init__(self) -> None:
        if self.keep < 1:
            raise ConfigError(f"checkpoint.keep is {self.keep}; keep 1 or more")

    def save(self, state: LearnerState, extra: Mapping[str, JSON], *, step: int | None = None) -> Path:
        """Write one checkpoint, then remove older ones beyond `keep`. `extra` is what else the run has to remember.

        `step` names it: of the run, which also counts batches without an update; None: the learner's own.

        Raises OSError (a full disk, say) with every earlier checkpoint intact and nothing half-written left behind.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        place = self.folder / f"step_{state.step if step is None else step:06d}"
        draft = self.folder / f".{place.name}.{os.getpid()}"
        shutil.rmtree(draft, ignore_errors=True)
        try:
            draft.mkdir()
            self._write(draft, state, extra)
            _remove(place)  # the same step again, after a resume from an older one
            os.replace(draft, place)
            _flush(self.folder)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise
        self._retire()
        return place

    def newest(self) -> Found | None:
        """The newest complete checkpoint, or None when there is none at all.

        Raises IntegrityError when checkpoints exist and all are broken: starting over silently would be worse.
        """
        skipped: list[str] = []
        for place in reversed(self._places()):
            problem = broken(place)
            if problem is None:
                return Found(step_of(place), place, tuple(skipped))
            skipped.append(f"{place.name} is not complete: {problem}")
        if skipped:
            raise IntegrityError(
                f"{self.folder}: no complete checkpoint. {'; '.join(skipped)}. Move them away to start over"
            )
        return None

    def load(self, folder: Path) -> tuple[LearnerState, dict[str, JSON]]:
        """The learner's state and the run's extra facts. Raises ConfigError when they belong to another base model."""
        facts = json.loads((folder / _FACTS).read_text())
        if facts["base"] != self.base:
            raise ConfigError(
                f"{folder}: made on a base model with digest {facts['base'][:12]}, this run has {self.base[:12]}; "
                "resume with the model that the run was started with"
            )
        state = LearnerState(facts["step"], facts["train"], load_file(folder / _TENSORS), facts.get("start"))
        extra: dict[str, JSON] = json.loads((folder / _EXTRA).read_text())
        return state, extra

    def _write(self, draft: Path, state: LearnerState, extra: Mapping[str, JSON]) -> None:
        save_file(dict(state.tensors), draft / _TENSORS)
        facts = {"step": state.step, "train": state.train, "base": self.base, "start": state.start}
        (draft / _FACTS).write_text(json.dumps(facts))
        (draft / _EXTRA).write_text(json.dumps(dict(extra)))
        files = {name: _digest(draft / name) for name in (_TENSORS, _FACTS, _EXTRA)}
        for name in files:
            _flush(draft / name)
        (draft / _MANIFEST).write_text(json.dumps({"version": 1, "step": state.step, "files": files}))
        _flush(draft / _MANIFEST)
        _flush(draft)

    def _places(self) -> list[Path]:
        """Oldest first."""
        return places(self.folder)

    def _retire(self) -> None:
        for place in self._places()[: -self.keep]:
            _remove(place)
        for draft in self.folder.glob(".step_*"):  # of processes that were killed while writing
            shutil.rmtree(draft)


def places(folder: Path) -> list[Path]:
    """What has a checkpoint's name, complete or not, oldest first. Other names are somebody else's."""
    return sorted((path for path in folder.glob("step_*") if _NAME.fullmatch(path.name)), key=step_of)


def broken(folder: Path) -> str | None:
    """What is wrong with a checkpoint, in words; None when every file is there with its hash."""
    try:
        manifest = json.loads((folder / _MANIFEST).read_text())
        for name in (_TENSORS, _FACTS, _EXTRA):
            if _digest(folder / name) != manifest["files"][name]:
                return f"{name} is damaged"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except OSError as error:
        return f"{Path(error.filename or folder).name} cannot be read ({error.strerror})"
    except (ValueError, KeyError, TypeError) as error:
        return f"its manifest cannot be read ({type(error).__name__}: {error})"
    return None


def base_digest(folder: Path) -> str:
    """SHA-256 over a model folder's configuration and weights: who an adapter belongs to. Reads all bytes."""
    sha = hashlib.sha256()
    for path in sorted([folder / "config.json", *folder.glob("*.safetensors")]):
        sha.update(path.name.encode())
        sha.update(_digest(path).encode())
    return sha.hexdigest()


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _remove(place: Path) -> None:
    """Out of sight first: a kill in the middle must not leave half a checkpoint under a checkpoint's name."""
    if place.exists():
        hidden = place.with_name(f".{place.name}.{os.getpid()}.old")
        os.replace(place, hidden)
        shutil.rmtree(hidden)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def step_of(place: Path) -> int:
    """The step in a checkpoint's name."""
    return int(place.name.removeprefix("step_"))
