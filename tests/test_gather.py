"""Which groups a step is given: in the order of their tasks, and only those that teach something when asked for."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from learning_support import group, rewarded
from palestra.envs.errors import PalestraError
from palestra.envs.types import NoVerdict, Scored
from palestra.rl.counted import Counting, credited
from palestra.rl.dynamic_sampling import informative
from palestra.rl.gather import Gathered, GatherSettings, gather
from palestra.rl.load_config import parse_config
from palestra.rl.loop_settings import loop_settings
from palestra.rollout.types import Group, Trajectory
from turn_support import played


class Hand:
    """Hands out groups in order, and remembers how it was asked."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self.groups, self.asked = list(groups), list[tuple[int, bool]]()

    async def take(self, count: int, *, replacing: bool = False) -> list[Group]:
        self.asked.append((count, replacing))
        taken, self.groups = self.groups[:count], self.groups[count:]
        return taken


def with_outcomes(*rewards: Sequence[float | None]) -> list[Group]:
    return [rewarded(f"g{i}", of_group) for i, of_group in enumerate(rewards)]


SOLVED, FAILED, MIXED = [1.0, 1.0], [0.0, 0.0], [1.0, 0.0]


def gathered(hand: Hand, counting: Counting | None = None, **settings: object) -> Gathered:
    values: dict[str, object] = {"groups_per_step": 2, "dynamic_sampling": True, "max_refills": 4} | settings
    return asyncio.run(gather(hand, GatherSettings(**values), counting or Counting()))  # type: ignore[arg-type]


def test_groups_without_difference_are_replaced_by_the_next_tasks_in_order() -> None:
    hand = Hand(with_outcomes(SOLVED, MIXED, FAILED, MIXED, MIXED))
    found = gathered(hand)
    assert [g.id for g in found.used] == ["g1", "g3"]
    assert found.fates == ("filtered", "used", "filtered", "used")
    assert hand.asked == [(2, False), (1, True), (1, True)]
    assert [g.id for g in hand.groups] == ["g4"]  # never more than is missing: nothing informative is thrown away


def test_without_dynamic_sampling_every_group_is_used() -> None:
    assert gathered(Hand(with_outcomes(SOLVED, FAILED)), dynamic_sampling=False).fates == ("used", "used")


def test_refills_are_capped_and_what_happens_then_is_declared() -> None:
    flat = with_outcomes(MIXED, *[SOLVED] * 9)
    found = gathered(Hand(flat))
    assert [g.id for g in found.used] == ["g0"]
    assert len(found.groups) == 2 + 4
    with pytest.raises(PalestraError, match="1 of 2 groups are informative after 4 refills"):
        gathered(Hand(flat), when_uninformative="fail")
    assert gathered(Hand(with_outcomes(MIXED, SOLVED))).used  # the run is at its end: nothing is left to refill with


def test_the_filter_looks_at_the_outcome_and_not_at_the_shaped_reward() -> None:
    """Lengths differ in every group, so any group looks informative once length costs something."""
    same = rewarded("g0", [1.0, 1.0], [2, 40])
    counting = Counting(overlong_tokens=40, overlong_cache=20, token_cost=0.01)
    rewards = [t.reward for t in credited(same, counting).trajectories]
    assert rewards[0] != rewards[1]
    assert gathered(Hand([same]), counting, groups_per_step=1, max_refills=0).fates == ("filtered",)


def test_the_filter_sees_what_turns_earned_wherever_they_earned_it() -> None:
    early, late = played("a", [2, 2], 0.0, rewards=[1.0, 0.0]), played("b", [2, 2], 0.0, rewards=[0.0, 1.0])
    short, long = played("c", [2], 0.0), played("d", [2, 2, 2], 0.0)
    assert informative(group("g", [early, late]))  # the same in all, but not from the same turn on
    assert not informative(group("g", [early, early]))
    assert not informative(group("g", [short, long]))  # two lengths alone are no difference
    assert not informative(group("g", [early, replace(late, verdict=NoVerdict("broken"))]))


def test_what_must_differ_is_what_the_algorithm_learns_from() -> None:
    def of(name: str, value: float, correct: float, brief: float) -> Trajectory:
        verdict = Scored(value, {"correct": correct, "brief": brief})
        return replace(played(name, [2], value), verdict=verdict)

    mixed = group("g", [of("a", 1.0, 1.0, 0.0), of("b", 1.0, 0.0, 1.0)])  # equal in sum, different in parts
    equal = group("h", [of("a", 1.0, 1.0, 0.0), of("b", 0.0, 1.0, 0.0)])
    assert gathered(Hand([mixed, equal]), max_refills=0).fates == ("filtered", "used")
    parts = ("correct", "brief")
    assert gathered(Hand([mixed, equal]), max_refills=0, objectives=parts).fates == ("used", "filtered")
    config = parse_config({"algorithm": {"name": "gdpo", "objectives": {"correct": 1.0, "brief": 0.5}}}, "test")
    assert loop_settings(config).gather.objectives == parts


def test_a_group_with_too_few_verdicts_is_not_used() -> None:
    groups = with_outcomes([1.0, 0.0, None], [1.0, None, None], [1.0, 0.0, 0.5])
    found = gathered(Hand(groups), groups_per_step=2, min_group_size=2)
    assert found.fates == ("used", "invalid", "used")
    found = gathered(Hand(groups), groups_per_step=3, min_group_size=3, dynamic_sampling=False)
    assert found.fates == ("invalid", "invalid", "used")
