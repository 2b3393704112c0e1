"""What a step makes of its groups before credit: who counts, and for what reward.

Credit is given for a view of the groups. The groups themselves, with the outcome as it was judged, stay what they were
for dynamic sampling, for metrics, for evaluations and for the records.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from palestra.envs.types import NoVerdict, Scored
from palestra.rl.algorithms.base import Credit, Float64
from palestra.rl.config import Config
from palestra.rl.shaping import soft_overlong
from palestra.rollout.types import Group, TerminatedBy, Trajectory

Truncated = Literal["keep", "mask", "exclude"]
Streams = tuple[Float64 | None, ...]

CUT = (TerminatedBy.STEPS, TerminatedBy.TOKENS, TerminatedBy.WALL_CLOCK, TerminatedBy.CONTEXT)
"""Budgets that end an episode which would have gone on. Unreadable turns are the policy's doing, and always count."""


@dataclass(frozen=True, slots=True)
class Counting:
    """Settings. `truncated` is what becomes of an episode that a budget cut. "keep": it counts with its reward;
    "mask": it is in its group's baseline but not in the loss; "exclude": it is in neither."""

    truncated: Truncated = "keep"
    overlong_tokens: int | None = None
    overlong_cache: int = 0
    step_cost: float = 0.0
    token_cost: float = 0.0

    @property
    def shapes(self) -> bool:
        """Whether the reward that is credited differs from the outcome."""
        return self.overlong_tokens is not None or self.step_cost > 0 or self.token_cost > 0


def counting(config: Config) -> Counting:
    """Of a configuration."""
    algorithm = config.algorithm
    return Counting(
        config.rollout.truncated,
        algorithm.overlong_tokens,
        algorithm.overlong_cache,
        algorithm.step_cost,
        algorithm.token_cost,
    )


def cut(trajectory: Trajectory) -> bool:
    """Whether a budget ended the episode: by the recorded reason, never by what its last token was."""
    return trajectory.terminated_by in CUT


def leaves(trajectory: Trajectory, settings: Counting) -> bool:
    """Whether a judged trajectory is kept out of the loss because it was cut."""
    return settings.truncated != "keep" and trajectory.valid and cut(trajectory)


def counted(group: Group, settings: Counting) -> Group:
    """The group with the outcomes that count: with "exclude", what was cut has none."""
    if settings.truncated != "exclude":
        return group
    return replace(
        group,
        trajectories=tuple(
            replace(t, verdict=NoVerdict(f"cut: {t.terminated_by.value}")) if leaves(t, settings) else t
            for t in group.trajectories
        ),
    )


def reductions(trajectory: Trajectory, settings: Counting) -> dict[str, float]:
    """What is taken off a trajectory's outcome, by cause; lengths and costs look at its own tokens and turns alone."""
    parts: dict[str, float] = {}
    if settings.overlong_tokens is not None:
        parts["overlong"] = -soft_overlong(trajectory.sampled_tokens, settings.overlong_tokens, settings.overlong_cache)
    if settings.step_cost:
        parts["step_cost"] = settings.step_cost * len(trajectory.turns)
    if settings.token_cost:
        parts["token_cost"] = settings.token_cost * trajectory.sampled_tokens
    return parts


def credited(group: Group, settings: Counting) -> Group:
    """The view that credit is given for: who counts, with the reward that is to be earned.

    What was taken off is in the parts of the verdict, as negative numbers.
    """
    group = counted(group, settings)
    if not settings.shapes:
        return group
    return replace(group, trajectories=tuple(_reduced(t, settings) for t in group.trajectories))


def _reduced(trajectory: Trajectory, settings: Counting) -> Trajectory:
    verdict = trajectory.verdict
    if not isinstance(verdict, Scored):
        return trajectory
    parts = {name: -amount for name, amount in reductions(trajectory, settings).items()}
    return replace(trajectory, verdict=Scored(verdict.value + sum(parts.values()), {**verdict.parts, **parts}))


def trained(group: Group, credit: Credit, settings: Counting) -> Credit:
    """The credit without the trajectories that are in the baseline but not in the loss."""
    if settings.truncated != "mask" or not any(leaves(t, settings) for t in group.trajectories):
        return credit
    out = [leaves(t, settings) for t in group.trajectories]

    def kept(streams: Streams) -> Streams:
        return tuple(None if gone else stream for gone, stream in zip(out, streams, strict=True))

    return Credit(
        kept(credit.advantages),
        None if credit.returns is None else kept(credit.returns),
        None if credit.values is None else kept(credit.values),
    )
