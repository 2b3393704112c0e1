"""What a set of episodes says: success first, then what it cost and how the others failed."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from palestra.envs.types import CallStatus, NoVerdict
from palestra.rl.statistics import Interval, clustered_interval, pass_at
from palestra.rollout.types import TerminatedBy, Trajectory

MAX_KIND = 40  # characters of the name of a cause
SOLVED = 1.0 - 1e-9  # an outcome of 1 is a success; graded parts below it are not


@dataclass(frozen=True, slots=True)
class Report:
    """The figures of one evaluation. Rates are in [0, 1].

    `success` is the headline: an episode without a verdict counts as not solved, so that it cannot rise when machines
    fail. `success_valid` leaves such episodes out; the two are equal when `validity` is 1. What follows `invalid` is of
    valid episodes, None when there are none.
    """

    success: Interval
    success_valid: Interval | None
    validity: float  # share of episodes with a verdict
    pass_at: dict[int, float]  # k -> chance that one of k samples solves the task, over all tasks
    episodes: int
    invalid: int
    reward_mean: float | None
    versions: tuple[int, ...]  # of the weights that really sampled, as the engine stamped them
    temperature: float | None  # that every token was sampled with, 0 for greedy; None: nothing was, or with several
    tokens_per_episode: float | None
    calls_per_episode: float | None
    steps_to_success: float | None
    recovery_rate: float | None  # of episodes with a failed call, those that still succeeded
    seconds_per_episode: float | None
    failures: dict[str, int]
    no_verdicts: dict[str, int]  # by cause
    flagged: int = 0  # episodes with signs of tampering
    flags: dict[str, int] = field(default_factory=dict)  # by sign


def report(trajectories: Sequence[Trajectory]) -> Report:
    """Figures of the given episodes. Raises ValueError when there are none."""
    valid = [t for t in trajectories if t.valid]
    troubled = [t for t in valid if any(r.status is not CallStatus.OK for turn in t.turns for r in turn.results)]
    versions = {int(v) for t in trajectories for s in t.samples for v in np.unique(s.version[s.sampled])}
    sampled_at = {
        round(float(v), 6) for t in trajectories for s in t.samples for v in np.unique(s.temperature[s.sampled])
    }
    by_task = _by_task(trajectories)
    return Report(
        success=clustered_interval(by_task),
        success_valid=clustered_interval(_by_task(valid)) if valid else None,
        validity=len(valid) / len(trajectories),
        pass_at=pass_at(by_task),
        episodes=len(trajectories),
        invalid=len(trajectories) - len(valid),
        reward_mean=_mean([t.reward for t in valid if t.reward is not None]),
        versions=tuple(sorted(versions)),
        temperature=sampled_at.pop() if len(sampled_at) == 1 else None,
        tokens_per_episode=_mean([t.sampled_tokens for t in valid]),
        calls_per_episode=_mean([sum(len(turn.results) for turn in t.turns) for t in valid]),
        steps_to_success=_mean([len(t.turns) for t in valid if solved(t)]),
        recovery_rate=_mean([solved(t) for t in troubled]),
        seconds_per_episode=_mean([t.seconds for t in valid]),
        failures=dict(Counter(failure(t) for t in trajectories if not solved(t))),
        no_verdicts=no_verdicts(trajectories),
        flagged=sum(bool(t.verdict.flags) for t in trajectories),
        flags=flags(trajectories),
    )


def no_verdicts(trajectories: Sequence[Trajectory]) -> dict[str, int]:
    """How many episodes have no verdict, by the kind of the cause: a machine, or what the judge said of itself."""
    return dict(Counter(_kind(t) for t in trajectories if not t.valid))


def flags(trajectories: Sequence[Trajectory]) -> dict[str, int]:
    """How many episodes carry each sign of tampering."""
    return dict(Counter(flag for t in trajectories for flag in t.verdict.flags))


def discarded_tokens(trajectories: Sequence[Trajectory]) -> int:
    """Sampled in tries of these episodes that a machine's failure ended, and that are in no record."""
    return sum(int(t.facts.get("discarded_tokens", 0)) for t in trajectories)


def _kind(trajectory: Trajectory) -> str:
    if trajectory.terminated_by is TerminatedBy.INFRASTRUCTURE or not isinstance(trajectory.verdict, NoVerdict):
        return TerminatedBy.INFRASTRUCTURE.value
    # what stands behind is of one episode: values, deadlines, names of tasks
    return re.split("[:(;,]", trajectory.verdict.cause, maxsplit=1)[0].strip()[:MAX_KIND] or "unknown"


def _by_task(trajectories: Sequence[Trajectory]) -> dict[str, list[float]]:
    by_task: dict[str, list[float]] = {}
    for t in trajectories:
        by_task.setdefault(t.task_id, []).append(float(solved(t)))
    return by_task


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None


def solved(trajectory: Trajectory) -> bool:
    """Whether the raw outcome is a success."""
    return trajectory.reward is not None and trajectory.reward >= SOLVED


def failure(trajectory: Trajectory) -> str:
    """The kind of a failed episode, the first that applies."""
    if not trajectory.valid:
        return "no_verdict"
    if trajectory.terminated_by is TerminatedBy.PARSE_ERRORS:
        return "malformed_calls"
    if trajectory.terminated_by is not TerminatedBy.DONE:
        return f"budget_{trajectory.terminated_by.value}"
    statuses = {result.status for turn in trajectory.turns for result in turn.results}
    if CallStatus.UNKNOWN_TOOL in statuses:
        return "wrong_tool"
    if CallStatus.INVALID_ARGUMENTS in statuses:
        return "wrong_arguments"
    if CallStatus.ERROR in statuses or CallStatus.TIMEOUT in statuses:
        return "tool_failure"
    return "wrong_answer"
