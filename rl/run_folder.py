"""The folder of a run: made once, continued only by the same configuration, never overwritten."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from palestra.envs.errors import ConfigError
from palestra.rl.config import Config
from palestra.rl.load_config import differences, load_config, to_toml

# what may differ between a run and its continuation without changing what is learned
_MAY_DIFFER = ("run.folder", "tracking.", "checkpoint.", "cluster.")


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths of one run, and the lock that keeps a second process out of it."""

    path: Path
    config: Config
    existed: bool
    _lock: TextIO

    @property
    def trajectories(self) -> Path:
        """Records of episodes."""
        return self.path / "trajectories"

    @property
    def checkpoints(self) -> Path:
        """Complete checkpoints."""
        return self.path / "checkpoints"

    @property
    def model(self) -> Path:
        """Weights that this run made for itself: a new policy, a warm start."""
        return self.path / "model"

    def write_json(self, name: str, values: dict[str, Any]) -> None:
        """A file of plain values, whole or not at all."""
        write_atomic(self.path / name, json.dumps(values, indent=2, allow_nan=False) + "\n")

    def close(self) -> None:
        """Let another process have the folder."""
        self._lock.close()


def open_run(config: Config, *, resume: bool = True) -> RunFolder:
    """Make the run's folder, or take up the one that is there. Raises ConfigError when it cannot be continued."""
    path = Path(config.run.folder) / config.run.name
    try:
        existed = path.exists() and _begun(path)
        if existed and not resume:
            raise ConfigError(f"{path}: this run exists, and --resume never was given; choose another run.name")
        path.mkdir(parents=True, exist_ok=True)
        lock = _lock(path)
        try:
            _settle(path, config, begun=existed)
        except BaseException:
            lock.close()
            raise
    except ConfigError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        raise ConfigError(f"run.folder: {path} cannot be written: {error}; choose another run.folder") from error
    return RunFolder(path, config, existed, lock)


def write_atomic(path: Path, text: str) -> None:
    """Replace a file by a complete new one that has reached the disk. Raises OSError with the old one intact."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with fresh.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise


def _begun(path: Path) -> bool:
    """Whether anything was learned or noted here: what only failed at its start may still get other settings."""
    return (path / "ledger.sqlite").exists() or any((path / "checkpoints").glob("step_*"))


def _settle(path: Path, config: Config, *, begun: bool) -> None:
    """Write the settings, unless those that are there say that this is another run."""
    saved = path / "config.toml"
    if begun and not saved.exists():
        raise ConfigError(
            f"{path}: a run was begun here, but its config.toml is gone, and nobody knows what it was made with; "
            "put it back or choose another run.name"
        )
    if saved.exists():
        try:
            _check_same(path, load_config(saved), config)
        except ConfigError as error:
            if begun:
                what = (
                    "" if str(error).startswith(f"{path}:") else "; put it back as it was, or choose another run.name"
                )
                raise ConfigError(f"{error}{what}") from None
            shutil.rmtree(path / "model", ignore_errors=True)  # it was made with the settings of before
    for part in ("trajectories", "checkpoints"):
        (path / part).mkdir(exist_ok=True)
    write_atomic(saved, to_toml(config))


def _check_same(path: Path, old: Config, new: Config) -> None:
    # a linear schedule depends on where it ends, a constant one does not
    may_differ = _MAY_DIFFER if new.optimizer.schedule == "linear" else (*_MAY_DIFFER, "run.steps")
    changed = [line for line in differences(old, new) if not line.startswith(may_differ)]
    if changed:
        raise ConfigError(
            f"{path}: this run was begun with other settings, so it cannot be continued with these. "
            f"Choose another run.name, or put back: {'; '.join(changed)}"
        )


def _lock(path: Path) -> TextIO:
    """An advisory lock that dies with its process, also by SIGKILL."""
    file = (path / ".lock").open("w", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise ConfigError(
            f"{path}: another process is working on this run; end it or choose another run.name"
        ) from None
    return file
