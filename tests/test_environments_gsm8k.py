"""The word-problem environment: the data, the Python tool, the scripted expert, and the declared credits."""

from __future__ import annotations

import asyncio
import json
from fractions import Fraction
from pathlib import Path

import pytest

from palestra.envs.builtin import gsm8k_solutions
from palestra.envs.builtin.gsm8k import Gsm8k
from palestra.envs.errors import ConfigError
from palestra.envs.sandboxes.backends import choose_backend
from palestra.envs.sandboxes.contract import Boxes
from palestra.envs.sandboxes.scripted import ScriptedBoxes
from palestra.envs.types import CallStatus, Scored, Task, ToolResult, Verdict
from playing import FORMAT, Lender, judged, on_this_machine, play
from tests_support import data_folder, require

ROWS = [
    {"question": "Ann has 48 clips. Half are red. How many?", "answer": "Red are 48/2 = <<48/2=24>>24 clips.\n#### 24"},
    {
        "question": "At 12 an hour, what do 50 minutes earn?",
        "answer": "A minute is 12/60 = $<<12/60=0.2>>0.2.\nSo 0.2 x 50 = $<<0.2*50=10>>10.\n#### 10",
    },
    {"question": "How many are a thousand and eighty?", "answer": "It is told.\n#### 1,080"},
]


@pytest.fixture
def own_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "gsm8k").mkdir()
    for split in ("train", "test"):
        (tmp_path / "gsm8k" / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    monkeypatch.setenv("PALESTRA_DATA", str(tmp_path))
    return tmp_path


@pytest.fixture
def real_data(monkeypatch: pytest.MonkeyPatch) -> None:
    require("data")
    monkeypatch.setenv("PALESTRA_DATA", str(data_folder()))


def outcomes(boxes: Boxes, taskset: Gsm8k, *episodes: tuple[Task, tuple[str, ...]]) -> list[Verdict]:
    async def body() -> list[Verdict]:
        verifier = taskset.verifier()
        try:
            return [(await judged(taskset, task, boxes, turns, verifier))[1] for task, turns in episodes]
        finally:
            await verifier.close()

    return asyncio.run(body())


def run_python(code: str, boxes: Boxes | None = None, taskset: Gsm8k | None = None) -> ToolResult:
    task = Task("t", (), truth={"number": "1"})
    turns = [FORMAT.render_call("python", {"code": code})]
    steps, _ = asyncio.run(play(taskset or Gsm8k(), task, boxes or ScriptedBoxes(on_this_machine), turns))
    return steps[0].results[0]


# --- the data


@pytest.mark.usefixtures("own_data")
def test_a_task_is_the_question_and_its_solution_stays_with_the_judge() -> None:
    task = Gsm8k().split("train")[0]
    assert task.id == "gsm8k/train/0"
    assert task.prompt[-1].content == ROWS[0]["question"]
    assert "python(code)" in task.prompt[0].content
    assert "24" not in "".join(message.content for message in task.prompt)
    assert dict(task.files) == {}


@pytest.mark.usefixtures("own_data")
def test_long_questions_and_tasks_beyond_the_number_are_left_out_and_ids_stay() -> None:
    assert [task.id for task in Gsm8k(max_question_chars=36).split("test")] == ["gsm8k/test/2"]
    assert len(Gsm8k(train_tasks=2).split("train")) == 2
    with pytest.raises(ConfigError, match="max_question_chars is 3"):
        Gsm8k(max_question_chars=3).split("test")


def test_no_data_is_said_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PALESTRA_DATA", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="which is no folder; set it to the folder of the data sets"):
        Gsm8k().split("train")
    monkeypatch.setenv("PALESTRA_DATA", str(tmp_path))
    with pytest.raises(ConfigError, match=r"train\.jsonl: cannot be read"):
        Gsm8k().split("train")
    monkeypatch.delenv("PALESTRA_DATA")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="set PALESTRA_DATA"):
        Gsm8k().split("train")


def test_data_beside_the_checkout_is_found(own_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "checkout" / "configs").mkdir(parents=True)
    (tmp_path / "shared" / "data").symlink_to(own_data)
    monkeypatch.delenv("PALESTRA_DATA")
    for folder in ("checkout", "checkout/configs"):
        monkeypatch.chdir(tmp_path / folder)
        assert len(Gsm8k().split("train")) == len(ROWS)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "train.jsonl:2: no JSON"),
        ("[1]", "train.jsonl:2: expected an object, found list"),
        ('{"question": "?"}', "gsm8k/train/1: expected the keys question and answer"),
        ('{"question": "?", "answer": "#### many"}', "expected a number behind ####, found 'many'"),
    ],
)
def test_a_broken_row_is_named(own_data: Path, line: str, said: str) -> None:
    (own_data / "gsm8k" / "train.jsonl").write_text(json.dumps(ROWS[0]) + "\n" + line + "\n")
    with pytest.raises(ConfigError) as caught:
        Gsm8k().split("train")
    assert said in str(caught.value)


# --- the scripted expert


@pytest.mark.usefixtures("own_data")
def test_an_expert_calls_once_per_sum_or_once_for_all() -> None:
    taskset = Gsm8k()
    task = taskset.split("train")[1]
    forms = {taskset.demonstration(task, seed) for seed in range(20)}
    answer = FORMAT.render_call("answer", {"value": "10"})
    assert forms == {
        (
            "A minute is 12/60\n" + FORMAT.render_call("python", {"code": "print(12/60)"}),
            "So 0.2 x 50\n" + FORMAT.render_call("python", {"code": "print(0.2*50)"}),
            answer,
        ),
        (
            "A minute is 12/60\nSo 0.2 x 50\n" + FORMAT.render_call("python", {"code": "print(12/60)\nprint(0.2*50)"}),
            answer,
        ),
    }
    assert taskset.demonstration(task, 1) == taskset.demonstration(task, 1)


@pytest.mark.parametrize(
    "solution",
    [
        "It is told.",
        "It is 1+1 = <<1+1=3>>3.\nSo <<3=3>>3",
        "First <<1+1=2>>2, then three.",
        "It is <<__import__('os').getpid()=3>>3",
        "It is <<2**9=512>>512",
        "It is <<1/0=3>>3",
    ],
)
def test_a_solution_whose_marks_do_not_hold_is_told_in_words(solution: str) -> None:
    [turn] = gsm8k_solutions.turns(f"{solution}\n#### 3", "3", FORMAT, 0)
    assert turn.endswith(FORMAT.render_call("answer", {"value": "3"}))
    assert "<<" not in turn
    assert "####" not in turn


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("48/2", "24"),
        ("2*20*.01", "2/5"),
        ("-(3-5)*2", "4"),
        ("100 / 3", "100/3"),
        ("1/0", None),
        ("a", None),
        ("2**9", None),
    ],
)
def test_marks_are_evaluated_exactly_and_nothing_else_is(expression: str, value: str | None) -> None:
    assert gsm8k_solutions.evaluate(expression) == (None if value is None else Fraction(value))


@pytest.mark.usefixtures("real_data")
def test_most_of_the_data_becomes_tool_using_episodes_that_parse() -> None:
    taskset = Gsm8k()
    with_tool = 0
    tasks = taskset.split("train")
    for task in tasks:
        actions = [FORMAT.parse(turn) for turn in taskset.demonstration(task, len(task.id))]
        assert all(len(action.calls) == 1 and not action.errors for action in actions)
        with_tool += actions[0].calls[0].name == "python"
    assert len(tasks) == 7473
    assert with_tool / len(tasks) > 0.9


# --- the tool


def test_what_a_program_prints_is_the_observation() -> None:
    assert run_python("x = 48 / 2\nprint(x)\nprint('é')").content == "24.0\né"
    assert run_python("x = 1").content == "(nothing printed; use print)"


def test_an_error_is_one_line_behind_what_was_printed() -> None:
    failed = run_python("print(1)\n1/0")
    assert failed.status is CallStatus.ERROR
    assert failed.content == "error: 1\nZeroDivisionError: division by zero"
    assert run_python("print(").content == "error: SyntaxError: '(' was never closed"
    assert run_python("raise SystemExit(3)").content == "error: the program ended with status 3"


def test_an_error_behind_much_output_is_still_seen() -> None:
    assert run_python("print('a' * 5000)\n1/0").content.endswith("ZeroDivisionError: division by zero")


def test_bytes_that_are_no_text_are_replaced_alike_everywhere() -> None:
    content = run_python("import sys; sys.stdout.buffer.write(b'a\\xff\\xe2\\x82')").content
    assert content == "a\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}"


def test_a_program_without_end_is_a_timeout() -> None:
    endless = run_python("while True: pass", taskset=Gsm8k(python_timeout_s=0.5))
    assert endless.status is CallStatus.TIMEOUT
    assert endless.content == "error: python did not end within 0.5 s"


def test_long_output_keeps_head_and_tail_and_says_what_is_missing() -> None:
    content = run_python("print('a' * 5000 + 'z' * 5000)", taskset=Gsm8k(output_chars=90)).content
    assert content == "a" * 60 + "\n[9910 characters cut]\n" + "z" * 30


# --- the verdict


@pytest.mark.usefixtures("own_data")
def test_the_answer_is_right_or_worth_what_is_declared() -> None:
    taskset = Gsm8k(tool_credit=0.1, number_credit=0.05)
    task = taskset.split("train")[2]
    python, failing = (FORMAT.render_call("python", {"code": code}) for code in ("print(1)", "1/0"))
    right, wrong, text = (FORMAT.render_call("answer", {"value": value}) for value in ("1080", 7, "7 or 8"))
    turns = [(right,), (python, right), (wrong,), (python, wrong), (failing, wrong), (text,), (python, text), (python,)]
    verdicts = outcomes(ScriptedBoxes(on_this_machine), taskset, *((task, each) for each in turns))
    rewards = [verdict.value for verdict in verdicts if isinstance(verdict, Scored)]
    assert rewards == [pytest.approx(reward) for reward in (1, 1, 0.05, 0.15, 0.05, 0, 0.1, 0.1)]


def check_demonstrations(boxes: Boxes, count: int) -> None:
    """Scripted episodes of the first training tasks are worth 1, and a wrong answer is worth 0."""
    taskset = Gsm8k(train_tasks=count)
    tasks = taskset.split("train")
    experts = [(task, taskset.demonstration(task, seed)) for seed, task in enumerate(tasks)]
    wrong = (tasks[0], (FORMAT.render_call("answer", {"value": "-1"}),))
    *gold, zero = outcomes(boxes, taskset, *experts, wrong)
    assert [verdict.value for verdict in gold if isinstance(verdict, Scored)] == [1.0] * count
    assert isinstance(zero, Scored)
    assert zero.value == 0.0


@pytest.mark.usefixtures("real_data")
def test_fifty_scripted_episodes_are_worth_one_in_a_namespace_box() -> None:
    require("bwrap")
    lender = Lender(choose_backend("namespace", run="test-gsm8k")[0])
    check_demonstrations(lender, 50)
    assert lender.lent == 0


@pytest.mark.docker
@pytest.mark.usefixtures("real_data")
def test_scripted_episodes_are_worth_one_in_a_container() -> None:
    require("docker")
    lender = Lender(choose_backend("docker", run="test-gsm8k")[0])
    check_demonstrations(lender, 10)
    assert lender.lent == 0
