"""What a configuration gets wrong is said before anything starts, and one episode asks for nothing but itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from palestra.envs.environment import Taskset
from palestra.envs.errors import ConfigError
from palestra.rl.commands.play import for_one_episode
from palestra.rl.json_file import check_json_file
from palestra.rl.load_config import parse_config
from palestra.rl.preflight import check


def broken(taskset: Taskset) -> object:
    raise RuntimeError("boom")


def no_judge(taskset: Taskset) -> object:
    return None


def same_judge(taskset: Taskset) -> object:
    return taskset.verifier()


def small(**sections: object) -> dict[str, object]:
    return {"run": {"groups_per_step": 2}, "evaluation": {"tasks": 2}, **sections}


def with_second(name: str) -> dict[str, object]:
    return small(environment={"name": "arithmetic", "second_verifier": {"name": f"test_preflight:{name}"}})


@pytest.mark.parametrize(
    ("name", "said"), [("broken", "RuntimeError: boom"), ("no_judge", "gives a NoneType"), ("absent", "AttributeError")]
)
def test_a_second_verifier_that_is_none_is_refused_before_the_start(name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"second_verifier .*{said}"):
        check(parse_config(with_second(name), "test"))


def test_a_second_verifier_that_is_one_passes() -> None:
    assert check(parse_config(with_second("same_judge"), "test")).num_train > 0


@pytest.mark.parametrize("path", ["/nonexistent/model", "./nonexistent", "~/nonexistent"])
def test_a_model_folder_that_is_not_there_is_refused_also_by_a_dry_run(path: str) -> None:
    with pytest.raises(ConfigError, match="no such folder"):
        check(parse_config(small(model={"path": path}), "test"))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_an_option_of_an_environment_is_a_finite_number(value: float) -> None:
    with pytest.raises(ConfigError, match="use a finite number"):
        check(parse_config(small(environment={"name": "arithmetic", "options": {"call_reward": value}}), "test"))


def test_one_scripted_episode_needs_no_training_and_no_evaluation() -> None:
    start = {"demonstrations": 5, "train": "full"}
    config = parse_config({"evaluation": {"tasks": 10**9}, "warm_start": start}, "test")
    one = for_one_episode(config, "scripted")
    assert check(one).config.warm_start.demonstrations == 0
    assert for_one_episode(config, "model").warm_start.demonstrations == 5
    with pytest.raises(ConfigError, match="held-out tasks"):
        check(config)


def test_a_file_that_cannot_be_written_is_refused_before_the_work(tmp_path: Path) -> None:
    check_json_file(None)
    check_json_file(tmp_path / "x.json")
    for path in (tmp_path, tmp_path / "absent" / "x.json"):
        with pytest.raises(ConfigError, match="cannot be written"):
            check_json_file(path)
