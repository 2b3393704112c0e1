"""The worked example of docs/toy.md, run: it learns the four actions, and with a price that is too high it guesses."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

PAGE = Path(__file__).resolve().parents[1] / "docs" / "toy.md"


@pytest.fixture(scope="module")
def toy() -> dict[str, Any]:
    """What the page's program defines."""
    (source,) = re.findall(r"```python toy\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(source.splitlines()) < 80
    space: dict[str, Any] = {"__name__": "toy"}
    exec(compile(source, str(PAGE), "exec"), space)
    return space


def ends(toy: dict[str, Any], cost: float, seed: int, start: object = 0.0) -> tuple[list[str], float]:
    """What the agent does after learning, and what it earns with it."""
    table = toy["learn"](cost, seed, start)
    return toy["favourite"](table), toy["mean_return"](table, cost)


@pytest.mark.parametrize("seed", [0, 1])
def test_it_learns_the_four_actions_in_their_order(toy: dict[str, Any], seed: int) -> None:
    words, earned = ends(toy, 0.05, seed)
    assert sorted(words[:2]) == ["look up first", "look up second"]
    assert words[2:] == ["add", "answer"]
    assert earned == pytest.approx(0.8, abs=0.02)


@pytest.mark.parametrize("start", ["nothing", "imitated"])
def test_at_a_cost_of_a_fifth_it_guesses(toy: dict[str, Any], start: str) -> None:
    words, earned = ends(toy, 0.2, 0, toy["imitated"]() if start == "imitated" else 0.0)
    assert words == ["answer"]
    assert earned == pytest.approx(0.3, abs=0.05)


def test_between_the_two_only_imitation_finds_the_better_way(toy: dict[str, Any]) -> None:
    assert ends(toy, 0.1, 0)[0] == ["answer"]
    words, earned = ends(toy, 0.1, 0, toy["imitated"]())
    assert words == ["look up first", "look up second", "add", "answer"]
    assert earned == pytest.approx(0.6, abs=0.03)


def always(toy: dict[str, Any], *actions: str) -> Callable[[float], float]:
    """The mean return of a policy that takes these actions, by the price of a step."""
    table, state = np.zeros((8, 4)), 0
    for action in actions:
        index = toy["WORDS"].index(action)
        table[state, index] = 50.0
        state = toy["step"](state, index)
    return lambda cost: float(toy["mean_return"](table, cost, episodes=4000))


def test_the_page_s_arithmetic_is_that_of_its_program(toy: dict[str, Any]) -> None:
    honest = always(toy, "look up first", "look up second", "add", "answer")
    lazy, half = always(toy, "answer"), always(toy, "look up first", "answer")
    for cost in (0.05, 0.1, 0.2):
        assert honest(cost) == pytest.approx(1 - 4 * cost)
        assert lazy(cost) == pytest.approx(0.5 - cost, abs=0.03)
        assert half(cost) == pytest.approx(0.5 - 2 * cost, abs=0.03)
    assert honest(0.16) > lazy(0.16)
    assert honest(0.2) < lazy(0.2)
    shown = re.findall(
        r"^\| (guess at once|look up, look up, add, answer) \|.*\| ([^|]*) \| ([^|]*) \| ([^|]*) \|$",
        PAGE.read_text(),
        re.MULTILINE,
    )
    assert [[float(value.strip("*")) for value in row[1:]] for row in shown] == [[0.45, 0.4, 0.3], [0.8, 0.6, 0.2]]
