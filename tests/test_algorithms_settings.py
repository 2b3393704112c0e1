"""From [algorithm] to an algorithm: names, what each reads, what each paper presets, and a page for every one."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import numpy as np
import pytest

from learning_support import random_groups, rewarded, tiny_llama
from palestra.envs.errors import ConfigError
from palestra.rl.aggregation import Aggregation
from palestra.rl.algorithms.base import Credit
from palestra.rl.algorithms.grpo import GRPO
from palestra.rl.algorithms.make import KNOWN, make_algorithm
from palestra.rl.algorithms.rloo import RLOO
from palestra.rl.batch import pack
from palestra.rl.config import Config
from palestra.rl.learner import Learner, LearnerSettings
from palestra.rl.load_config import differences, load_config, parse_config, to_toml
from palestra.rl.lora import LoraSettings
from palestra.rl.objective import Objective
from palestra.rl.settings_algorithm import AlgorithmSettings
from palestra.rl.settings_credit import CreditSettings

DOCS = Path(__file__).parents[1] / "docs" / "algorithms"
INDEX = (DOCS / "README.md").read_text(encoding="utf-8")


def config(**algorithm: object) -> Config:
    return parse_config({"algorithm": algorithm}, "run.toml")


def needed(name: str) -> dict[str, object]:
    """What an algorithm cannot be made without."""
    return {"objectives": {"correct": 1.0}} if name == "gdpo" else {}


class Halved:
    """Somebody's own algorithm."""

    def __init__(self, objective: Objective) -> None:
        self.objective = objective

    def check(self, group_size: int) -> None: ...

    def credit(self, groups: object, measured: object = None) -> list[Credit]:
        return [Credit((np.array([0.5]),))]


NOT_CALLABLE = 3


@pytest.mark.parametrize("name", KNOWN)
def test_every_name_makes_an_algorithm_that_reads_its_settings_from_the_configuration(name: str) -> None:
    made = config(name=name, **needed(name)).algorithm
    algorithm = make_algorithm(made, 512)
    for setting in KNOWN[name].reads:
        assert getattr(algorithm, setting) == getattr(made, setting)
    for setting, value in KNOWN[name].presets.items():
        assert getattr(made, setting) == value
    algorithm.check(8)


@pytest.mark.parametrize("name", KNOWN)
def test_a_resolved_configuration_reads_back_as_itself(name: str, tmp_path: Path) -> None:
    before = config(name=name, **needed(name))
    path = tmp_path / "config.toml"
    path.write_text(to_toml(before), encoding="utf-8")
    assert differences(before, load_config(path)) == []
    assert make_algorithm(before.algorithm, 512) == make_algorithm(load_config(path).algorithm, 512)


@pytest.mark.parametrize("name", KNOWN)
def test_a_credit_setting_that_an_algorithm_does_not_read_is_refused(name: str) -> None:
    values = {"std": "none", "ddof": 0, "eps": 1e-3, "eps_form": "floor", "gamma": 0.5, "objectives": {"a": 1.0}}
    for setting, value in values.items():
        if setting in KNOWN[name].reads:
            continue
        with pytest.raises(ConfigError, match=f"algorithm.{setting} is .*, but {name} does not read it"):
            config(**{"name": name, setting: value, **{k: v for k, v in needed(name).items() if k != setting}})


def test_what_the_user_set_is_never_overridden() -> None:
    own = config(name="gspo", clip_low=1e-3, aggregation="token-mean").algorithm
    assert (own.clip_low, own.clip_high, own.aggregation, own.ratio) == (1e-3, 4e-4, "token-mean", "sequence")
    assert config(name="grpo", std="batch", eps=1e-3).algorithm.eps == 1e-3


def test_a_preset_of_a_surrogate_goes_when_another_is_chosen() -> None:
    own = config(name="cispo", surrogate="cispo_two_sided").algorithm
    assert own.cispo_max_ratio is None
    make_algorithm(own, 512)
    make_algorithm(config(name="dppo", surrogate="dppo_kl").algorithm, 512)


def test_the_constant_normaliser_is_the_token_budget_unless_one_is_given() -> None:
    assert aggregation_of(name="dr_grpo") == Aggregation("seq-mean-token-sum-norm", 512)
    assert aggregation_of(name="dr_grpo", length_norm_tokens=64).horizon == 64
    assert aggregation_of(aggregation="seq-mean-token-sum-norm").horizon == 512
    assert aggregation_of(name="dr_grpo", aggregation="token-mean") == Aggregation()


def aggregation_of(**algorithm: object) -> Aggregation:
    return make_algorithm(config(**algorithm).algorithm, 512).objective.aggregation


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("rlo", ["'rlo'", "Did you mean 'rloo'?", "gspo", "my_project.credit:make"]),
        ("ggpo", ["'ggpo'", "Did you mean"]),
        ("", ["''", "Have: rloo"]),
        ("GRPO", ["'GRPO'", "Have:"]),
    ],
)
def test_a_name_that_nobody_knows_gets_the_nearest_one(name: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        config(name=name)
    assert len(str(caught.value).splitlines()) == 1
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("name", KNOWN)
def test_groups_of_one_are_refused_at_the_start_by_those_that_compare(name: str) -> None:
    values = {"algorithm": {"name": name, **needed(name)}, "rollout": {"group_size": 1}}
    try:
        make_algorithm(config(name=name, **needed(name)).algorithm, 512).check(1)
    except ConfigError:
        with pytest.raises(ConfigError, match=f"rollout.group_size is 1, but {compared_as(name)}.*use 2 or more"):
            parse_config(values, "run.toml")
    else:
        parse_config(values, "run.toml")


def compared_as(name: str) -> str:
    """A name that is a preset says whose credit it uses."""
    return {"dapo": "grpo", "gspo": "grpo", "cispo": "grpo", "dppo": "rloo", "reinforce": "rloo"}.get(name, name)


def test_an_algorithm_of_the_users_own_is_found_by_its_path() -> None:
    made = make_algorithm(config(name="test_algorithms_settings:Halved", clip_high=0.3).algorithm, 512)
    assert isinstance(made, Halved)
    assert made.objective.surrogate.clip_high == 0.3  # type: ignore[attr-defined]
    for path, words in (
        ("test_algorithms_settings:Nobody", "Nobody"),
        ("no_such_module_here:make", "no_such_module_here"),
        ("test_algorithms_settings:NOT_CALLABLE", "expected a function"),
    ):
        with pytest.raises(ConfigError, match=words):
            make_algorithm(config(name=path).algorithm, 512)
    with pytest.raises(ConfigError, match="does not read it"):
        config(name="test_algorithms_settings:Halved", std="none")


def test_settings_made_in_python_are_filled_in_as_those_from_a_file() -> None:
    assert AlgorithmSettings(name="grpo").std == "group"
    assert AlgorithmSettings() == config().algorithm
    assert isinstance(make_algorithm(AlgorithmSettings(), 512), RLOO)
    assert make_algorithm(AlgorithmSettings(name="grpo", ddof=0), 512) == GRPO(ddof=0)


@pytest.mark.parametrize(
    "wrong",
    [{"name": "grpo", "ddof": 2}, {"name": "grpo", "eps": -1.0}, {"name": "reinforce_pp", "gamma": 0.0}, {"name": 3}],
)
def test_values_out_of_range_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        config(**wrong)


IDLE: list[tuple[dict[str, object], dict[str, object]]] = [
    ({}, {"length_norm_tokens": 77}),
    ({}, {"kl": "k3_score"}),
    ({}, {"kl_coefficient": 0.1}),
    ({}, {"cispo_max_ratio": 5.0}),
    ({}, {"dppo_low": 0.1}),
    ({}, {"dppo_max_ratio": 3.0}),
    ({}, {"correction_high": 3.0}),
    ({}, {"opsm_delta": 0.1}),
    ({}, {"max_refills": 3}),
    ({}, {"when_uninformative": "fail"}),
    ({}, {"overlong_cache": 3}),
    ({"surrogate": "reinforce"}, {"clip_low": 0.01}),
    ({"name": "dppo"}, {"clip_high": 0.9}),
    ({"surrogate": "cispo_two_sided"}, {"dual_clip": 9.0}),
    ({"surrogate": "importance_sampling"}, {"dual_clip": "off"}),
    ({"correction": "none"}, {"tis_cap": 1.0}),
    ({"correction": "opsm", "opsm_delta": 0.1}, {"tis_cap": "off"}),
    ({"correction": "seq_mask", "correction_high": 2.0}, {"tis_cap": 1.0}),
    ({"name": "grpo", "std": "none"}, {"ddof": 0}),
    ({"name": "gigpo"}, {"eps": 0.5}),
    ({"name": "vapo", "lam": 0.9}, {"alpha": 0.5}),
    ({"name": "dapo", "dynamic_sampling": False}, {"max_refills": 3}),
]


@pytest.mark.parametrize(("base", "nothing"), IDLE)
def test_a_setting_that_changes_nothing_is_refused_by_its_name(
    base: dict[str, object], nothing: dict[str, object]
) -> None:
    (setting,) = nothing
    with pytest.raises(ConfigError, match=setting) as caught:
        config(**base, **nothing)
    assert len(str(caught.value).splitlines()) == 1
    assert parse_config(tomllib.loads(to_toml(config(**base))), "config.toml") == config(**base)


def test_a_setting_is_accepted_beside_the_one_that_reads_it() -> None:
    for fitting in (
        {"dynamic_sampling": True, "max_refills": 3},
        {"name": "dapo", "when_uninformative": "fail"},
        {"kl": "k3_score", "kl_coefficient": 0.1},
        {"name": "dr_grpo", "length_norm_tokens": 77},
        {"name": "dppo", "dppo_max_ratio": 3.0},
        {"correction": "turn_tis", "tis_cap": 3.0},
        {"name": "gigpo", "std": "group", "eps": 0.5},
        {"name": "vapo", "alpha": 0.5},
        {"name": "gspo", "surrogate": "reinforce", "ratio": "token"},  # its presets are nobody's choice
        {"name": "test_algorithms_settings:Halved", "clip_high": 0.3},
    ):
        config(**fitting)


def page(name: str) -> str:
    return (DOCS / f"{name}.md").read_text(encoding="utf-8")


def defaults_told(name: str) -> dict[str, str]:
    """What the page's table of settings says: setting -> default. A row without a default takes those of the page that
    it links to, `value_*` all that begin so."""
    told: dict[str, str] = {}
    for row in re.findall(r"^\| (`[^|]+) \| ([^|]*)\| (.*) \|$", page(name), re.MULTILINE):
        names, shown, meaning = re.findall(r"`([\w*]+)`", row[0]), row[1].strip(), row[2]
        if shown:
            told |= dict(zip(names, (cell.strip('"`') for cell in shown.split(", ")), strict=False))
        elif link := re.search(r"\((\w+)\.md\)", meaning):
            others = defaults_told(link[1])
            told |= {k: v for k, v in others.items() if any(re.fullmatch(n.replace("*", ".*"), k) for n in names)}
    return told


@pytest.mark.parametrize("name", KNOWN)
def test_every_algorithm_has_a_page_in_the_index_that_names_all_it_presets(name: str) -> None:
    text = page(name)
    assert f"| [{name}]({name}.md) |" in INDEX
    assert [s for s in KNOWN[name].presets if f"`{s}" not in text] == []
    assert [h for h in ("## Formula", "## Metrics", "## What differs", "## Pitfalls") if h not in text] == []


@pytest.mark.parametrize("name", KNOWN)
def test_the_page_tells_the_default_of_every_setting_that_is_read(name: str) -> None:
    told = defaults_told(name)
    for setting, value in KNOWN[name].reads.items():
        assert setting in told, f"{name}.md has no row for {setting}"
        shown = told[setting]
        if isinstance(value, bool | str):
            assert shown == str(value).lower()
        elif isinstance(value, int | float):
            assert float(shown) == value
        else:
            assert shown in ("adaptive", "none: required")


@pytest.mark.parametrize("name", KNOWN)
def test_the_configuration_on_the_page_can_be_used(name: str) -> None:
    blocks = re.findall(r"^```toml\n(.*?)^```$", page(name), re.MULTILINE | re.DOTALL)
    assert blocks
    for block in blocks:
        made = parse_config(tomllib.loads(block), name)
        assert made.algorithm.name == name
        make_algorithm(made.algorithm, made.environment.budgets.tokens).check(made.rollout.group_size)


def test_the_example_of_an_algorithm_of_ones_own_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = re.findall(r"^```python\n(.*?)^```$", INDEX, re.MULTILINE | re.DOTALL)
    (tmp_path / "my_credit.py").write_text(block, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    algorithm = make_algorithm(config(name="my_credit:BestOnly").algorithm, 512)
    groups = [rewarded("g", [1.0, None, 0.0, 0.5], [1] * 4), rewarded("h", [0.7, 0.7]), rewarded("i", [None])]
    found = algorithm.credit(groups)
    assert [None if s is None else s.tolist() for s in found[0].advantages] == [[1.0], None, [-1.0], [0.0]]
    assert not found[1].signal
    assert found[2].advantages == (None,)


def test_the_pages_link_to_pages_that_exist() -> None:
    for path in DOCS.glob("*.md"):
        for target in re.findall(r"\]\(([\w./]+\.md)\)", path.read_text(encoding="utf-8")):
            assert (DOCS / target).exists(), f"{path.name} -> {target}"


def test_every_metric_of_an_update_is_explained() -> None:
    text = (DOCS / "metrics.md").read_text(encoding="utf-8")
    learner = Learner(tiny_llama(), LearnerSettings(lora=LoraSettings(rank=2, alpha=2.0)))
    algorithm = RLOO(Objective(kl_coefficient=0.1, entropy_coefficient=0.01))
    groups = random_groups(np.random.default_rng(0))
    stats = learner.update(pack(groups, algorithm.credit(groups), 200, algorithm.objective), algorithm)
    assert [name for name in stats.metrics if f"`update/{name}`" not in text] == []


def test_every_credit_setting_is_read_by_somebody() -> None:
    read = {setting for recipe in KNOWN.values() for setting in recipe.reads}
    assert set(CreditSettings.model_fields) - {"name"} == read


@pytest.mark.parametrize("name", [n for n in KNOWN if KNOWN[n].algorithm in (RLOO, GRPO)])
def test_a_preset_credits_as_the_algorithm_that_it_names(name: str) -> None:
    found = make_algorithm(config(name=name).algorithm, 512).credit([rewarded("g", [1.0, 0.0, 0.5])])
    plain = (RLOO() if KNOWN[name].algorithm is RLOO else GRPO()).credit([rewarded("g", [1.0, 0.0, 0.5])])
    assert all(
        np.array_equal(a, b)
        for a, b in zip(found[0].advantages, plain[0].advantages, strict=True)
        if a is not None and b is not None
    )
