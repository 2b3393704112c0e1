"""Environments by name: ours, anyone's, and what a wrong name or option is told."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from palestra.envs.builtin.arithmetic import Arithmetic
from palestra.envs.errors import ConfigError
from palestra.envs.load import find_taskset, load_taskset


def test_a_short_name_and_the_dotted_path_behind_it_are_the_same() -> None:
    assert find_taskset("arithmetic") is find_taskset("palestra.envs.builtin.arithmetic:Arithmetic") is Arithmetic


def test_options_reach_the_taskset() -> None:
    assert load_taskset("arithmetic", {"seed": 3, "digits": 1, "step_cost": 0}) == Arithmetic(
        seed=3, digits=1, step_cost=0
    )


@pytest.fixture
def own_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_tasks.py").write_text(
        "from palestra.envs.builtin.arithmetic import Arithmetic\n"
        "def load(*, level: int, hard: bool = False):\n    return Arithmetic(seed=level)\n"
        "class Own:\n    def __init__(self, level: int = 1):\n        self.level = level\n"
        "number = 7\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("own_tasks", None)


@pytest.mark.usefixtures("own_package")
def test_a_function_or_class_of_one_s_own_package_needs_no_registration() -> None:
    assert load_taskset("own_tasks:load", {"level": 5}) == Arithmetic(seed=5)
    assert load_taskset("own_tasks:Own", {"level": 2}).level == 2  # type: ignore[attr-defined]


@pytest.mark.usefixtures("own_package")
@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("arithmetik", {}, "did you mean 'arithmetic'"),
        ("nothing", {}, "; your own is a path 'package.module:function'"),
        ("no_such_package.tasks:load", {}, "No module named 'no_such_package'"),
        ("own_tasks:lode", {}, "own_tasks has no 'lode'"),
        ("own_tasks:number", {}, "is int; expected a function"),
        ("own_tasks:load", {}, "missing a required argument: 'level'"),
        ("own_tasks:load", {"level": 1, "herd": True}, "no option 'herd' (did you mean 'hard'?). Have: level, hard"),
        ("own_tasks:load", {"level": "1"}, "option level is '1': Input should be a valid integer"),
        ("own_tasks:load", {"level": True}, "option level is True"),
        ("own_tasks:Own", {"level": 1.5}, "option level is 1.5"),
        ("arithmetic", {"digits": 9}, "digits is 9; use 1 to 8"),
        ("arithmetic", {"train_facts": 1}, "train_facts and test_facts are 1 and 500"),
        ("arithmetic", {"test_facts": 3, "test_tasks": 7}, "test_tasks is 7; use 1 to 6, the pairs of 3 test_facts"),
        ("arithmetic", {"step_cost": -0.1}, "step_cost is -0.1"),
        ("gsm8k", {"tool_credit": 0.5, "number_credit": 0.5}, "is 1; use 0 or more each and less than 1 together"),
        ("gsm8k", {"train_tasks": 0}, "train_tasks is 0"),
    ],
)
def test_a_wrong_name_or_option_is_a_clear_sentence(name: str, options: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_taskset(name, options)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
