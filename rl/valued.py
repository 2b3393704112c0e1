"""A step's judged trajectories with what the critic said of them, and who is continued beyond its end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from palestra.envs.errors import IntegrityError
from palestra.rl.algorithms.base import Credit, Float64, Measured
from palestra.rl.returns import EpsForm, whiten_step
from palestra.rollout.types import Group, TerminatedBy, Trajectory

Bootstrap = Literal["budgets", "none"]

GOES_ON = {
    TerminatedBy.DONE: False,
    TerminatedBy.PARSE_ERRORS: False,  # the policy's own doing, and its end
    TerminatedBy.STEPS: True,
    TerminatedBy.TOKENS: True,
    TerminatedBy.WALL_CLOCK: True,
    TerminatedBy.CONTEXT: True,
    TerminatedBy.INFRASTRUCTURE: False,  # without a verdict, so in no statistic
}
"""Whether an episode that ended for this reason would have gone on: then its last state is still worth something."""


@dataclass(frozen=True, slots=True)
class Valued:
    """values [sampled_tokens]: V before each token; bootstrap: V after the last; penalties [sampled_tokens] or None."""

    trajectory: Trajectory
    values: Float64
    bootstrap: float
    penalties: Float64 | None


Scheme = Callable[[Valued], tuple[Float64, Float64]]
"""Advantages and returns, [sampled_tokens] each, of one trajectory."""


def credit_by(
    scheme: Scheme,
    groups: Sequence[Group],
    measured: Measured | None,
    bootstrap: Bootstrap,
    whitening: tuple[int, float, EpsForm],
) -> list[Credit]:
    """The step's credit from a scheme for one trajectory: advantages whitened over all action tokens, returns not."""
    credits = []
    for group in valued(groups, measured, bootstrap):
        pairs = [None if one is None else scheme(one) for one in group]
        credits.append(
            Credit(
                advantages=tuple(None if pair is None else pair[0] for pair in pairs),
                returns=tuple(None if pair is None else pair[1] for pair in pairs),
                values=tuple(None if one is None else one.values for one in group),
            )
        )
    return whiten_step(credits, *whitening)


def valued(groups: Sequence[Group], measured: Measured | None, bootstrap: Bootstrap) -> list[list[Valued | None]]:
    """[group][trajectory]; None without a verdict. Raises ValueError when nobody measured values."""
    if measured is None or measured.values is None or measured.last_values is None:
        raise ValueError("an algorithm with a critic credits with its values; measure them first (rl/values.py)")
    found: list[list[Valued | None]] = []
    for g, group in enumerate(groups):
        nobody: tuple[None, ...] = (None,) * len(group.trajectories)
        penalties = nobody if measured.penalties is None else measured.penalties[g]
        streams = zip(group.trajectories, measured.values[g], measured.last_values[g], penalties, strict=True)
        found.append([_valued(*stream, bootstrap) for stream in streams])
    return found


def _valued(
    trajectory: Trajectory, values: Float64 | None, last: float | None, penalties: Float64 | None, bootstrap: Bootstrap
) -> Valued | None:
    if trajectory.reward is None:
        return None
    if values is None or len(values) != trajectory.sampled_tokens:
        found = "none" if values is None else str(len(values))
        raise IntegrityError(
            f"trajectory {trajectory.id}: values for {found} tokens, but the policy sampled {trajectory.sampled_tokens}"
        )
    ahead = 0.0
    if bootstrap == "budgets" and GOES_ON[trajectory.terminated_by]:
        if last is None:
            raise IntegrityError(f"trajectory {trajectory.id} was cut, and nobody measured what it was still worth")
        ahead = last
    return Valued(trajectory, values, ahead, penalties)
