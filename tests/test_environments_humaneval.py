"""humaneval_repair: its faults are real, its tests are those of the data, and its tools say what was wrong."""

from __future__ import annotations

import ast

import pytest

from judging import Court, court, courts, home
from palestra.envs.builtin.faults import faults_of
from palestra.envs.builtin.humaneval_faults import FAULTS
from palestra.envs.builtin.humaneval_repair import SOLUTION, VISIBLE, HumanEvalRepair, changed_lines
from palestra.envs.builtin.humaneval_tests import hidden_cases, visible_examples
from palestra.envs.errors import ConfigError
from palestra.envs.load import load_taskset
from palestra.envs.types import Artefact, CallStatus, Scored, Task, Verdict
from palestra.envs.verifiers.boxed import BoxVerifier
from playing import FORMAT, play
from repair_policies import SUBMIT, shell, truth, write
from tests_support import data_folder, require

__all__ = ["court", "courts", "home"]

SAMPLED = 13  # every so many of the tasks is played or judged in full


@pytest.fixture
def taskset(monkeypatch: pytest.MonkeyPatch) -> HumanEvalRepair:
    require("data")
    monkeypatch.setenv("PALESTRA_DATA", str(data_folder()))
    return HumanEvalRepair()


def judge(court: Court, taskset: HumanEvalRepair, task: Task, artefact: Artefact) -> Verdict:
    verifier = taskset.verifier()
    assert isinstance(verifier, BoxVerifier)
    verifier.lend(court.boxes)
    return court.home.do(verifier.verify(task, artefact))


# -- faults ------------------------------------------------------------------------------------------------------------

CODE = '''def f(a, b):
    """é"""
    if a < b and not b:
        return f"{a + 1}"
    return min(range(a), b) + 1
'''


def test_a_fault_is_one_replaced_piece_of_the_text() -> None:
    made = {fault.kind: fault.applied(CODE) for fault in faults_of(CODE, "f")}
    assert "if a <= b and not b" in made["comparison"] or "if a > b and" in made["comparison"]
    assert "if a < b or not b:" in made["connective"]
    assert "if False:" in made["removed branch"]
    assert "min(b, range(a))" in made["swapped arguments"]
    assert "range(a - 1)" in made["boundary"]
    assert "min(range(a), b) - 1" in made["operator"]
    for text in made.values():
        ast.parse(text)
        assert 'f"{a + 1}"' in text, "what stands in the braces of a text is left as it is"
        old, new = changed_lines(text, CODE)
        assert text.replace(old, new, 1) == CODE


def test_only_the_named_function_is_changed() -> None:
    assert faults_of("def helper(n):\n    return n + 1\n\ndef g(n):\n    return helper\n", "g") == ()


# -- tests -------------------------------------------------------------------------------------------------------------


def test_assertions_become_tests_of_their_own_with_the_helpers_that_they_use() -> None:
    solution = "import math\ndef half(n):\n    return n // 2\ndef f(n):\n    return half(n)\n"
    asserts = ("candidate(4) == half(4), 'no'", "candidate(5) == 2", "True")
    test = "def check(candidate):\n" + "".join(f"    assert {each}\n" for each in asserts)
    cases = hidden_cases("t", solution, "f", test)
    assert [id for id, _ in cases] == ["0", "1"]
    for right, function in ((True, lambda n: n // 2), (False, lambda n: n)):
        for _, source in cases:
            if right:
                exec(source, {"candidate": function})
            else:
                with pytest.raises(AssertionError):
                    exec(source, {"candidate": function})


def test_a_check_that_is_more_than_assertions_stays_whole() -> None:
    test = "def check(candidate):\n    for n in range(3):\n        assert candidate(n) == n\n"
    ((id, source),) = hidden_cases("t", "def f(n):\n    return n\n", "f", test)
    assert id == "all"
    with pytest.raises(AssertionError):
        exec(source, {"candidate": lambda n: min(n, 1)})


def test_tests_that_say_nothing_about_the_function_are_refused() -> None:
    with pytest.raises(ConfigError, match="asserts nothing"):
        hidden_cases("t", "def f(): pass\n", "f", "def check(candidate):\n    assert True\n")


def test_examples_of_the_docstring_are_found_in_both_of_their_forms() -> None:
    prompt = 'def f(n):\n    """Half.\n    >>> f(4)\n    2\n    f(6) ➞ 3\n    f(n) = unknown\n    """\n'
    assert visible_examples(prompt, "f") == (("f(4)", "2"), ("f(6)", "3"))


# -- the taskset -------------------------------------------------------------------------------------------------------


def test_the_splits_share_no_function_and_are_the_same_each_time(taskset: HumanEvalRepair) -> None:
    train, test = taskset.split("train"), taskset.split("test")
    functions = [{task.id.rpartition("/")[0] for task in tasks} for tasks in (train, test)]
    assert not functions[0] & functions[1]
    assert len(train) >= 120
    assert len(test) >= 30
    assert taskset.split("train") == train
    assert taskset.split("train") != HumanEvalRepair(seed=1).split("train")
    more = HumanEvalRepair(faults_per_function=3).split("test")
    assert len(more) > 2 * len(test)
    assert len({task.id for task in more}) == len(more)


def test_nothing_that_a_policy_sees_holds_the_solution_or_a_hidden_test(taskset: HumanEvalRepair) -> None:
    for task in taskset.split("train"):
        assert set(task.files) == {SOLUTION, VISIBLE}
        shown = " ".join(
            [*(message.content for message in task.prompt), *(data.decode() for data in task.files.values())]
        )
        assert truth(task, "solution") not in shown
        assert "candidate" not in shown


def test_wrong_settings_say_what_to_do(taskset: HumanEvalRepair) -> None:
    with pytest.raises(ConfigError, match="faults_per_function is 0; use 1 or more"):
        load_taskset("humaneval_repair", {"faults_per_function": 0})
    with pytest.raises(ConfigError, match="output_chars is 10"):
        load_taskset("humaneval_repair", {"output_chars": 10})


# -- verdicts ----------------------------------------------------------------------------------------------------------


def test_the_tests_fail_on_each_fault_and_pass_on_the_solution(court: Court, taskset: HumanEvalRepair) -> None:
    tasks = HumanEvalRepair(faults_per_function=2).split("train")[::SAMPLED]
    assert len(tasks) >= 10
    for task in tasks:
        good = {SOLUTION: truth(task, "solution").encode()}
        assert judge(court, taskset, task, Artefact(files=good)) == _perfect(task)
        verdict = judge(court, taskset, task, Artefact(files=dict(task.files)))
        assert isinstance(verdict, Scored)
        assert verdict.value == 0.0, task.id


def _perfect(task: Task) -> Scored:
    assert isinstance(task.truth, dict)
    cases = task.truth["cases"]
    assert isinstance(cases, list)
    return Scored(1.0, {"passed": float(len(cases)), "expected": float(len(cases))})


@pytest.mark.endurance
def test_every_solution_passes_and_every_listed_fault_is_caught(court: Court, taskset: HumanEvalRepair) -> None:
    every = HumanEvalRepair(faults_per_function=100)
    tasks = [*every.split("train"), *every.split("test")]
    assert len(tasks) == sum(map(len, FAULTS.values()))
    judged: set[str] = set()
    for task in tasks:
        verdict = judge(court, taskset, task, Artefact(files=dict(task.files)))
        assert isinstance(verdict, Scored)
        assert verdict.value == 0.0, task.id
        function = task.id.rpartition("/")[0]
        if function not in judged:
            good = {SOLUTION: truth(task, "solution").encode()}
            assert judge(court, taskset, task, Artefact(files=good)) == _perfect(task), task.id
            judged.add(function)


def test_the_scripted_expert_sees_the_fault_and_repairs_it(court: Court, taskset: HumanEvalRepair) -> None:
    for seed, task in enumerate(taskset.split("test")[::SAMPLED]):
        turns = taskset.demonstration(task, seed)
        steps, artefact = court.home.do(play(taskset, task, court.boxes, turns))
        assert steps[-1].done
        assert steps[3].results[0].content == "all visible tests pass"
        assert judge(court, taskset, task, artefact) == _perfect(task)


@pytest.mark.docker
@pytest.mark.parametrize("court", ["docker"], indirect=True)
def test_it_is_the_same_in_a_container(court: Court, taskset: HumanEvalRepair) -> None:
    task = taskset.split("train")[0]
    _, artefact = court.home.do(play(taskset, task, court.boxes, taskset.demonstration(task, 0)))
    assert judge(court, taskset, task, artefact) == _perfect(task)


# -- the tools ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def answers(court: Court, taskset: HumanEvalRepair) -> list[tuple[CallStatus, str]]:
    edit = FORMAT.render_call("edit_file", {"path": "a.txt", "old": "one", "new": "1"})
    turns = [
        FORMAT.render_call("read_file", {"path": "none.txt"}),
        write("a.txt", "one two one"),
        edit,
        write("a.txt", "one two"),
        edit,
        FORMAT.render_call("read_file", {"path": "a.txt"}),
        shell("echo out; echo err >&2; exit 3"),
        shell("true"),
        write("../../etc/a", "x"),
        SUBMIT,
    ]
    task = taskset.split("train")[1]
    steps, _ = court.home.do(play(taskset, task, court.boxes, turns))
    return [(result.status, result.content) for step in steps for result in step.results]


def test_the_tools_say_what_they_did_and_what_was_wrong(answers: list[tuple[CallStatus, str]]) -> None:
    missing, wrote, twice, _, edited, read, failed, silent, outside, submitted = answers
    assert missing[0] is CallStatus.ERROR
    assert "none.txt cannot be read" in missing[1]
    assert wrote == (CallStatus.OK, "written")
    assert "a.txt 2 times; expected once" in twice[1]
    assert edited == (CallStatus.OK, "edited")
    assert read == (CallStatus.OK, "1 two")
    assert failed == (CallStatus.ERROR, "error: out\nerr\n[exit status 3]")
    assert silent == (CallStatus.OK, "(nothing printed)")
    assert outside[0] is CallStatus.ERROR
    assert submitted == (CallStatus.OK, "submitted")


@pytest.mark.parametrize(
    ("command", "failure"),
    [
        (f"rm {SOLUTION}", "artefact_missing"),
        (f"ln -sf /etc/hostname {SOLUTION}", "artefact_missing"),
        (f"rm {SOLUTION}; mkdir {SOLUTION}; touch {SOLUTION}/{SOLUTION}", "artefact_missing"),
        (f"head -c 9000000 /dev/zero > {SOLUTION}", "artefact_too_large"),
    ],
)
def test_what_is_no_file_of_a_bearable_size_earns_nothing(
    court: Court, taskset: HumanEvalRepair, command: str, failure: str
) -> None:
    task = taskset.split("train")[0]
    _, artefact = court.home.do(play(taskset, task, court.boxes, [shell(command), SUBMIT]))
    assert artefact.failure == failure
    assert judge(court, taskset, task, artefact) == Scored(0.0, failure=failure)
