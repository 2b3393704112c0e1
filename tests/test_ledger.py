"""The ledger accounts for every task, also when a run dies."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from palestra.rl.ledger import Consumed, Ledger
from palestra.rl.order import TaskOrder


def consumed(position: int) -> Consumed:
    return Consumed(position, f"task{position}", version=0, outcome="trained", sampled_tokens=10)


def step(ledger: Ledger, number: int, groups: int) -> list[int]:
    positions = [ledger.next_position() for _ in range(groups)]
    for position in positions:
        ledger.issue(position, f"g{position}", f"task{position}", version=number - 1)
        ledger.finish(position)
    ledger.train(number, [consumed(position) for position in positions])
    return positions


def test_a_position_is_trained_once(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    ledger.begin(step=0, now=0.0)
    step(ledger, 1, 3)
    with pytest.raises(sqlite3.IntegrityError):
        ledger.train(2, [consumed(1)])
    assert ledger.consumed_positions() == [0, 1, 2]


def test_a_step_is_recorded_whole_or_not_at_all(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    ledger.begin(step=0, now=0.0)
    step(ledger, 1, 1)
    with pytest.raises(sqlite3.IntegrityError):
        ledger.train(2, [consumed(5), consumed(0)])
    assert ledger.consumed_positions() == [0]


def test_what_was_trained_after_the_checkpoint_is_done_again(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    ledger = Ledger(path)
    ledger.begin(step=0, now=0.0)
    for number in (1, 2, 3):
        step(ledger, number, 2)
    ledger.close()
    ledger = Ledger(path)
    assert ledger.begin(step=2, now=1.0) == 2
    assert ledger.consumed_positions() == [0, 1, 2, 3]
    assert step(ledger, 3, 2) == [4, 5]
    assert ledger.totals() == {"groups_trained": 6, "tokens_trained": 60}


@given(
    groups=st.integers(1, 3),
    deaths=st.lists(st.tuples(st.integers(1, 4), st.booleans()), max_size=4),
    every=st.integers(1, 3),
)
@settings(max_examples=40, deadline=None)
def test_any_sequence_of_deaths_leaves_each_task_once(
    tmp_path_factory: pytest.TempPathFactory, groups: int, deaths: list[tuple[int, bool]], every: int
) -> None:
    """A life trains some steps, may issue more, and dies; the next goes on from the last checkpoint."""
    path = tmp_path_factory.mktemp("ledger") / "ledger.sqlite"
    done = saved = 0
    for steps, in_the_middle in [*deaths, (4, False)]:
        ledger = Ledger(path)
        ledger.begin(step=saved, now=0.0)
        done = saved
        for _ in range(steps):
            done += 1
            step(ledger, done, groups)
            saved = done if done % every == 0 else saved
        if in_the_middle:
            position = ledger.next_position()
            ledger.issue(position, f"g{position}", "task", version=done)
        ledger.close()
    ledger = Ledger(path)
    assert ledger.consumed_positions() == list(range(done * groups))


def test_an_order_of_a_trillion_tasks_costs_nothing() -> None:
    order = TaskOrder(10**12, seed=1)
    indices = [order.index(position) for position in range(1000)]
    assert len(set(indices)) == 1000
    assert all(0 <= index < 10**12 for index in indices)
    assert max(indices) > 10**11


@given(tasks=st.integers(1, 30), seed=st.integers(0, 5), epochs=st.integers(1, 3))
def test_every_task_comes_once_per_epoch(tasks: int, seed: int, epochs: int) -> None:
    order = TaskOrder(tasks, seed)
    for epoch in range(epochs):
        assert sorted(order.index(epoch * tasks + i) for i in range(tasks)) == list(range(tasks))


def test_the_order_does_not_depend_on_where_one_starts() -> None:
    whole = TaskOrder(7, seed=3)
    first = [whole.index(position) for position in range(30)]
    assert [TaskOrder(7, seed=3).index(position) for position in range(29, -1, -1)] == first[::-1]
    assert [TaskOrder(7, seed=4).index(position) for position in range(30)] != first
