"""The groups of one step: taken in the order of their tasks, sorted by what they are good for, refilled when asked.

Who is dropped depends on outcomes, who comes next does not: refills are the next positions of the run's order of tasks,
in that order, however long each takes. So slow tasks are learned from as often as fast ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from palestra.envs.errors import PalestraError
from palestra.rl.counted import Counting, counted
from palestra.rl.dynamic_sampling import informative
from palestra.rollout.types import Group

Fate = Literal["used", "filtered", "invalid"]


class Takes(Protocol):
    """The collector, as far as a step sees it."""

    async def take(self, count: int, *, replacing: bool = False) -> list[Group]:
        """The `count` oldest groups that are finished; `replacing` when they stand in for dropped ones."""
        ...


@dataclass(frozen=True, slots=True)
class GatherSettings:
    """How many groups a step wants, and which ones do not count."""

    groups_per_step: int
    min_group_size: int = 1
    dynamic_sampling: bool = False
    max_refills: int = 0
    when_uninformative: Literal["train_fewer", "fail"] = "train_fewer"
    objectives: tuple[str, ...] = ()
    """Parts of a verdict that the algorithm learns from instead of its value; none: the value."""


@dataclass(frozen=True, slots=True)
class Gathered:
    """All groups that a step took, in the order of their positions, and what becomes of each.

    "used": learned from; "filtered": every episode had the same outcome; "invalid": too few verdicts to compare.
    """

    groups: tuple[Group, ...]
    fates: tuple[Fate, ...]

    @property
    def used(self) -> list[Group]:
        """The groups that credit is given to."""
        return [group for group, fate in zip(self.groups, self.fates, strict=True) if fate == "used"]

    @property
    def refills(self) -> int:
        """How many were dropped for others, or would have been."""
        return sum(fate != "used" for fate in self.fates)


async def gather(collector: Takes, settings: GatherSettings, counting: Counting) -> Gathered:
    """The groups of one step. Raises PalestraError when refills are spent and the settings say to fail then."""
    groups = await collector.take(settings.groups_per_step)
    fates = [fate(group, settings, counting) for group in groups]
    while settings.dynamic_sampling and (missing := settings.groups_per_step - fates.count("used")):
        left = settings.max_refills - (len(groups) - settings.groups_per_step)
        more = await collector.take(min(missing, left), replacing=True) if left > 0 else []
        if not more:
            _spent(settings, fates)
            break
        groups += more
        fates += [fate(group, settings, counting) for group in more]
    return Gathered(tuple(groups), tuple(fates))


def fate(group: Group, settings: GatherSettings, counting: Counting) -> Fate:
    """What becomes of a group, by the outcomes as they were judged."""
    seen = counted(group, counting)
    if sum(trajectory.valid for trajectory in seen.trajectories) < settings.min_group_size:
        return "invalid"
    if settings.dynamic_sampling and not informative(seen, settings.objectives):
        return "filtered"
    return "used"


def _spent(settings: GatherSettings, fates: Sequence[Fate]) -> None:
    if settings.when_uninformative == "fail":
        raise PalestraError(
            f"{fates.count('used')} of {settings.groups_per_step} groups are informative after {settings.max_refills} "
            "refills (algorithm.max_refills): in the others all episodes had the same outcome. Use easier or harder "
            'tasks, a larger rollout.group_size, more refills, or algorithm.when_uninformative = "train_fewer"'
        )
