"""A wrong configuration is one clear sentence and exit code 2."""

from __future__ import annotations

from pathlib import Path

import pytest

from palestra.envs.errors import ConfigError
from palestra.rl.config import Config, Section
from palestra.rl.load_config import differences, load_config, parse_config, to_toml
from palestra.rl.preflight import check


def write(folder: Path, text: str) -> Path:
    path = folder / "c.toml"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("text", "overrides", "words"),
    [
        ("[optimizer]\nlearning_rat = 1e-3", [], ["'learning_rat'", "[optimizer]", "'learning_rate'"]),
        ("[run]\ngroup_size = 4", [], ["'group_size'", "[run]", "rollout.group_size"]),
        ("[rollout]\ngroup-size = 4", [], ["'group-size'", "[rollout]", "'group_size'"]),
        ("", ["+rollout.group_size=4"], ["'+rollout.group_size=4'", "key.path=value"]),
        ("[run]\nsteps = 'many'", [], ["run.steps", "'many'", "integer"]),
        ("[algorithm]\nclip_range = 0.2", [], ["'clip_range'", "[algorithm]"]),
        ("[rolout]\ngroup_size = 4", [], ["'rolout'", "'rollout'"]),
        ("[run]\nsteps = 0", [], ["run.steps", "0", "greater than or equal to 1"]),
        ("[rollout]\ngroup_size = 1", [], ["rollout.group_size is 1", "2 or more"]),
        ("[algorithm]\ndual_clip = 0.9", [], ["dual_clip", "0.9"]),
        ("[environment.budgets]\nturn_tokens = 9000", [], ["turn_tokens", "context_tokens"]),
        ("[run\n", [], ["TOML"]),
        ("", ["run.seed=100000000000000000000000"], ["run.seed", "less than"]),
        ("", ["run.steps=" + "9" * 5000], ["run.steps", "(5002 characters)"]),
        ("", ["run.steps=" + "[" * 3000], ["run.steps"]),
        ("", ["run=5"], ["run is 5", "section.key=value"]),
        ("[optimizer]\nbeta1 = 1.0", [], ["optimizer.beta1", "less than 1"]),
        ("[optimizer]\nweight_decay = inf", [], ["weight_decay", "finite"]),
        ("[optimizer]\nthreads = 1000000000000", [], ["optimizer.threads"]),
    ],
)
def test_each_fault_is_named(tmp_path: Path, text: str, overrides: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, text), overrides)
    for word in words:
        assert word in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["environment.options.at=split"], ["broken in split", "wilful_environment.py:"]),
        (["environment.options.at=judge"], ["no attribute 'nowhere'"]),
        (["environment.name=wilful_environment:nothing"], ["without split, environment"]),
        (["cluster.nodes=3"], ["cluster.nodes is 3", "RAY_ADDRESS"]),
        (["cluster.ray=false", "rollout.engine.gpus=64"], ["rollout.engine.gpus is 64"]),
        (["model.new.pieces='('"], ["model.new.pieces"]),
        (["model.new.heads=7"], ["heads 7"]),
        (["model.lora.initial=/nowhere"], ["/nowhere"]),
    ],
)
def test_what_can_be_known_before_the_start_is_told_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: list[str], words: list[str]
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    path = write(tmp_path, "environment.name = 'wilful_environment:Wilful'\nevaluation.tasks = 4")
    with pytest.raises(ConfigError) as caught:
        check(load_config(path, overrides))
    for word in words:
        assert word in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_all_faults_are_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, "[run]\nstep = 3\n[optimizer]\nlearning_rate = 'x'"))
    assert len(str(caught.value).splitlines()) == 2


def test_a_missing_file_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        load_config(tmp_path / "none.toml")


def test_overrides_are_toml_values_or_words(tmp_path: Path) -> None:
    path = write(tmp_path, "[run]\nsteps = 3")
    config = load_config(path, ["run.steps=5", "run.name=mine", "optimizer.learning_rate=1e-4", "cluster.ray=false"])
    assert (config.run.steps, config.run.name) == (5, "mine")
    assert config.optimizer.learning_rate == 1e-4
    assert config.cluster.ray is False


def test_the_resolved_configuration_reads_back_to_itself() -> None:
    config = parse_config({"environment": {"options": {"digits": 2, "names": ["a"]}}, "run": {"seed": 5}}, "test")
    assert load_values(to_toml(config)) == config


def load_values(text: str) -> Config:
    import tomllib

    return parse_config(tomllib.loads(text), "text")


def test_differences_name_key_and_both_values() -> None:
    one = parse_config({}, "a")
    two = parse_config({"optimizer": {"learning_rate": 0.5}, "environment": {"options": {"x": 1}}}, "b")
    assert differences(one, two) == [
        "environment.options: {} -> {'x': 1}",
        "optimizer.learning_rate: 2e-05 -> 0.5",
    ]


def test_nothing_can_be_changed_after_it_was_read() -> None:
    with pytest.raises(ValueError, match="frozen"):
        parse_config({}, "x").run.steps = 5  # type: ignore[misc]


def test_every_setting_has_a_default_and_a_line_of_help() -> None:
    import ast

    import palestra.rl.config as module

    assert Config()
    tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
    sections = {name for name, kind in vars(module).items() if isinstance(kind, type) and issubclass(kind, Section)}
    without = []
    for node in tree.body:
        if not isinstance(node, ast.ClassDef) or node.name not in sections or node.name == "Config":
            continue
        for setting, following in zip(node.body, [*node.body[1:], None], strict=True):
            if not isinstance(setting, ast.AnnAssign):
                continue
            is_section = isinstance(setting.annotation, ast.Name) and setting.annotation.id in sections
            documented = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
            if not (is_section or documented) or setting.value is None:
                without.append(f"{node.name}.{ast.unparse(setting.target)}")
    assert without == []
