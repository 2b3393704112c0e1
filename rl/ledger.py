"""The ledger: which task was issued, finished and trained, at which step, by which version. SQLite, one per run.

A position is a place in the run's endless order of tasks; it is issued once and trained at most once in the lineage of
the weights that survive. When a run resumes from the checkpoint of step S, what was trained after S is gone with its
weights: it is marked undone and its positions are issued again.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from palestra.envs.errors import IntegrityError

_SCHEMA = """
CREATE TABLE IF NOT EXISTS lives (
    life INTEGER PRIMARY KEY, resumed_from INTEGER NOT NULL, started REAL NOT NULL);
CREATE TABLE IF NOT EXISTS issued (
    position INTEGER NOT NULL, life INTEGER NOT NULL, group_id TEXT NOT NULL, task_id TEXT NOT NULL,
    version INTEGER NOT NULL, finished INTEGER NOT NULL DEFAULT 0, PRIMARY KEY (position, life));
CREATE TABLE IF NOT EXISTS trained (
    position INTEGER NOT NULL, life INTEGER NOT NULL, step INTEGER NOT NULL, version INTEGER NOT NULL,
    task_id TEXT NOT NULL, outcome TEXT NOT NULL, sampled_tokens INTEGER NOT NULL, invalid_tokens INTEGER NOT NULL,
    truncated_tokens INTEGER NOT NULL, undone INTEGER NOT NULL DEFAULT 0);
CREATE UNIQUE INDEX IF NOT EXISTS once ON trained (position) WHERE undone = 0;
"""
_TABLES = {
    "lives": ("life", "resumed_from", "started"),
    "issued": ("position", "life", "group_id", "task_id", "version", "finished"),
    "trained": (
        *("position", "life", "step", "version", "task_id", "outcome"),
        *("sampled_tokens", "invalid_tokens", "truncated_tokens", "undone"),
    ),
}


@dataclass(frozen=True, slots=True)
class Consumed:
    """What a step did with one group.

    outcome: "trained"; "no_signal", used but without anything to learn; "filtered", dropped by dynamic sampling;
    "invalid", with too few verdicts to be used.
    """

    position: int
    task_id: str
    version: int
    outcome: str
    sampled_tokens: int
    invalid_tokens: int = 0  # of them, those of trajectories without a verdict, which are in no loss
    truncated_tokens: int = 0  # of them, those of cut trajectories that rollout.truncated takes out of the loss


class Ledger:
    """One writer: the driver. Every method commits before it returns."""

    def __init__(self, path: Path) -> None:
        """Raises IntegrityError for a ledger with other columns, sqlite3.DatabaseError for what is no ledger."""
        self._db = sqlite3.connect(path, timeout=30.0)
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = FULL")
        self._db.executescript(_SCHEMA)
        self._check_columns(path)
        self._life = 0
        self._cursor = 0
        self._used: set[int] = set()

    def begin(self, *, step: int, now: float) -> int:
        """Open a life of the run that continues after `step`. Undoes what was trained later. Returns the life."""
        with self._db:
            (last,) = self._db.execute("SELECT COALESCE(MAX(life), 0) FROM lives").fetchone()
            self._life = last + 1
            self._db.execute("INSERT INTO lives VALUES (?, ?, ?)", (self._life, step, now))
            self._db.execute("UPDATE trained SET undone = ? WHERE step > ? AND undone = 0", (self._life, step))
        self._cursor, self._used = 0, set(self.consumed_positions())
        return self._life

    def next_position(self) -> int:
        """The first position that is neither used in this lineage nor given out in this life. O(1) amortised."""
        while self._cursor in self._used:
            self._used.discard(self._cursor)
            self._cursor += 1
        self._cursor += 1
        return self._cursor - 1

    def issue(self, position: int, group_id: str, task_id: str, version: int) -> None:
        """A group goes out to be played, at the version then in force. Raises sqlite3.IntegrityError when issued."""
        with self._db:
            self._db.execute(
                "INSERT INTO issued VALUES (?, ?, ?, ?, ?, 0)", (position, self._life, group_id, task_id, version)
            )

    def finish(self, position: int) -> None:
        """All episodes of the group are on the disk."""
        with self._db:
            self._db.execute("UPDATE issued SET finished = 1 WHERE position = ? AND life = ?", (position, self._life))

    def train(self, step: int, consumed: Sequence[Consumed]) -> None:
        """A step has used these groups, all or none. Raises sqlite3.IntegrityError when one was used before."""
        with self._db:
            self._db.executemany(
                "INSERT INTO trained VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, 0)",
                [
                    (
                        *(c.position, self._life, step, c.version, c.task_id, c.outcome),
                        *(c.sampled_tokens, c.invalid_tokens, c.truncated_tokens),
                    )
                    for c in consumed
                ],
            )

    def consumed_positions(self) -> list[int]:
        """Positions used in the lineage of the surviving weights, in order."""
        rows = self._db.execute("SELECT position FROM trained WHERE undone = 0 ORDER BY position")
        return [position for (position,) in rows]

    def consumed_tasks(self) -> list[tuple[int, str]]:
        """(position, task) of what was used in the lineage of the surviving weights, in order."""
        rows = self._db.execute("SELECT position, task_id FROM trained WHERE undone = 0 ORDER BY position")
        return [(position, task) for position, task in rows]

    def totals(self) -> dict[str, int]:
        """Groups and sampled tokens of the surviving lineage, by outcome; a token is counted once. Those of a
        trajectory without a verdict are invalid whatever became of its group, and those of one that was taken out of
        the loss because it was cut are truncated."""
        totals: dict[str, int] = {}
        rows = self._db.execute(
            "SELECT outcome, COUNT(*), SUM(sampled_tokens), SUM(invalid_tokens), SUM(truncated_tokens) "
            "FROM trained WHERE undone = 0 GROUP BY outcome"
        )
        for outcome, groups, tokens, invalid, cut in rows:
            totals[f"groups_{outcome}"] = groups
            for name, count in ((outcome, tokens - invalid - cut), ("invalid", invalid), ("truncated", cut)):
                if name == outcome or count:
                    totals[f"tokens_{name}"] = totals.get(f"tokens_{name}", 0) + count
        return totals

    def _check_columns(self, path: Path) -> None:
        for table, expected in _TABLES.items():
            found = tuple(name for _, name, *_ in self._db.execute(f"PRAGMA table_info({table})"))
            if found != expected:
                self._db.close()
                odd = ", ".join(sorted(set(found) ^ set(expected))) or "their order"
                raise IntegrityError(
                    f"{path}: a ledger of another version of this program: its table {table} differs in {odd}; go on "
                    "with the version that began the run, or choose another run.name"
                )

    def close(self) -> None:
        """Close the file."""
        self._db.close()
