"""Imitation: which episodes are copied, what the loss is, and what the command leaves."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from learning_support import POISONS, random_groups, sample, tiny_gpt2, tiny_llama, trajectory
from palestra.envs.errors import ConfigError
from palestra.envs.types import NoVerdict, Scored, Task
from palestra.rl.commands.sft import run_sft
from palestra.rl.config import Config
from palestra.rl.demonstrations import play_demonstrations
from palestra.rl.imitation import Imitation, imitate, imitation_loss, set_apart
from palestra.rl.learner import Learner, LearnerSettings
from palestra.rl.load_config import parse_config, to_toml
from palestra.rl.model import load_model
from palestra.rl.objective import Objective
from palestra.rl.optimizer import OptimizerSettings
from palestra.rl.preflight import check
from palestra.rl.recorded import choose
from palestra.rl.surrogates import Reinforce
from palestra.rollout import record
from palestra.rollout.types import Sample, TerminatedBy, Trajectory
from recording import recorded, written
from tiny_models import make_tinier, make_tiny
from toy_environment import Speeches

SPLIT = Speeches()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tinier(tmp_path_factory.mktemp("model"))


def configuration(folder: Path, model: Path, source: Path, **warm_start: object) -> Config:
    values = {
        "run": {"name": "copy", "folder": str(folder / "runs"), "groups_per_step": 2},
        "model": {"path": str(model), "lora": {"rank": 4, "alpha": 8.0}},
        "warm_start": {"recorded": str(source), "demonstrations_per_batch": 4, **warm_start},
        "environment": {"name": "toy_environment:Speeches", "sandbox": {"backend": "namespace"}},
        "evaluation": {"tasks": 4},
        "optimizer": {"threads": 1},
    }
    values["environment"]["budgets"] = {"turn_tokens": 60, "context_tokens": 256}  # type: ignore[index]
    return parse_config(values, "test")


def episodes_of(model: Path) -> list[Trajectory]:
    """Two good ones of a task and one of another, with what is not to be copied between them."""
    played = recorded(
        model,
        [
            ("train", 0, "good"),
            ("train", 0, "far better"),
            ("train", 1, "odd"),  # three characters: no reward
            ("test", 2, "held"),
            ("train", 3, "once"),
            ("train", 3, "once"),
            ("train", 4, "twelve chars"),
        ],
    )
    judged = replace(played[6], id="unjudged", verdict=NoVerdict("away"))
    cut = replace(played[6], id="cut", terminated_by=TerminatedBy.TOKENS)
    return [*played[:6], judged, cut]


# the loss


def padded_cross_entropy(model: PreTrainedModel, samples: list[Sample], pad: int, smoothing: float) -> torch.Tensor:
    """The plain path: padded rows, a mask, full logits, one cross entropy over the tokens to copy."""
    width = max(len(s) for s in samples)
    ids = torch.full((len(samples), width), pad)
    mask, labels = torch.zeros(len(samples), width), torch.full((len(samples), width), -100)
    for row, s in enumerate(samples):
        ids[row, : len(s)] = torch.from_numpy(s.ids.astype(np.int64))
        mask[row, : len(s)] = 1
        labels[row, : len(s)] = torch.where(torch.from_numpy(s.sampled), ids[row, : len(s)], -100)
    logits = model(input_ids=ids, attention_mask=mask).logits
    return cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), label_smoothing=smoothing)


@pytest.mark.parametrize("make", [tiny_llama, tiny_gpt2])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("tokens_per_row", [1, 4096])
def test_loss_and_gradient_are_those_of_a_padded_cross_entropy(
    make: Callable[[], PreTrainedModel], smoothing: float, tokens_per_row: int
) -> None:
    rng = np.random.default_rng(0)
    trajectories = [t for group in random_groups(rng) for t in group.trajectories]
    plain = make().eval()
    loss = padded_cross_entropy(plain, [s for t in trajectories for s in t.samples], 1, smoothing)
    loss.backward()
    objective = Objective(surrogate=Reinforce(), correction=None, mode="imitation", label_smoothing=smoothing)
    how = Imitation(trajectories_per_step=100, tokens_per_micro_batch=tokens_per_row, objective=objective)
    unclipped = OptimizerSettings(max_grad_norm=1e9, beta1=0.9)
    learner = Learner(make(), LearnerSettings(train="full", optimizer=unclipped))
    if not smoothing:
        assert imitation_loss(learner, trajectories, how) == pytest.approx(loss.item(), abs=1e-6)  # kept in float32
    (stats,) = imitate(learner, trajectories, how, random.Random(0))
    assert stats.loss == pytest.approx(loss.item(), abs=1e-9)
    moments = learner.state().tensors
    for name, parameter in plain.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(moments[f"exp_avg/{name}"] / 0.1, parameter.grad, rtol=0, atol=1e-9)


@pytest.mark.parametrize("poison", POISONS)
def test_what_stands_at_observations_changes_nothing(poison: float) -> None:
    how, weights = Imitation(epochs=2), []
    for value in (0.0, poison):
        rows = [
            sample([3, 4, 5, 6, 7, 8], [0, 1, 1, 0, 0, 1], poison=value),
            sample([9, 4, 2], [0, 1, 0], poison=value),
        ]
        learner = Learner(tiny_llama(), LearnerSettings(train="full"))
        imitate(learner, [trajectory("t", rows, 1.0)], how, random.Random(0))
        weights.append(learner.state().tensors)
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_copying_makes_the_copied_likelier_epoch_after_epoch() -> None:
    rng = np.random.default_rng(1)
    trajectories = [t for group in random_groups(rng, groups=3) for t in group.trajectories]
    learner = Learner(tiny_llama(), LearnerSettings(train="full", optimizer=OptimizerSettings(learning_rate=3e-3)))
    how = Imitation(epochs=3, trajectories_per_step=3)
    losses = [imitation_loss(learner, trajectories, how)]
    updates = imitate(
        learner,
        trajectories,
        how,
        random.Random(0),
        on_epoch=lambda: losses.append(imitation_loss(learner, trajectories, how)),
    )
    assert len(updates) == how.num_updates(len(trajectories)) == 9
    assert losses == sorted(losses, reverse=True)
    assert len(losses) == 4


# which episodes


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 6), max_size=60), st.integers(0, 12), st.integers(0, 5))
def test_whole_tasks_are_set_apart_and_at_most_a_tenth(tasks: list[int], count: int, seed: int) -> None:
    row = sample([1, 2], [0, 1])
    made = [replace(trajectory(f"t{n}", [row], 1.0), task_id=str(task)) for n, task in enumerate(tasks)]
    copied, measured = set_apart(made, count, random.Random(seed))
    assert Counter(t.id for t in [*copied, *measured]) == Counter(t.id for t in made)
    assert len(measured) <= min(count, len(made) // 10)
    assert {t.task_id for t in copied}.isdisjoint(t.task_id for t in measured)


def test_the_filters_say_how_many_they_left_out_and_why(tmp_path: Path, model: Path) -> None:
    source = written(tmp_path / "run" / "trajectories", episodes_of(model)).parent
    chosen = choose(configuration(tmp_path, model, source), SPLIT)
    assert [(t.task_id, t.turns[0].text) for t in chosen.episodes] == [
        ("train-0", "good"),
        ("train-0", "far better"),
        ("train-3", "once"),
    ]
    assert chosen.read == 8
    assert dict(chosen.left_out) == {
        "with a reward below 1": 1,
        "of held-out tasks": 1,
        "equal to another": 1,
        "without a verdict": 1,
        "truncated": 1,
    }
    assert chosen.read == len(chosen.episodes) + sum(chosen.left_out.values())


def test_settings_widen_and_narrow_the_choice(tmp_path: Path, model: Path) -> None:
    source = written(tmp_path / "files", episodes_of(model))

    def names(**warm_start: object) -> list[str]:
        return [t.id for t in choose(configuration(tmp_path, model, source, **warm_start), SPLIT).episodes]

    assert names(keep_truncated=True) == ["r0", "r1", "r4", "cut"]
    assert names(min_reward=0.0) == ["r0", "r1", "r2", "r4"]
    assert names(per_task=1) == ["r0", "r4"]
    lengths = {t.id: len(t.samples[0]) for t in episodes_of(model) if t.id in ("r0", "r1", "r4")}
    short = [name for name, length in lengths.items() if length < max(lengths.values())]
    assert 0 < len(short) < 3
    assert names(max_tokens=max(lengths.values()) - 1) == short


def test_of_one_task_the_best_rewarded_are_kept_then_the_earliest(tmp_path: Path, model: Path) -> None:
    played = recorded(model, [("train", 5, word) for word in ("aa", "bb", "cccc", "dd")])
    scored = [replace(t, verdict=Scored(reward)) for t, reward in zip(played, (1.0, 2.0, 1.0, 2.0), strict=True)]
    source = written(tmp_path / "files", scored)
    chosen = choose(configuration(tmp_path, model, source, per_task=3), SPLIT)
    assert [t.id for t in chosen.episodes] == ["r0", "r1", "r3"]
    assert dict(chosen.left_out) == {"beyond 3 of a task": 1}


def test_no_setting_lets_a_held_out_task_in(tmp_path: Path, model: Path) -> None:
    source = written(tmp_path / "files", recorded(model, [("test", n, "even") for n in range(3)]))
    with pytest.raises(ConfigError, match=r"3 recorded episodes read, 0 used; left out: 3 of held-out tasks"):
        choose(configuration(tmp_path, model, source, min_reward=-9.0, keep_truncated=True), SPLIT)


def test_a_last_line_that_a_crash_cut_is_no_error(tmp_path: Path, model: Path) -> None:
    source = written(tmp_path / "files", episodes_of(model))
    with (source / "step_000001.jsonl").open("ab") as file:
        file.write(b'{"schema": "palestra-traj')
    assert choose(configuration(tmp_path, model, source), SPLIT).read == 8


# what is wrong is told before anything starts


def refused(config: Config) -> str:
    """What the preflight says."""
    with pytest.raises(ConfigError) as caught:
        check(config)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_place_without_records_is_told(tmp_path: Path, model: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "nothing is there" in refused(configuration(tmp_path, model, tmp_path / "none"))
    assert "holds no .jsonl file" in refused(configuration(tmp_path, model, tmp_path / "empty"))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda line: line[:-30] + b"\n", "JSONDecodeError"),
        (lambda line: b'{"schema": "other-1"}\n', "palestra-trajectory-1"),
        (lambda line: line.replace(b'"samples"', b'"simples"'), "KeyError"),
        (lambda line: line.replace(b'"shape":[', b'"shape":[7,'), "ValueError"),
        (lambda line: b"[]\n", "AttributeError"),
    ],
)
def test_a_damaged_line_is_named(tmp_path: Path, model: Path, damage: object, said: str) -> None:
    source = written(tmp_path / "files", episodes_of(model))
    file = source / "step_000001.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    lines[2] = damage(lines[2])  # type: ignore[operator]
    file.write_bytes(b"".join(lines))
    words = refused(configuration(tmp_path, model, source))
    assert "step_000001.jsonl, line 3: no record of an episode" in words
    assert said in words


def test_ids_that_the_model_does_not_have_are_refused(tmp_path: Path, model: Path) -> None:
    (episode,) = recorded(model, [("train", 0, "even")])
    row = episode.samples[0]
    source = written(tmp_path / "files", [replace(episode, samples=(replace(row, ids=row.ids + np.int32(300)),))])
    assert "the model in" in refused(configuration(tmp_path, model, source))
    assert "has the ids 0 to 329" in refused(configuration(tmp_path, model, source))


def test_ids_that_spell_something_else_are_refused(tmp_path: Path, model: Path) -> None:
    (episode,) = recorded(model, [("train", 0, "even")])
    row = episode.samples[0]
    moved = np.where(row.sampled & (row.ids > 10), row.ids - 1, row.ids).astype(np.int32)
    source = written(tmp_path / "files", [replace(episode, samples=(replace(row, ids=moved),))])
    assert "recorded with another tokenizer" in refused(configuration(tmp_path, model, source))


def run_that_recorded(folder: Path, model: Path, **environment: object) -> Path:
    """A run's folder with its settings and its episodes."""
    config = configuration(folder, model, folder)
    environment_ = config.environment.model_copy(update={"options": environment})
    source = written(folder / "recorder" / "trajectories", recorded(model, [("train", 0, "even")])).parent
    (source / "config.toml").write_text(to_toml(config.model_copy(update={"environment": environment_})))
    return source


def test_a_run_with_another_tokenizer_or_other_tasks_is_refused(tmp_path: Path, model: Path) -> None:
    source = run_that_recorded(tmp_path, model)
    assert choose(configuration(tmp_path, model, source), SPLIT).read == 1
    larger = make_tiny(tmp_path / "larger", hidden=32, layers=1, heads=1, vocab=600)
    assert "tokenizer and chat template" in refused(configuration(tmp_path, larger, source))
    others = run_that_recorded(tmp_path / "others", model, tasks=5)
    assert "its training tasks may be held out here" in refused(configuration(tmp_path, model, others))


@pytest.mark.parametrize(
    ("model_settings", "warm_start", "said"),
    [
        ({"path": "new"}, {"recorded": "x", "train": "full"}, "ids of the tokenizer that they were sampled with"),
        (
            {"path": "x", "lora": {"initial": "y"}},
            {"recorded": "x", "train": "full"},
            "merge the adapter into the base",
        ),
        ({"path": "x", "dtype": "bfloat16"}, {"recorded": "x", "train": "full"}, "loses small updates"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(
    model_settings: dict[str, object], warm_start: dict[str, object], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_config({"model": model_settings, "warm_start": warm_start}, "test")


# the command


@pytest.mark.parametrize("train", ["lora", "full"])
def test_the_command_leaves_a_policy_that_can_be_loaded(
    tmp_path: Path, model: Path, train: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PALESTRA_CACHE", str(tmp_path / "cache"))
    words = [("train", task, f"{'even' * (1 + task % 2)}") for task in range(12)] + [("test", 1, "even")]
    source = written(tmp_path / "run" / "trajectories", recorded(model, words)).parent
    config = configuration(tmp_path, model, source, train=train, epochs=3, learning_rate=1e-2)
    file = tmp_path / "copy.toml"
    file.write_text(to_toml(config))
    assert run_sft(file, []) == 0
    said = capsys.readouterr().out
    assert "13 recorded episodes read, 12 used; left out: 1 of held-out tasks" in said
    assert "for model.path" in said
    made = tmp_path / "runs" / "copy" / "model"
    report = json.loads((made / "imitation.json").read_text())
    assert report["recorded"] == {"read": 13, "used": 12, "left_out": {"of held-out tasks": 1}}
    assert (report["copied_episodes"], report["validation_episodes"]) == (11, 1)
    assert len(report["validation_loss"]) == 4
    assert report["validation_loss"][-1] < report["validation_loss"][0]
    loaded = load_model(str(made / ("base" if train == "full" else "merged")))
    learner = Learner(loaded.model, LearnerSettings(train="full"))
    chosen = choose(config, SPLIT)
    copied, measured = set_apart(chosen.episodes, 32, random.Random(config.run.seed))
    assert len(copied) == 11
    assert imitation_loss(learner, measured, Imitation()) == pytest.approx(report["validation_loss"][-1], abs=1e-5)
    assert run_sft(file, []) == 0  # what is there is told again, and nothing is made anew
    assert "warm start: update" not in capsys.readouterr().out


def test_scripted_and_recorded_episodes_are_copied_together(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PALESTRA_CACHE", str(tmp_path / "cache"))
    source = written(tmp_path / "files", recorded(model, [("train", task, "even") for task in range(4)]))
    file = tmp_path / "copy.toml"
    file.write_text(to_toml(configuration(tmp_path, model, source, demonstrations=6, validation_episodes=0)))
    assert run_sft(file, []) == 0
    made = tmp_path / "runs" / "copy" / "model"
    report = json.loads((made / "imitation.json").read_text())
    assert (report["demonstrations"], report["copied_episodes"], report["validation_loss"]) == (6, 10, [])
    assert len(list(record.read(made / "demonstrations.jsonl"))) == 6


class Leaky(Speeches):
    """Its held-out tasks are its training tasks."""

    def split(self, name: str) -> Sequence[Task]:
        return super().split("train")


def test_a_taskset_that_holds_out_what_it_trains_on_has_no_demonstrations(tmp_path: Path, model: Path) -> None:
    config = configuration(tmp_path, model, tmp_path, demonstrations=5)
    with pytest.raises(ConfigError, match=r"5 of 5 demonstrations are of tasks that the held-out split has, too"):
        asyncio.run(play_demonstrations(config, Leaky(), model))


def test_nothing_is_begun_when_the_records_are_wrong(tmp_path: Path, model: Path) -> None:
    file = tmp_path / "copy.toml"
    file.write_text(to_toml(configuration(tmp_path, model, tmp_path / "none")))
    with pytest.raises(ConfigError, match="nothing is there"):
        run_sft(file, [])
    file.write_text(to_toml(parse_config({"model": {"path": str(model)}}, "test")))
    with pytest.raises(ConfigError, match="there is nothing to imitate"):
        run_sft(file, [])
    assert not (tmp_path / "runs").exists()


def test_what_is_copied_is_the_record_as_it_was_written(tmp_path: Path, model: Path) -> None:
    episodes = recorded(model, [("train", 0, "even"), ("train", 1, "more")])
    source = written(tmp_path / "files", episodes)
    chosen = choose(configuration(tmp_path, model, source / "step_000001.jsonl"), SPLIT)
    assert [record.to_json(t) for t in chosen.episodes] == [record.to_json(t) for t in episodes]
