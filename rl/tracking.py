"""Metrics: a JSONL that needs no account, and wandb, which may fail without the run failing.

Each family of metrics has a step of its own on its axis, and a step is written in one commit, so that no point is
dropped because another loop was ahead.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

log = logging.getLogger(__name__)

Mode = Literal["auto", "online", "offline", "disabled"]


class Metrics:
    """metrics.jsonl of a run: one object a line, {"step": 3, "rollout/reward_mean": 0.5, ...}."""

    def __init__(self, path: Path, *, resume_after: int | None = None) -> None:
        """`resume_after`: drop what was logged after that step; its weights are gone."""
        self._path = path
        if resume_after is not None and path.exists():
            _rewind(path, resume_after)
        self._file = path.open("a", encoding="utf-8")

    def log(self, step: int, values: Mapping[str, float | int | str | None]) -> None:
        """Append one line and hand it to the operating system.

        A figure that is not a finite number is written as null, with a warning that names it: the file stays JSON for
        every reader. A loss or a gradient that is not finite never comes here, since the learner stops the run.
        """
        odd = sorted(name for name, value in values.items() if isinstance(value, float) and not math.isfinite(value))
        if odd:
            log.warning("step %d: %s not finite, written as null", step, ", ".join(odd))
        line = {"step": step, **values, **dict.fromkeys(odd)}
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class Tracker:
    """wandb behind one border. Whatever it raises is logged once and turns it off; training goes on."""

    def __init__(self, folder: Path, name: str, project: str, mode: Mode, config: Mapping[str, Any]) -> None:
        self._run: Any = None
        resolved = _mode(mode)
        if resolved == "disabled":
            return
        os.environ.setdefault("WANDB_SILENT", "true")
        run_id = _run_id(folder)
        try:
            import wandb

            self._run = wandb.init(
                project=project,
                name=name,
                id=run_id,
                resume="allow",
                mode=resolved,
                dir=str(folder),
                config=dict(config),
                settings=wandb.Settings(init_timeout=30, console="off", x_disable_stats=True),
            )
            for family in ("rollout", "update", "publish", "time", "eval"):
                self._run.define_metric(f"{family}/*", step_metric="step")
        except Exception as error:  # noqa: BLE001 - a tracker's failure must not be the run's
            self._off(error)

    def log(self, step: int, values: Mapping[str, float | int | str | None]) -> None:
        """One commit for one step."""
        if self._run is None:
            return
        try:
            self._run.log({"step": step, **{k: v for k, v in values.items() if v is not None}})
        except Exception as error:  # noqa: BLE001
            self._off(error)

    def close(self, exit_code: int = 0) -> None:
        """Finish the tracker's run."""
        if self._run is None:
            return
        try:
            self._run.finish(exit_code=exit_code)
        except Exception as error:  # noqa: BLE001
            self._off(error)

    def _off(self, error: Exception) -> None:
        log.warning("wandb is off for this run: %s: %s", type(error).__name__, error)
        self._run = None


def _mode(mode: Mode) -> Literal["online", "offline", "disabled"]:
    """Never a prompt for a login: online only when a key is there or it was asked for."""
    if mode != "auto":
        return mode
    try:
        in_netrc = "wandb" in (Path.home() / ".netrc").read_text("utf-8")
    except (OSError, ValueError, RuntimeError):  # not there, not ours to read, no home
        in_netrc = False
    has_key = bool(os.environ.get("WANDB_API_KEY")) or in_netrc
    return "online" if has_key else "offline"


def _run_id(folder: Path) -> str:
    """The tracker's id of this run folder, made once, so that a resumed run goes on in the same history."""
    path = folder / "wandb_id"
    if not path.exists():
        path.write_text(os.urandom(4).hex(), encoding="utf-8")
    return path.read_text(encoding="utf-8").strip()


def _rewind(path: Path, step: int) -> None:
    kept = []
    for line in path.read_bytes().split(b"\n"):
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line.decode("utf-8") + "\n")
        except (ValueError, KeyError, TypeError):
            continue  # a line that a crash cut, or a disk damaged
    fresh = path.with_suffix(".new")
    fresh.write_text("".join(kept), encoding="utf-8")
    fresh.replace(path)
