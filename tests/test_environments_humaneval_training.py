"""Whoever cheats on humaneval_repair earns 0 and whoever repairs earns 1, in real groups of a real training loop."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from repair_policies import CHEATS
from repair_training import GROUP, HONEST, Outcomes, train
from tests_support import data_folder, require


def trained(folder: Path, monkeypatch: pytest.MonkeyPatch, tasks: int, groups_per_step: int) -> Outcomes:
    require("data")
    require("bwrap")
    monkeypatch.setenv("PALESTRA_DATA", str(data_folder()))
    return train(folder, tasks, groups_per_step)


def check(outcomes: Outcomes, tasks: int, steps: int) -> None:
    assert outcomes.wrong() == []
    policies = Counter(policy for _, policy, _, _ in outcomes.rewards)
    assert policies[HONEST] == 2 * tasks
    assert sum(policies.values()) == GROUP * tasks
    assert set(policies) == {HONEST, *CHEATS}, "every way of cheating was tried"
    assert (outcomes.steps, outcomes.moved, outcomes.leaked) == (steps, True, 0)


def test_ten_functions_train_on_honest_repairs_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check(trained(tmp_path, monkeypatch, tasks=10, groups_per_step=5), 10, steps=2)


@pytest.mark.endurance
def test_a_hundred_functions_train_on_honest_repairs_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check(trained(tmp_path, monkeypatch, tasks=100, groups_per_step=10), 100, steps=10)
