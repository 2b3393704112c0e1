"""`palestra train` with what a step can do: replaced groups, several updates per batch, every mode, any lag."""

from __future__ import annotations

import json
import signal
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from palestra.envs.errors import ConfigError, IntegrityError
from palestra.rl.commands.train import run_train
from palestra.rl.exit_codes import DONE, STOP_SIGNALS
from palestra.rl.ledger import Ledger
from palestra.rollout import record
from test_train import begin, configuration, read_until, summary, trained, weights
from tiny_models import make_tinier

QUIET = [
    *("tracking.wandb=disabled", "evaluation.tasks=0", "optimizer.warmup_steps=0"),
    "environment.budgets.steps=1",
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tinier(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    """A command ends deaf to stop signals; the tests go on."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def train(path: Path, *words: str) -> int:
    """The command, in this process."""
    return run_train(path, [*QUIET, *words], resume="auto", dry_run=False)


def steps_of(folder: Path, name: str = "run") -> list[dict[str, object]]:
    lines = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if "rollout/reward_mean" in line]


def outcomes(folder: Path, name: str) -> list[tuple[int, int, str]]:
    with sqlite3.connect(folder / "runs" / name / "ledger.sqlite") as db:
        return list(db.execute("SELECT step, position, outcome FROM trained WHERE undone = 0 ORDER BY position"))


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize(
    "mode",
    [
        ["algorithm.mode=on_policy"],
        [
            *("algorithm.mode=decoupled", "algorithm.correction=turn_geo_mask"),
            *("algorithm.correction_low=0.5", "algorithm.correction_high=2.0"),
        ],
        ["algorithm.mode=decoupled_loglinear"],
        ["algorithm.mode=bypass", "algorithm.correction=none"],
    ],
    ids=lambda words: words[0].partition("=")[2],
)
def test_every_mode_trains_in_several_updates_per_batch_and_publishes_once(
    tmp_path: Path, model: Path, mode: list[str], lag: int
) -> None:
    words = [*mode, f"run.max_lag={lag}", "algorithm.updates_per_batch=2", "algorithm.epochs=2", f"run.steps={2 + lag}"]
    assert train(configuration(tmp_path, model), *words) == DONE
    steps = steps_of(tmp_path)
    version = 0
    for line in steps:
        assert line["rollout/version"] == version  # what the batch was sampled by last is what was published last
        if "update/version" in line:
            assert int(str(line["update/version"])) == version + int(str(line["update/updates"]))
            version = int(str(line["update/version"]))
    assert [line["rollout/oldest_version"] for line in steps][: 1 + lag] == [0] * (1 + lag)
    values = summary(tmp_path)
    assert values["weight_versions"] == version + 1
    assert version >= 2
    assert trained(tmp_path, "run") == [(step + 1, 2 * step + i) for step in range(2 + lag) for i in range(2)]


def test_a_run_that_replaces_groups_and_is_killed_trains_each_task_once_to_the_same_weights(
    tmp_path: Path, model: Path
) -> None:
    dapo = ["algorithm.name=dapo", "algorithm.updates_per_batch=2", "algorithm.max_refills=9"]
    assert train(configuration(tmp_path, model, name="whole", steps=3), *dapo) == DONE
    for after in ("step 1/3", "step 2/3"):
        process = begin("train", configuration(tmp_path, model, name="killed", steps=3), *QUIET, *dapo)
        read_until(process, after)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert train(configuration(tmp_path, model, name="killed", steps=3), *dapo) == DONE
    found = outcomes(tmp_path, "killed")
    assert found == outcomes(tmp_path, "whole")
    assert [position for _, position, _ in found] == list(range(len(found)))
    assert len(found) > 3 * 2  # some were replaced
    assert {outcome for _, _, outcome in found} == {"trained", "filtered"}
    for step in range(1, 4):
        assert sum(outcome == "trained" for at, _, outcome in found if at == step) == 2
    one, two = weights(tmp_path, "whole", 3), weights(tmp_path, "killed", 3)
    learned = [name for name in one if not name.startswith("rng/")]
    assert all((one[name] == two[name]).all() for name in learned)  # type: ignore[attr-defined]
    _tokens_add_up(tmp_path, "whole")


def _tokens_add_up(folder: Path, name: str) -> None:
    values = summary(folder, name)
    run = folder / "runs" / name
    recorded = sum(t.sampled_tokens for file in (run / "trajectories").glob("*.jsonl") for t in record.read(file))
    accounted = sum(int(str(value)) for key, value in values.items() if key.startswith("tokens_"))
    assert recorded == accounted == values["policy_tokens"]
    steps = steps_of(folder, name)
    assert sum(int(str(line["update/tokens_filtered"])) for line in steps) == values["tokens_filtered"]
    assert sum(int(str(line["update/action_tokens"])) for line in steps) == values["tokens_trained"]


def test_critic_shaping_and_a_kl_in_the_reward_work_together_in_a_run(tmp_path: Path, model: Path) -> None:
    words = [
        *("algorithm.name=ppo", "algorithm.kl=reward_k1", "algorithm.kl_coefficient=0.05", "run.steps=2"),
        *("algorithm.overlong_tokens=60", "algorithm.overlong_cache=30", "algorithm.step_cost=0.05"),
        *("rollout.truncated=mask", "run.min_group_size=2", "algorithm.updates_per_batch=2"),
    ]
    assert train(configuration(tmp_path, model), *words) == DONE
    for line in steps_of(tmp_path):
        assert line["rollout/step_cost_mean"] == pytest.approx(0.05 * float(str(line["rollout/turns_mean"])))
        taken = sum(float(str(line[f"rollout/{name}_mean"])) for name in ("overlong", "step_cost"))
        assert line["rollout/credited_reward_mean"] == pytest.approx(float(str(line["rollout/reward_mean"])) - taken)
        assert line["update/tokens_truncated"] == sum(
            t.sampled_tokens for t in _episodes(tmp_path, int(str(line["step"]))) if t.terminated_by == "steps"
        )


def _episodes(folder: Path, step: int) -> list[record.Trajectory]:
    file = folder / "runs" / "run" / "trajectories" / f"{step - 1:06d}-l1.jsonl"
    return list(record.read(file))


def test_a_run_that_cannot_find_what_it_may_learn_from_stops_and_says_so(tmp_path: Path, model: Path) -> None:
    from palestra.envs.errors import PalestraError

    words = ["algorithm.dynamic_sampling=true", "algorithm.max_refills=0", 'algorithm.when_uninformative="fail"']
    with pytest.raises(PalestraError, match="informative after 0 refills"):
        train(configuration(tmp_path, model), *words, "rollout.group_size=2", "run.groups_per_step=12", "run.steps=2")
    assert summary(tmp_path)["exit"] == "failed"


def test_what_is_missing_on_this_machine_is_told_before_a_run_folder_is_made(tmp_path: Path, model: Path) -> None:
    missing = ["environment.sandbox.backend=docker", "environment.sandbox.image=no/such:image"]
    for words in (["model.path=package:no-such-package"], ["model.path=no-such-org/no-such-model"], missing):
        with pytest.raises(ConfigError):
            train(configuration(tmp_path, model), *words)
        assert not (tmp_path / "runs").exists()


def test_an_evaluation_says_at_which_temperature_it_sampled(tmp_path: Path, model: Path) -> None:
    words = ["evaluation.tasks=2", "evaluation.temperature=0.5", "run.steps=1"]
    assert train(configuration(tmp_path, model), *words) == DONE
    for when in ("success_before", "success_after"):
        assert summary(tmp_path)[when]["temperature"] == 0.5  # type: ignore[index]
    lines = map(json.loads, (tmp_path / "runs" / "run" / "metrics.jsonl").read_text().splitlines())
    assert [line["eval/temperature"] for line in lines if "eval/success" in line] == [0.5, 0.5]


def test_a_ledger_of_another_version_is_refused_when_it_is_opened(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    with sqlite3.connect(path) as db:
        db.execute(
            "CREATE TABLE trained (position INTEGER NOT NULL, life INTEGER NOT NULL, step INTEGER NOT NULL, "
            "version INTEGER NOT NULL, task_id TEXT NOT NULL, outcome TEXT NOT NULL, sampled_tokens INTEGER NOT NULL, "
            "undone INTEGER NOT NULL DEFAULT 0)"
        )
    with pytest.raises(IntegrityError, match=r"its table trained differs in invalid_tokens, truncated_tokens; go on"):
        Ledger(path)


def test_a_checkpoint_knows_how_many_tasks_were_used(tmp_path: Path, model: Path) -> None:
    path, run = configuration(tmp_path, model), tmp_path / "runs" / "run"
    assert train(path, "run.steps=2") == DONE
    with sqlite3.connect(run / "ledger.sqlite") as db:  # as if a group more had been used by these weights
        db.execute("INSERT INTO trained VALUES (4, 1, 2, 0, 'x', 'filtered', 0, 0, 0, 0)")
    with pytest.raises(IntegrityError, match=r"knows of 5 tasks .* of 4; going on would use tasks twice"):
        train(path, "run.steps=3")


def test_what_was_sampled_in_tries_that_were_given_up_is_counted(tmp_path: Path, model: Path) -> None:
    broken = ["environment.name=wilful_environment:Wilful", "environment.options.at=verify_nan", "run.steps=1"]
    words = [*broken, "rollout.max_attempts=3", "run.max_invalid_fraction=1.0", "rollout.group_size=2"]
    assert train(configuration(tmp_path, model), *words) == DONE
    values, (line,) = summary(tmp_path), steps_of(tmp_path)
    assert values["policy_tokens"] == values["tokens_invalid"] == line["update/tokens_invalid"]
    assert values["discarded_tokens"] == 2 * int(str(values["policy_tokens"]))  # by its seed each try says the same
    assert line["rollout/discarded_tokens"] == values["discarded_tokens"]
    assert all(t.facts["attempts"] == 3 for t in _episodes(tmp_path, 1))
