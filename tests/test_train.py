"""`palestra train` from outside: it learns, it can be killed at any moment, and it tells what was wrong."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from palestra.envs.errors import ConfigError
from palestra.envs.load import load_taskset
from palestra.rl import policy
from palestra.rl.checkpoints import Checkpoints, places
from palestra.rl.config import Config
from palestra.rl.learner import LearnerState
from palestra.rl.load_config import parse_config
from palestra.rl.resume import find_start
from palestra.rl.run_folder import RunFolder, open_run
from palestra.rollout import record

HERE = Path(__file__).parent
CONFIG = """
[run]
name = "{name}"
folder = "{folder}"
steps = {steps}
groups_per_step = 2
seed = 3
[model]
path = "{model}"
[model.lora]
rank = 4
[environment]
name = "toy_environment:Speeches"
[environment.sandbox]
backend = "namespace"
[environment.budgets]
steps = 2
turn_tokens = 60
tokens = 120
context_tokens = 256
[rollout]
group_size = 4
[rollout.engine]
kind = "transformers"
threads = 1
max_num_seqs = 1  # rows are computed alone, so their last bits do not depend on which others run beside them
[optimizer]
learning_rate = 1e-2
threads = 1
[evaluation]
tasks = 4
[checkpoint]
every_steps = 2
[tracking]
wandb = "offline"
[cluster]
ray = false
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tiny_models import make_tinier

    return make_tinier(tmp_path_factory.mktemp("model"))


def configuration(folder: Path, model: Path, *, name: str = "run", steps: int = 4) -> Path:
    path = folder / f"{name}.toml"
    path.write_text(CONFIG.format(name=name, folder=folder / "runs", model=model, steps=steps))
    return path


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def palestra(*words: object, cache: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "palestra.rl", *map(str, words)]
    env = environment() | ({"PALESTRA_CACHE": str(cache)} if cache else {})
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=200, check=False)


def begin(*words: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "palestra.rl", *map(str, words)]
    return subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def read_until(process: subprocess.Popen[str], words: str) -> str:
    assert process.stdout is not None
    seen = ""
    for line in process.stdout:
        seen += line
        if words in line:
            return seen
    raise AssertionError(f"never said {words!r}:\n{seen}")


def summary(folder: Path, name: str = "run") -> dict[str, object]:
    return dict(json.loads((folder / "runs" / name / "summary.json").read_text()))


def weights(folder: Path, name: str, step: int) -> dict[str, object]:
    return dict(load_file(folder / "runs" / name / "checkpoints" / f"step_{step:06d}" / "learner.safetensors"))


def trained(folder: Path, name: str) -> list[tuple[int, int]]:
    with sqlite3.connect(folder / "runs" / name / "ledger.sqlite") as db:
        return list(db.execute("SELECT step, position FROM trained WHERE undone = 0 ORDER BY position"))


def test_a_run_leaves_what_was_promised(tmp_path: Path, model: Path) -> None:
    done = palestra("train", configuration(tmp_path, model))
    assert done.returncode == 0, done.stdout + done.stderr
    run = tmp_path / "runs" / "run"
    values = summary(tmp_path)
    assert values["exit"] == "done"
    assert values["steps"] == 4
    assert values["episodes"] == 4 * 2 * 4
    assert values["max_logprob_gap"] < 1e-3  # type: ignore[operator]
    assert values["sampled_logprob_gap"]["max"] < 1e-3  # type: ignore[index]
    assert values["leaked_sandboxes"] == 0
    assert {"success_before", "success_after", "wall_s", "weight_versions", "sync_mode", "seed"} <= values.keys()
    assert trained(tmp_path, "run") == [(step + 1, 2 * step + i) for step in range(4) for i in range(2)]
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in metrics if "rollout/reward_mean" in line] == [1, 2, 3, 4]
    assert list((run / "wandb").glob("offline-run-*"))
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step_000002", "step_000004"]
    tokens = sum(t.sampled_tokens for file in (run / "trajectories").glob("*.jsonl") for t in record.read(file))
    accounted = sum(int(str(value)) for key, value in values.items() if key.startswith("tokens_"))
    assert tokens == accounted == values["policy_tokens"]
    again = palestra("train", configuration(tmp_path, model))
    assert again.returncode == 0
    assert "has done its 4 steps" in again.stdout


def test_a_killed_run_goes_on_to_the_same_weights_as_one_that_was_not(tmp_path: Path, model: Path) -> None:
    whole = palestra("train", configuration(tmp_path, model, name="whole", steps=6))
    assert whole.returncode == 0, whole.stdout + whole.stderr
    for after in ("step 3/6", "step 4/6", "step 5/6"):
        process = begin("train", configuration(tmp_path, model, name="killed", steps=6))
        read_until(process, after)
        process.send_signal(signal.SIGKILL)
        process.wait()
    done = palestra("train", configuration(tmp_path, model, name="killed", steps=6))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "resuming from" in done.stdout
    one, two = weights(tmp_path, "whole", 6), weights(tmp_path, "killed", 6)
    assert one.keys() == two.keys()
    learned = [name for name in one if not name.startswith("rng/")]  # nothing draws from it: seeds are passed around
    assert all((one[name] == two[name]).all() for name in learned)  # type: ignore[attr-defined]
    assert trained(tmp_path, "killed") == trained(tmp_path, "whole")
    assert summary(tmp_path, "killed")["success_after"] == summary(tmp_path, "whole")["success_after"]
    lines = (tmp_path / "runs" / "killed" / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line)["step"] for line in lines if "rollout/reward_mean" in line]
    assert steps == [1, 2, 3, 4, 5, 6]


def test_a_termination_signal_saves_and_asks_to_be_requeued(tmp_path: Path, model: Path) -> None:
    process = begin("train", configuration(tmp_path, model, steps=500))
    read_until(process, "step 3/500")
    begun = time.monotonic()
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGUSR1)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 75, said
    assert time.monotonic() - begun < 30
    values = summary(tmp_path)
    assert values["exit"] == "interrupted"
    step = int(str(values["steps"]))
    assert step >= 3
    assert (tmp_path / "runs" / "run" / "checkpoints" / f"step_{step:06d}" / "manifest.json").exists()


def test_a_run_is_continued_only_by_its_own_configuration(tmp_path: Path, model: Path) -> None:
    path = configuration(tmp_path, model, steps=1)
    assert palestra("train", path).returncode == 0
    other = palestra("train", path, "optimizer.learning_rate=0.5")
    assert other.returncode == 2
    assert "optimizer.learning_rate: 0.01 -> 0.5" in other.stderr
    never = palestra("train", path, "--resume", "never")
    assert never.returncode == 2
    longer = palestra("train", path, "run.steps=2")
    assert longer.returncode == 0, longer.stderr
    assert summary(tmp_path)["steps"] == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["optimizer.learning_rat=1"], "Did you mean 'learning_rate'?"),
        (["run.group_size=4"], "rollout.group_size"),
        (["run.steps=many"], "run.steps is 'many'"),
        (["rollout.group_size=1"], "2 or more"),
        (["model.path=./no/such/folder"], "no such folder"),
        (["environment.name=arithmetics"], "'arithmetic'"),
        (["environment.options.task=3"], "'tasks'"),
        (["evaluation.tasks=1000"], "held-out tasks"),
        (["algorithm.name=rlo"], "'rloo'"),
        (["--resume", "sometimes"], "auto, never"),
        (["environment.budgets.context_tokens=100000"], "512"),
        (["environment.budgets.context_tokens=9", "environment.budgets.turn_tokens=9"], "prompts of the first tasks"),
    ],
)
def test_a_wrong_configuration_is_one_sentence_and_starts_nothing(
    tmp_path: Path, model: Path, words: list[str], said: str
) -> None:
    done = palestra("train", configuration(tmp_path, model), *words)
    assert done.returncode == 2, done.stdout + done.stderr
    assert said in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not list((tmp_path / "runs").rglob("ledger.sqlite"))


def test_a_dry_run_prints_and_starts_nothing(tmp_path: Path, model: Path) -> None:
    done = palestra("train", configuration(tmp_path, model), "--dry-run", "run.steps=7")
    assert done.returncode == 0, done.stderr
    assert "steps = 7" in done.stdout
    assert "7 of 2 groups x 4 episodes = 56 episodes" in done.stdout
    assert not (tmp_path / "runs").exists()


def test_evaluation_of_a_run_gives_its_interval(tmp_path: Path, model: Path) -> None:
    assert palestra("train", configuration(tmp_path, model, steps=2)).returncode == 0
    out = tmp_path / "eval.json"
    done = palestra("eval", tmp_path / "runs" / "run", "--tasks", "6", "--samples", "2", "--json", out)
    assert done.returncode == 0, done.stdout + done.stderr
    values = json.loads(out.read_text())
    assert values["success"]["tasks"] == 6
    assert values["success"]["samples"] == 12
    assert values["versions"] == [2]
    missing = palestra("eval", tmp_path / "runs" / "run", "--step", "9")
    assert missing.returncode == 2
    assert "step_000002" in missing.stderr


def test_the_first_cause_of_a_broken_environment_is_told(tmp_path: Path, model: Path) -> None:
    own = ["environment.name=wilful_environment:Wilful", "environment.options.at=verify_nan", "evaluation.tasks=2"]
    done = palestra("train", configuration(tmp_path, model), *own)
    assert done.returncode == 1, done.stdout + done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert "a score of nan" in last
    assert "task test-0" in last
    assert "Traceback" not in done.stderr
    assert summary(tmp_path)["exit"] == "failed"


@pytest.mark.parametrize("name", ["manifest.json", "learner.safetensors", "learner.json", "extra.json"])
def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_is_used(tmp_path: Path, name: str) -> None:
    for step in (2, 4):
        place = Checkpoints(tmp_path, base="x", keep=1000).save(LearnerState(step, "lora", {}), {}, step=step)
    (tmp_path / "step_000004.bak").mkdir()  # somebody's copy is no checkpoint
    (place / name).write_bytes(b"\xff\xfe damaged")
    folder = RunFolder(tmp_path, Config(), True, (tmp_path / ".lock").open("w"))
    said: list[str] = []
    start = find_start(replace(folder, path=linked(tmp_path)), "auto", said.append)
    assert start.step == 2
    assert any("step_000004 is not complete" in words for words in said)
    assert [path.name for path in places(tmp_path)] == ["step_000002"]  # so that it is not kept in place of a good one
    assert (tmp_path / "broken_step_000004_0").is_dir()


def linked(checkpoints: Path) -> Path:
    """A run folder around them."""
    run = checkpoints / "run"
    run.mkdir()
    (run / "checkpoints").symlink_to(checkpoints)
    return run


def test_a_run_whose_records_were_damaged_is_not_continued_in_silence(tmp_path: Path, model: Path) -> None:
    path, run = configuration(tmp_path, model, steps=1), tmp_path / "runs" / "run"
    assert palestra("train", path).returncode == 0
    (run / "summary.json").write_bytes(b"\xff")
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b"[1]\n\xff\xfe\n")
    ledger = (run / "ledger.sqlite").rename(run / "elsewhere")
    unknown = palestra("train", path, "run.steps=2")
    assert unknown.returncode == 1
    assert "would use tasks twice" in unknown.stderr
    ledger.rename(run / "ledger.sqlite")
    done = palestra("train", path, "run.steps=2")
    assert done.returncode == 0, done.stderr
    assert trained(tmp_path, "run") == [(1, 0), (1, 1), (2, 2), (2, 3)]


def test_settings_may_change_only_before_anything_has_begun(tmp_path: Path) -> None:
    def config(rate: float) -> Config:
        return parse_config({"run": {"folder": str(tmp_path)}, "optimizer": {"learning_rate": rate}}, "test")

    first = open_run(config(0.1))
    (first.model / "base").mkdir(parents=True)
    first.close()
    second = open_run(config(0.2))  # the first failed at its start, say: its mistake may be mended
    second.close()
    assert not second.model.exists()  # it was made with the settings of before
    (second.path / "ledger.sqlite").touch()
    with pytest.raises(ConfigError, match=r"learning_rate: 0\.2 -> 0\.1"):
        open_run(config(0.1))
    (second.path / "config.toml").unlink()
    with pytest.raises(ConfigError, match=r"config\.toml is gone"):
        open_run(config(0.2))
    with pytest.raises(ConfigError, match=r"run\.folder"):
        open_run(parse_config({"run": {"folder": "/dev/null"}}, "test"))


def test_who_only_looks_leaves_no_policy_in_the_run_folder(tmp_path: Path, model: Path) -> None:
    path = configuration(tmp_path, model)
    new = ["model.path=new", "model.new.layers=1", "model.new.hidden_size=32", "model.new.heads=1"]
    done = palestra("play", path, *new, cache=tmp_path / "cache")
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "runs").exists()  # else a run of the same name would take it up, whatever its settings
    assert len(list((tmp_path / "cache" / "policies").glob("[!.]*"))) == 1


def test_another_source_of_the_environment_is_another_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    source = tmp_path / "mine_for_digest.py"
    source.write_text("from toy_environment import Speeches\n")
    config = parse_config({"environment": {"name": "mine_for_digest:Speeches"}}, "test")
    load_taskset(config.environment.name, {})
    before = policy.digest(config)
    source.write_text("from toy_environment import Speeches\n# with other demonstrations\n")
    assert policy.digest(config) != before


@pytest.mark.parametrize("word", ["demonstrations played", "first token sampled"])
def test_a_termination_signal_is_heard_before_the_first_step(tmp_path: Path, model: Path, word: str) -> None:
    long = ["warm_start.demonstrations=32", "warm_start.epochs=100000", "warm_start.demonstrations_per_batch=2"]
    long = long if word.startswith("demo") else ["evaluation.tasks=12", "evaluation.samples=200"]
    process = begin("train", configuration(tmp_path, model), *long)
    read_until(process, word)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 75, said
    assert summary(tmp_path)["exit"] == "interrupted"
