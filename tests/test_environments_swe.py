"""The environment `swe_repository`: honest repairs earn 1, everything else 0, and git tells no more than the past."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path

import pytest

from palestra.envs.builtin.swe_instances import built_in
from palestra.envs.builtin.swe_repository import SweRepository, as_artefact
from palestra.envs.environment import JudgesInBoxes
from palestra.envs.errors import ConfigError
from palestra.envs.git_tree import Commit, blob_name, git_files
from palestra.envs.load import load_taskset
from palestra.envs.patches import changes, unified_diff
from palestra.envs.types import Artefact, Scored, StepResult, Task, Verdict
from playing import FORMAT, Lender, play
from sandbox_support import backend

SUBMIT = FORMAT.render_call("submit", {})
HOOK = """import pytest
@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    outcome.get_result().outcome = 'passed'
"""
TAMPERS = {
    "B01 tests": "mkdir -p tests; echo 'def test_x(): pass' > tests/test_hidden.py",
    "B04 conftest": f'printf %s "{HOOK}" > conftest.py; cp conftest.py tests/',
    "B05 settings": "printf '[pytest]\\naddopts = --collect-only\\n' > pytest.ini",
    "B22 ignored": "echo '*' > .gitignore; git update-index --assume-unchanged README.md; echo x >> README.md",
    "no git": "rm -rf .git",
}


def sh(command: str) -> str:
    return FORMAT.render_call("run", {"command": command})


def played(
    taskset: SweRepository, task: Task, *turns: str, kind: str = "docker"
) -> tuple[list[StepResult], Artefact, Verdict]:
    async def body() -> tuple[list[StepResult], Artefact, Verdict]:
        verifier = taskset.verifier()
        assert isinstance(verifier, JudgesInBoxes)
        verifier.lend(Lender(backend(kind)))
        steps, artefact = await play(taskset, task, Lender(backend(kind)), turns)
        return steps, artefact, await verifier.verify(task, artefact)

    return asyncio.run(body())


def left(taskset: SweRepository, task: Task, *turns: str) -> tuple[list[StepResult], Artefact]:
    """What an episode leaves, not judged: that takes an image with pytest."""
    return asyncio.run(play(taskset, task, Lender(backend("namespace")), turns))


def value(verdict: Verdict) -> float:
    assert isinstance(verdict, Scored), verdict
    return verdict.value


@pytest.fixture(scope="module")
def ours() -> SweRepository:
    taskset = load_taskset("swe_repository", {})
    assert isinstance(taskset, SweRepository)
    return taskset


@pytest.mark.docker
def test_a_repair_earns_1_and_nothing_done_earns_0(ours: SweRepository) -> None:
    task = ours.split("train")[0]
    steps, artefact, verdict = played(ours, task, *ours.demonstration(task, 0))
    assert "Add tests" in steps[0].observations[0].content
    assert value(verdict) == 1.0
    assert isinstance(artefact.answer, dict)
    assert "-        right = _sum(rest)\n+        right = _product(rest)\n" in str(artefact.answer["patch"])
    _, artefact, verdict = played(ours, task, SUBMIT)
    assert isinstance(verdict, Scored)
    assert (verdict.value, verdict.failure) == (0.0, None)  # K10: judged, not refused
    assert isinstance(artefact.answer, dict)
    assert artefact.answer["patch"] == ""


@pytest.mark.docker
@pytest.mark.parametrize("tamper", TAMPERS.values(), ids=TAMPERS)
def test_tampering_earns_nothing_and_costs_an_honest_repair_nothing(ours: SweRepository, tamper: str) -> None:
    task = ours.split("train")[0]
    assert value(played(ours, task, sh(tamper), SUBMIT)[2]) == 0.0
    assert value(played(ours, task, sh(tamper), *ours.demonstration(task, 0))[2]) == 1.0


@pytest.mark.docker
def test_every_built_in_instance_is_mended_by_its_gold_and_not_by_nothing(ours: SweRepository) -> None:
    instances = built_in()
    assert len({instance.id for instance in instances}) == len(instances) >= 20
    tasks = {task.id: task for name in ("train", "test") for task in ours.split(name)}
    assert set(tasks) == {instance.id for instance in instances}

    async def body() -> list[tuple[float, float]]:
        verifier = ours.verifier()
        assert isinstance(verifier, JudgesInBoxes)
        verifier.lend(Lender(backend("docker")))
        pairs = []
        for instance in instances[1::3]:  # one of each repository
            task = tasks[instance.id]
            gold = await verifier.verify(task, as_artefact(instance.gold, instance.base))
            none = await verifier.verify(task, Artefact(files=instance.base))
            assert isinstance(none, Scored)
            assert none.parts["passed"] == len(instance.pass_to_pass)
            pairs.append((value(gold), value(none)))
        return pairs

    assert asyncio.run(body()) == [(1.0, 0.0)] * 7


def test_the_box_holds_no_later_object_and_git_works_on_the_past(ours: SweRepository) -> None:
    task = ours.split("train")[0]
    [gold] = [blob_name(data) for each in built_in() if each.id == task.id for data in each.gold.written.values()]
    looks = "git log --all --oneline | wc -l; git status --porcelain | wc -l; git stash list; git reflog; git remote"
    steps, _ = left(
        ours,
        task,
        sh(looks),
        sh(f"git cat-file -e {gold}"),
        sh("git fsck --lost-found --strict"),
        sh("git diff HEAD~1 --stat && git checkout -q -b fix && git commit -q --allow-empty -m x"),
        SUBMIT,
    )
    assert steps[0].observations[0].content.split() == ["3", "0"]
    assert "exit status" in steps[1].observations[0].content
    assert "dangling" not in steps[2].observations[0].content
    assert "test_basics.py" in steps[3].observations[0].content


def test_git_reads_what_was_made_for_it(tmp_path: Path) -> None:
    files = {"a.txt": b"a\n", "a-b/c.txt": b"", "a/b/d.txt": b"d" * 300, "a0": b"x"}
    for path, data in {**files, **git_files([Commit("one", {}), Commit("two", files)])}.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(data)

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=tmp_path, capture_output=True, text=True, check=True).stdout

    assert git("fsck", "--strict") == ""
    assert git("status", "--porcelain") == ""
    assert git("log", "--format=%s").split() == ["two", "one"]


def test_a_patch_that_is_too_large_is_the_policy_s_own_failure(ours: SweRepository) -> None:
    task = ours.split("train")[0]
    _, _, verdict = played(ours, task, sh("head -c 3000000 /dev/zero > large"), SUBMIT, kind="namespace")
    assert verdict == Scored(0.0, failure="artefact_too_large")


def test_git_of_the_policy_runs_nowhere_else_and_odd_names_leave_unchanged(ours: SweRepository) -> None:
    task = ours.split("train")[0]
    odd = "git config core.fsmonitor 'touch /tmp/ran'; printf 'a\\r\\n' > \"$(printf 'o\\351\\nd')\""
    _, artefact = left(ours, task, sh(odd), sh("ln -s README.md link"), SUBMIT)
    assert artefact.files["o\udce9\nd"] == b"a\r\n"
    assert artefact.links == {"link": "README.md"}
    assert isinstance(artefact.answer, dict)
    assert '"b/o\\351\\012d"' in str(artefact.answer["patch"])


def test_changes_lead_from_the_base_to_the_tree_and_git_applies_their_diff(tmp_path: Path) -> None:
    base = {"keep": b"k\n", "gone": b"g\n", "edit": b"one\ntwo\nthree", "name": b"\n"}
    tree = {"keep": b"k\n", "edit": b"one\n2\r\nthree\n", "new/x": b"n", "name": b"\n"}
    made = changes(base, tree, executable=["new/x", "keep"])
    assert made.applied(base) == tree
    for path, data in base.items():
        (tmp_path / path).write_bytes(data)
    subprocess.run(["git", "apply", "-"], cwd=tmp_path, input=unified_diff(base, made).encode(), check=True)
    found = {path.relative_to(tmp_path).as_posix(): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert found == tree
    assert (tmp_path / "keep").stat().st_mode & 0o111


def folder(root: Path, settings: str) -> SweRepository:
    """An instance whose fix is in a pyproject.toml (K01)."""
    for path, text in {
        "instance.toml": f'issue = "Strict markers."\nfail_to_pass = ["tests/test_a.py::test_a"]\n{settings}',
        "repository/pyproject.toml": "[tool.pytest.ini_options]\n",
        "tests/tests/test_a.py": "def test_a(request):\n    assert request.config.getini('xfail_strict')\n",
        "gold/pyproject.toml": "[tool.pytest.ini_options]\nxfail_strict = true\n",
    }.items():
        (root / "one" / path).parent.mkdir(parents=True, exist_ok=True)
        (root / "one" / path).write_text(text)
    return SweRepository(str(root))


@pytest.mark.docker
def test_a_fix_in_a_file_of_settings_counts_where_the_task_allows_it(tmp_path: Path) -> None:
    allowing = folder(tmp_path / "a", 'allow_config = ["pyproject.toml"]\n')
    task = allowing.split("train")[0]
    assert value(played(allowing, task, *allowing.demonstration(task, 0))[2]) == 1.0
    assert value(played(allowing, task, SUBMIT)[2]) == 0.0
    strict = folder(tmp_path / "b", "")
    assert value(played(strict, task, *strict.demonstration(task, 0))[2]) == 0.0


@pytest.mark.parametrize(
    ("settings", "reason"),
    [("colour = 1\n", "no setting 'colour'"), ("issue = 3\n", "cannot be read"), ("image = 3\n", "expected a text")],
)
def test_a_bad_folder_is_refused_with_the_reason(tmp_path: Path, settings: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        folder(tmp_path, settings).split("train")


def test_an_instance_without_a_test_to_fail_is_refused(tmp_path: Path) -> None:
    taskset = folder(tmp_path, "")
    (tmp_path / "one" / "instance.toml").write_text('issue = "Nothing."\n')
    with pytest.raises(ConfigError, match="fail_to_pass is empty"):
        taskset.split("train")
