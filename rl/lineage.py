"""Whether a run's ledger and its checkpoint tell of the same weights."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Mapping
from pathlib import Path

from palestra.envs.errors import IntegrityError
from palestra.envs.types import JSON
from palestra.rl.ledger import Ledger


def open_ledger(path: Path) -> Ledger:
    """The ledger of a run, made when it is not there. Raises IntegrityError."""
    try:
        return Ledger(path)
    except sqlite3.DatabaseError as error:
        raise IntegrityError(
            f"{path}: cannot be used as a ledger: {error}; put a good copy back, or choose another run.name"
        ) from error


def groups_used(extra: Mapping[str, JSON], found: Path) -> int:
    """How many groups had been used, dropped ones included, when the checkpoint was written. Raises IntegrityError."""
    used = extra.get("groups_used")
    if not isinstance(used, int):
        raise IntegrityError(
            f"{found}: a checkpoint of another version of this program, which does not say how many tasks were used; "
            "go on with the version that began the run, or choose another run.name"
        )
    return used


def check_ledger(ledger: Ledger, step: int, used: int) -> None:
    """Steps use tasks in their order: a ledger that knows of others than the checkpoint is not of its weights.

    Raises IntegrityError.
    """
    known = ledger.consumed_positions()
    if known != list(range(used)):
        raise IntegrityError(
            f"the ledger knows of {len(known)} tasks that were used up to step {step}, the checkpoint of that "
            f"step of {used}; going on would use tasks twice. Put the run's ledger.sqlite back, or choose "
            "another run.name"
        )


def check_tasks(ledger: Ledger, task_at: Callable[[int], tuple[int, str]]) -> None:
    """Positions mean the tasks that they meant: an environment that has other tasks now, or the same in another order,
    would be played twice in places and never in others. O(tasks used). Raises IntegrityError."""
    for position, known in ledger.consumed_tasks():
        found = task_at(position)[1]
        if found != known:
            raise IntegrityError(
                f"the environment's tasks have changed: place {position} of the run was task {known!r} and is "
                f"{found!r} now; put the tasks back as they were, or choose another run.name"
            )
