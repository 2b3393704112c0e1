"""Where every group and every sampled token of a step went: one row per group, for the ledger and for the metrics."""

from __future__ import annotations

from collections.abc import Sequence

from palestra.envs.errors import IntegrityError
from palestra.rl.algorithms.base import Algorithm, Credit
from palestra.rl.counted import Counting, leaves
from palestra.rl.gather import Gathered
from palestra.rl.ledger import Consumed
from palestra.rl.step import Learned
from palestra.rollout.types import Group, Trajectory

OUTCOMES = {
    "trained": "trained",
    "no_signal": "without_signal",
    "filtered": "filtered",
    "invalid": "invalid",
    "truncated": "truncated",
}


def consumed(gathered: Gathered, learned: Learned, algorithm: Algorithm, counting: Counting) -> list[Consumed]:
    """What the ledger is told of each group. Raises IntegrityError when other tokens than it knows of were trained."""
    credits = iter(learned.credits)
    rows = []
    for group, fate in zip(gathered.groups, gathered.fates, strict=True):
        if fate == "used":
            rows.append(_used(group, next(credits), algorithm, counting))
        else:
            rows.append(_row(group, fate))
    trained = token_counts(rows)["trained"]
    if trained != learned.action_tokens:
        raise IntegrityError(
            f"token accounting does not add up: {learned.action_tokens} tokens are in the rows of this step, but its "
            f"groups have {trained} to be trained on"
        )
    return rows


def token_counts(rows: Sequence[Consumed]) -> dict[str, int]:
    """Sampled tokens by what became of them; each is counted once, so the values add up to all."""
    counts = dict.fromkeys(OUTCOMES.values(), 0)
    for row in rows:
        counts[OUTCOMES[row.outcome]] += row.sampled_tokens - row.invalid_tokens - row.truncated_tokens
        counts["invalid"] += row.invalid_tokens
        counts["truncated"] += row.truncated_tokens
    return counts


def oldest_version(episodes: Sequence[Trajectory]) -> int | None:
    """Of the weights that sampled any of the tokens; None: nothing was sampled."""
    oldest = [int(s.version[s.sampled].min()) for t in episodes for s in t.samples if s.sampled.any()]
    return min(oldest, default=None)


def _used(group: Group, credit: Credit, algorithm: Algorithm, counting: Counting) -> Consumed:
    learned = credit.signal or algorithm.objective.learns_without_signal
    credited = sum(stream is not None for stream in credit.advantages)
    valid = sum(trajectory.valid for trajectory in group.trajectories)
    truncated = sum(t.sampled_tokens for t in group.trajectories if leaves(t, counting))
    return _row(group, "trained" if learned and credited else "no_signal" if valid > 1 else "invalid", truncated)


def _row(group: Group, outcome: str, truncated: int = 0) -> Consumed:
    tokens = sum(t.sampled_tokens for t in group.trajectories)
    invalid = sum(t.sampled_tokens for t in group.trajectories if not t.valid)
    oldest = oldest_version(group.trajectories)
    position, version = int(group.id.removeprefix("g")), -1 if oldest is None else oldest
    return Consumed(position, group.task_id, version, outcome, tokens, invalid, truncated)
