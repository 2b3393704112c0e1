"""The batch script on a real slurm of two nodes, each with its own address and process table."""

from __future__ import annotations

import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from tempfile import mkdtemp

import pytest

from palestra.envs.errors import ConfigError
from palestra.envs.types import Scored
from palestra.rollout import record
from palestra.rollout.hosts import RAY_SUFFIX, SOCKET_PATH_BYTES, host_address, pick_ports, short_folder
from tests_support import require

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "slurm" / "train.sbatch"
CLUSTER = ROOT / "scripts" / "slurm_test_cluster"
HERE = Path(__file__).parent
STEPS = 16
ENGINE = r"rollout worker replica (\d) \(player \d on (pt\d) \(198\.18\.\d+\.\d+\), pid (\d+)\)"
CONFIG = """
[run]
name = "run"
folder = "{folder}/runs"
steps = {steps}
groups_per_step = 2
[model]
path = "{folder}/model"
[model.lora]
rank = 4
[environment]
name = "boxed_environment:CountedSpeeches"
options = {{ tasks = 100 }}
[environment.sandbox]
backend = "namespace"
[environment.budgets]
steps = 2
turn_tokens = 60
tokens = 120
context_tokens = 256
[rollout]
group_size = 8
[rollout.engine]
kind = "transformers"
replicas = 2
threads = 1
[optimizer]
learning_rate = 1e-2
threads = 1
[evaluation]
tasks = 4
[tracking]
wandb = "disabled"
"""


@pytest.fixture(scope="module")
def slurm() -> Iterator[dict[str, str]]:
    """The environment in which this cluster's commands work."""
    require("slurm")
    require("ray")
    folder = Path(mkdtemp(prefix="ps-", dir="/tmp"))  # not pytest's: a socket's path must be short
    started = subprocess.run([CLUSTER, "start", folder], capture_output=True, text=True, timeout=120, check=False)
    if started.returncode:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(started.stderr)
    try:
        yield {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
    finally:
        subprocess.run([CLUSTER, "stop", folder], timeout=60, check=True)
        shutil.rmtree(folder)


def configuration(folder: Path) -> Path:
    """The file of a small run whose policy is right now and then, so that there is something to learn."""
    from tiny_models import make_tinier

    make_tinier(folder / "model")
    path = folder / "config.toml"
    path.write_text(CONFIG.format(folder=folder, steps=STEPS))
    return path


def submit(slurm: dict[str, str], folder: Path, **variables: object) -> int:
    """The job's number. What is not set here is not set in the job, whatever the machine has."""
    exported = ",".join(["ALL", *(f"{name}={value}" for name, value in variables.items())])
    environment = {name: value for name, value in slurm.items() if name not in ("VENV", "CONFIG")}
    done = subprocess.run(
        ["sbatch", "--parsable", f"--export={exported}", "--time=5", SCRIPT],
        env=environment, cwd=folder, capture_output=True, text=True, timeout=30, check=True,
    )  # fmt: skip
    return int(done.stdout)


def log_of(folder: Path, job: int) -> str:
    path = folder / f"palestra-{job}.log"
    return path.read_text() if path.exists() else ""


def wait_for(slurm: dict[str, str], folder: Path, job: int, text: str, limit_s: float) -> str:
    """The job's log once it holds `text`."""
    deadline = time.monotonic() + limit_s
    while text not in (log := log_of(folder, job)):
        ended = re.search(r"train\.sbatch: exit code (?!75)", log)
        if time.monotonic() > deadline or ended:
            queue = subprocess.run(["squeue"], env=slurm, capture_output=True, text=True, timeout=30, check=False)
            told = "\n".join(line for line in log.splitlines() if "VINFO" not in line)  # what Ray says at its end
            pytest.fail(f"no {text!r} within {limit_s:g} s in the log of job {job}:\n{told[-6000:]}\n{queue.stdout}")
        time.sleep(0.2)
    return log


def kill(slurm: dict[str, str], job: int, node: str, pid: str) -> None:
    """SIGKILL, to a process of a job, by its number on its node."""
    place = ["--jobid", str(job), "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={node}"]
    subprocess.run(["srun", *place, "kill", "-KILL", pid], env=slurm, capture_output=True, timeout=30, check=True)


def steps_in(log: str) -> list[int]:
    return [int(step) for step in re.findall(rf"step (\d+)/{STEPS}: success", log)]


@pytest.mark.slurm
@pytest.mark.ray
@pytest.mark.timeout(420)
def test_a_run_on_two_nodes_outlives_a_killed_engine_and_goes_on_after_a_signal_to_its_end(
    slurm: dict[str, str], tmp_path: Path
) -> None:
    stale = tmp_path / "ray" / "ray_current_cluster"  # of a cluster that is gone
    stale.parent.mkdir()
    stale.write_text("198.51.100.7:6379")
    long_folder = tmp_path / "a-folder-for-temporary-files-with-a-name-as-long-as-a-slurm-job-may-have-it"
    long_folder.mkdir()
    places = {"RAY_TMPDIR": tmp_path, "TMPDIR": long_folder, "PYTHONPATH": HERE}

    job = submit(slurm, tmp_path, VENV=sys.prefix, CONFIG=configuration(tmp_path), **places)
    log = wait_for(slurm, tmp_path, job, f"step 1/{STEPS}", 150)
    engines = {node: (seat, pid) for seat, node, pid in re.findall(rf"{ENGINE} is up", log)}
    assert sorted(engines) == ["pt1", "pt2"]
    seat, pid = engines["pt2"]  # the trainer runs on pt1
    kill(slurm, job, "pt2", pid)
    log = wait_for(slurm, tmp_path, job, "takes the place of the lost one", 90)
    assert re.search(rf"replica {seat} is lost: player {seat} on pt2 .*, pid {pid}: its process is dead", log)
    assert re.findall(rf"{ENGINE} takes the place", log)[0][:2] == (seat, "pt2")
    replaced_at = steps_in(log)[-1]
    wait_for(slurm, tmp_path, job, f"step {replaced_at + 3}/{STEPS}", 60)

    subprocess.run(["scancel", "--signal=USR1", "--batch", str(job)], env=slurm, timeout=30, check=True)
    log = wait_for(slurm, tmp_path, job, f"train.sbatch: job {job}.1, head", 90)
    assert "USR1: asking the trainer to save and leave" in log
    assert f"interrupted and resumable: queueing job {job} again" in log
    stopped_at = steps_in(log)[-1]
    assert f"step {stopped_at}: checkpoint written" in log
    log = wait_for(slurm, tmp_path, job, "train.sbatch: exit code 0", 150)
    assert steps_in(log) == list(range(1, STEPS + 1))
    assert re.search(r"pt1: Ray in /tmp/palestra-\w+, ports \d+", log), "the long folder was used"
    check_run(tmp_path / "runs" / "run", replaced_at, stopped_at)


def check_run(run: Path, replaced_at: int, stopped_at: int) -> None:
    """What a run leaves that was continued after `stopped_at` steps, and had an engine replaced by `replaced_at`."""
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["exit"], summary["steps"], summary["leaked_sandboxes"]) == ("done", STEPS, 0)
    assert summary["success_before"]["tasks"] == summary["success_after"]["tasks"] == 4
    with closing(sqlite3.connect(run / "ledger.sqlite")) as ledger:
        assert list(ledger.execute("SELECT life, resumed_from FROM lives")) == [(1, 0), (2, stopped_at)]
        trained = list(ledger.execute("SELECT step, position, task_id, undone FROM trained ORDER BY position"))
    assert [row[:2] for row in trained] == [(1 + i // 2, i) for i in range(2 * STEPS)]
    assert len({task for _, _, task, undone in trained if not undone}) == 2 * STEPS
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in metrics if "eval/success" in line] == [0, STEPS]
    updates = [line["step"] for line in metrics if "update/loss" in line]
    assert len([step for step in updates if replaced_at < step <= stopped_at]) >= 2
    assert len([step for step in updates if stopped_at < step]) >= 2
    for step, life in ((1, 1), (replaced_at + 2, 1), (STEPS, 2)):
        episodes = list(record.read(run / "trajectories" / f"{step - 1:06d}-l{life}.jsonl"))
        assert all(episode.valid for episode in episodes)
        assert {node for e in episodes if isinstance(e.verdict, Scored) for node in e.verdict.parts} == {"pt1", "pt2"}


@pytest.mark.slurm
@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({}, "VENV is not set"),
        ({"VENV": "{venv}"}, "CONFIG is not set"),
        ({"VENV": "/nowhere", "CONFIG": "{file}"}, "no /nowhere/bin/python on pt1: VENV must hold palestra"),
        ({"VENV": "{venv}", "CONFIG": "/nowhere.toml"}, "no readable file /nowhere.toml on pt1"),
        ({"VENV": "{venv}", "CONFIG": "{file}", "INTERFACE": "ib7"}, "pt1 has no IPv4 address on interface 'ib7'"),
    ],
)
def test_a_job_that_cannot_work_says_so_before_anything_starts(
    slurm: dict[str, str], tmp_path: Path, variables: dict[str, str], message: str
) -> None:
    (tmp_path / "config.toml").write_text("")
    known = {"{venv}": sys.prefix, "{file}": str(tmp_path / "config.toml")}
    job = submit(slurm, tmp_path, **{name: known.get(value, value) for name, value in variables.items()})
    log = wait_for(slurm, tmp_path, job, message, 30)
    assert "Ray in" not in log


def test_every_line_for_slurm_has_its_reason_above_it() -> None:
    lines = SCRIPT.read_text().splitlines()
    options = [i for i, line in enumerate(lines) if line.startswith("#SBATCH")]
    assert len(options) >= 8
    assert [lines[i] for i in options if not re.match(r"# \w", lines[i - 1])] == []


NAMES = {
    "one address": ([("lo", "127.0.0.1"), ("eth0", "10.0.0.4")], ["127.0.1.1"], None, "10.0.0.4"),
    "the name decides": ([("eth0", "10.0.0.4"), ("docker0", "172.17.0.1")], ["10.0.0.4"], None, "10.0.0.4"),
    "the interface decides": ([("eth0", "10.0.0.4"), ("ib0", "10.9.0.4")], ["10.0.0.4"], "ib0", "10.9.0.4"),
}


@pytest.mark.parametrize(("interfaces", "named", "interface", "expected"), NAMES.values(), ids=NAMES)
def test_the_head_gets_the_address_that_other_nodes_can_reach(
    interfaces: list[tuple[str, str]], named: list[str], interface: str | None, expected: str
) -> None:
    assert host_address(interface, interfaces=lambda: interfaces, lookup=lambda: named) == expected


@pytest.mark.parametrize("named", [["127.0.0.1"], ["10.0.0.4", "10.9.0.4"], []])
def test_a_head_with_several_addresses_and_no_choice_is_refused_with_the_choices(named: list[str]) -> None:
    interfaces = [("lo", "127.0.0.1"), ("eth0", "10.0.0.4"), ("ib0", "10.9.0.4")]
    with pytest.raises(ConfigError, match=r"choose an interface; it has lo 127\.0\.0\.1, eth0 10\.0\.0\.4, ib0"):
        host_address(None, interfaces=lambda: interfaces, lookup=lambda: named)


def test_ports_belong_to_the_job_and_skip_what_is_taken() -> None:
    first, second = pick_ports("4711", 3, is_free=lambda port: True), pick_ports("4712", 3, is_free=lambda port: True)
    assert len({*first, *second}) == 6
    assert pick_ports("4711", 3, is_free=lambda port: port != first[0])[0] == first[1]
    with pytest.raises(ConfigError, match="only 0 ports are free"):
        pick_ports("4711", 1, is_free=lambda port: False)


def test_a_folder_that_is_too_long_for_a_socket_is_not_used(tmp_path: Path) -> None:
    long_folder = tmp_path / ("x" * 60)
    long_folder.mkdir()
    folder = short_folder(str(long_folder))
    try:
        assert not folder.is_relative_to(long_folder)
        assert len(str(folder)) + len(RAY_SUFFIX) <= SOCKET_PATH_BYTES
    finally:
        folder.rmdir()
    with pytest.raises(ConfigError, match=r"of 107 bytes Ray needs 64, which leaves 43 .* gives \d+ bytes"):
        short_folder(str(long_folder), prefix="x" * 40)
