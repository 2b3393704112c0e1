"""The environment `harbor`: folders as they are, played in one box and judged in another."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from harbor_folders import greeting, legacy, repair, totals, write
from palestra.envs.builtin.harbor_tasks import Harbor
from palestra.envs.environment import JudgesInBoxes
from palestra.envs.errors import ConfigError
from palestra.envs.load import load_taskset
from palestra.envs.types import Artefact, CallStatus, Scored, StepResult, Task, Verdict
from playing import FORMAT, Lender, play
from sandbox_support import backend
from tiny_models import make_tinier

SUBMIT = FORMAT.render_call("submit", {})
TRAINING = """
[run]
name = "folder"
folder = "{runs}"
steps = 1
groups_per_step = 2
[model]
path = "{model}"
[model.lora]
rank = 4
[environment]
name = "harbor"
[environment.options]
folder = "{folder}"
[environment.sandbox]
backend = "namespace"
[environment.budgets]
steps = 1
turn_tokens = 16
tokens = 16
context_tokens = 512
[rollout]
group_size = 2
[rollout.engine]
kind = "transformers"
threads = 1
[optimizer]
threads = 1
[evaluation]
tasks = 1
[tracking]
wandb = "offline"
[cluster]
ray = false
"""
FOLDERS = pytest.mark.parametrize("made", [greeting, totals, repair, legacy])


def shell(command: str) -> str:
    return FORMAT.render_call("shell", {"command": command})


def only(folder: Path, **options: object) -> tuple[Harbor, Task]:
    """The taskset of one folder, and its task."""
    taskset = load_taskset("harbor", {"folder": str(folder), **options})
    assert isinstance(taskset, Harbor)
    alone = taskset if "test_folder" in options else Harbor(str(folder), test_folder=str(folder))
    return alone, alone.split("train")[0]


def judged(
    taskset: Harbor, task: Task, *turns: str, kind: str = "namespace"
) -> tuple[list[StepResult], Artefact, Verdict]:
    async def body() -> tuple[list[StepResult], Artefact, Verdict]:
        boxes, for_judging = Lender(backend(kind)), Lender(backend(kind))
        verifier = taskset.verifier()
        assert isinstance(verifier, JudgesInBoxes)
        verifier.lend(for_judging)
        try:
            steps, artefact = await play(taskset, task, boxes, turns)
            verdict = await verifier.verify(task, artefact)
        finally:
            await verifier.close()
        assert boxes.lent == for_judging.lent == 0
        return steps, artefact, verdict

    return asyncio.run(body())


def value(verdict: Verdict) -> float:
    assert isinstance(verdict, Scored), verdict
    return verdict.value


@FOLDERS
def test_the_folder_s_own_solution_earns_1_and_doing_nothing_0(made: Callable[[Path], Path], tmp_path: Path) -> None:
    taskset, task = only(made(tmp_path))
    steps, _, verdict = judged(taskset, task, *taskset.demonstration(task, 0))
    assert steps[-1].done
    assert {result.status for step in steps for result in step.results} == {CallStatus.OK}, steps
    assert value(verdict) == 1.0, verdict
    assert value(judged(taskset, task, SUBMIT)[2]) == 0.0


@pytest.mark.docker
def test_in_docker_too(tmp_path: Path) -> None:
    taskset, task = only(totals(tmp_path))
    assert value(judged(taskset, task, *taskset.demonstration(task, 0), kind="docker")[2]) == 1.0
    assert value(judged(taskset, task, SUBMIT, kind="docker")[2]) == 0.0


def test_the_policy_sees_neither_tests_nor_solution_and_writes_no_reward(tmp_path: Path) -> None:
    taskset, task = only(totals(tmp_path))
    look = shell("ls /tests /solution /logs 2>&1; find / -name 'expected.txt' -o -name 'solve.sh' 2>/dev/null; true")
    forge = shell("mkdir -p out/verifier; echo 1 | tee out/verifier/reward.txt out/reward.txt")
    steps, artefact, verdict = judged(taskset, task, look, forge, SUBMIT)
    seen = steps[0].observations[0].content
    assert seen.count("No such file") == 3
    assert "expected.txt" not in seen
    assert "solve.sh" not in seen
    assert "out/reward.txt" in artefact.files
    assert isinstance(verdict, Scored)
    assert verdict.value == 0.0
    assert "reward_preplanted" in verdict.flags


def test_only_what_the_artifacts_name_leaves_the_box(tmp_path: Path) -> None:
    taskset, task = only(totals(tmp_path))
    _, artefact, _ = judged(taskset, task, *taskset.demonstration(task, 0))
    assert sorted(artefact.files) == ["log/a.log", "out/sums.txt"]


def test_too_much_to_hand_over_is_the_policy_s_own_doing(tmp_path: Path) -> None:
    taskset, task = only(greeting(tmp_path))
    _, artefact, verdict = judged(taskset, task, shell("head -c 5000000 /dev/zero > large"), SUBMIT)
    assert artefact.failure == "artefact_too_large"
    assert verdict == Scored(0.0, failure="artefact_too_large")


def test_a_failing_command_is_an_observation_with_its_status(tmp_path: Path) -> None:
    taskset, task = only(greeting(tmp_path))
    steps, _, _ = judged(taskset, task, shell("echo out; echo err >&2; exit 7"), shell("sleep 9 & true"), SUBMIT)
    assert steps[0].results[0].status is CallStatus.ERROR
    assert steps[0].observations[0].content == "error: out\nerr\n[exit status 7]"
    assert steps[1].observations[0].content == "[1 background processes were ended]"


def test_a_folder_of_tasks_is_split_and_the_same_each_time(tmp_path: Path) -> None:
    for number in range(5):
        greeting(tmp_path, f"greeting-{number}")
    taskset = Harbor(str(tmp_path), test_fraction=0.4)
    train, test = taskset.split("train"), taskset.split("test")
    assert (len(train), len(test)) == (3, 2)
    assert {task.id for task in train} | {task.id for task in test} == {f"harbor/greeting-{n}" for n in range(5)}
    assert [task.id for task in Harbor(str(tmp_path), test_fraction=0.4).split("test")] == [task.id for task in test]


def test_a_prompt_is_the_instruction_and_what_is_done_otherwise_is_noted(tmp_path: Path) -> None:
    taskset, task = only(greeting(tmp_path))
    assert task.prompt[1].content == "Write 'Hello, world!' into /app/hello.txt."
    [notes] = {id: notes for id, notes in taskset.notes().items() if id == task.id}.values()
    assert any("shared: judged in a separate box" in note for note in notes)


def test_refused_tasks_stop_the_run_with_their_reasons_unless_they_are_to_be_skipped(tmp_path: Path) -> None:
    greeting(tmp_path)
    totals(tmp_path)
    write(tmp_path / "gpu", {"task.toml": "[environment]\ngpus = 1\n", "instruction.md": "", "tests/test.sh": ""})
    with pytest.raises(ConfigError, match=r"1 of 3 tasks refused(.|\n)*gpus"):
        Harbor(str(tmp_path)).split("train")
    assert len(Harbor(str(tmp_path), skip_refused=True).split("train")) == 1


def test_a_folder_without_enough_tasks_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"expected task\.toml"):
        Harbor(str(tmp_path)).split("train")
    with pytest.raises(ConfigError, match="name a test_folder"):
        Harbor(str(greeting(tmp_path))).split("train")
    with pytest.raises(ConfigError, match="no such folder"):
        Harbor(str(tmp_path / "none")).split("train")


def test_a_folder_trains_and_evaluates_without_a_change_to_it(tmp_path: Path) -> None:
    folder = tmp_path / "tasks"
    for made in (greeting, totals, repair):
        made(folder)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    settings = tmp_path / "run.toml"
    settings.write_text(TRAINING.format(runs=tmp_path / "runs", model=make_tinier(tmp_path / "model"), folder=folder))
    env = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "palestra.rl", "train", str(settings)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "runs" / "folder" / "summary.json").read_text())
    assert summary["exit"] == "done"
    assert summary["episodes"] == 4
    assert summary["invalid_episodes"] == summary["leaked_sandboxes"] == 0
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
