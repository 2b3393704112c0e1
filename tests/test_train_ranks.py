"""`palestra train` with several learner ranks: it learns, a rank may be killed, and it goes on with another layout."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from palestra.rl.load_config import parse_config
from palestra.rl.preflight import check
from test_train import begin, configuration, palestra, read_until, summary, trained, weights
from tests_support import require

RANKS = ("cluster.ray=true", "cluster.players=driver", "evaluation.tasks=0")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tiny_models import make_tinier

    return make_tinier(tmp_path_factory.mktemp("model"))


@pytest.mark.ray
def test_a_killed_rank_ends_the_run_cleanly_and_it_goes_on_with_other_ranks(tmp_path: Path, model: Path) -> None:
    require("ray")
    path = configuration(tmp_path, model, steps=6)
    sharded = ("cluster.learner_ranks=2", "cluster.learner_sharding=shard")
    process = begin("train", path, *RANKS, *sharded, "run.steps=500")
    said = read_until(process, "step 2: checkpoint written")
    pids = [int(pid) for pid in re.findall(r"learner rank \d on .*, pid (\d+) is up", said)]
    assert len(pids) == 2
    os.kill(pids[1], signal.SIGKILL)
    rest, _ = process.communicate(timeout=90)
    assert process.returncode == 1, said + rest
    assert "learner rank 1" in rest
    assert "its process is dead" in rest
    assert "goes on from the last checkpoint" in rest
    assert "Traceback" not in rest
    assert summary(tmp_path)["exit"] == "failed"
    assert not Path(f"/proc/{pids[0]}").exists()
    done = palestra("train", path, *RANKS, "cluster.learner_ranks=3", "run.steps=6")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "resuming from" in done.stdout
    assert summary(tmp_path)["exit"] == "done"
    assert [step for step, _ in trained(tmp_path, "run")] == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6]


@pytest.mark.ray
@pytest.mark.slow
def test_whole_or_in_parts_ranks_learn_what_one_learns(tmp_path: Path, model: Path) -> None:
    require("ray")
    layouts = {
        "alone": (),
        "whole": (*RANKS, "cluster.learner_ranks=2"),
        "parts": (*RANKS, "cluster.learner_ranks=2", "cluster.learner_sharding=shard"),
    }
    for name, words in layouts.items():
        done = palestra("train", configuration(tmp_path, model, name=name, steps=2), "evaluation.tasks=0", *words)
        assert done.returncode == 0, done.stdout + done.stderr
    alone = weights(tmp_path, "alone", 2)
    for name in ("whole", "parts"):
        found = weights(tmp_path, name, 2)
        assert found.keys() == alone.keys()
        for key in (key for key in alone if not key.startswith("rng/")):
            assert abs(found[key] - alone[key]).max() < 1e-4, f"{name}: {key}"  # type: ignore[operator]


def test_ranks_without_ray_are_refused(tmp_path: Path, model: Path) -> None:
    done = palestra("train", configuration(tmp_path, model), "cluster.learner_ranks=2")
    assert done.returncode == 2
    assert "cluster.learner_ranks is 2, but cluster.ray is false" in done.stderr


def test_the_plan_says_how_the_learner_is_laid_out(model: Path) -> None:
    values = {
        "model": {"path": str(model)},
        "environment": {"name": "toy_environment:Speeches", "budgets": {"context_tokens": 256, "turn_tokens": 60}},
        "run": {"groups_per_step": 2},
        "evaluation": {"tasks": 4},
        "cluster": {"learner_ranks": 4, "learner_sharding": "shard"},
    }
    assert any("4 ranks" in line and "shard" in line for line in check(parse_config(values, "test")).lines())
