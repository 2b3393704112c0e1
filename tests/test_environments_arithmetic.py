"""The arithmetic environment: its tasks, its tools, and an expert that is worth 1."""

from __future__ import annotations

import asyncio

import pytest

from palestra.envs.builtin.arithmetic import Arithmetic
from palestra.envs.errors import ConfigError
from palestra.envs.sandboxes.backends import choose_backend
from palestra.envs.sandboxes.contract import Boxes
from palestra.envs.sandboxes.scripted import ScriptedBoxes
from palestra.envs.types import JSON, CallStatus, NoVerdict, Scored, Task, Verdict
from playing import FORMAT, Lender, judged, on_this_machine, play
from tests_support import require

SMALL = Arithmetic(train_facts=40, test_facts=20, test_tasks=50)


def names(task: Task) -> list[str]:
    return task.prompt[-1].content.removeprefix("What is ").removesuffix("?").split(" + ")


def facts(task: Task) -> dict[str, int]:
    return {line.split()[0]: int(line.split()[1]) for line in task.files["facts.txt"].decode().splitlines()}


def test_a_task_asks_for_the_sum_of_two_facts_of_its_box() -> None:
    task = SMALL.split("train")[0]
    a, b = names(task)
    assert task.prompt[0].content == "Tools: lookup(key), calculate(expression), answer(value)."
    assert isinstance(task.truth, dict)
    assert task.truth["number"] == facts(task)[a] + facts(task)[b]
    assert all(10 <= number <= 99 for number in facts(task).values())


def test_the_same_options_give_the_same_tasks_and_another_seed_gives_others() -> None:
    again = Arithmetic(train_facts=40, test_facts=20, test_tasks=50)
    assert list(again.split("test")) == list(SMALL.split("test"))
    other = Arithmetic(seed=1, train_facts=40, test_facts=20, test_tasks=50)
    assert list(other.split("test")) != list(SMALL.split("test"))


def test_no_fact_is_in_both_splits_nor_in_the_other_s_box() -> None:
    train, test = SMALL.split("train"), SMALL.split("test")
    asked = {split: {name for task in tasks for name in names(task)} for split, tasks in (("a", train), ("b", test))}
    in_boxes = {split: {name for task in tasks for name in facts(task)} for split, tasks in (("a", train), ("b", test))}
    assert not in_boxes["a"] & in_boxes["b"]
    assert asked["a"] == in_boxes["a"]
    assert asked["b"] <= in_boxes["b"]


def test_a_box_holds_what_is_asked_for_among_others_in_no_telling_order() -> None:
    places = set()
    for task in SMALL.split("train")[:50]:
        table = list(facts(task))
        assert len(table) == len(set(table)) == 32
        assert set(names(task)) <= set(table)
        places |= {table.index(name) for name in names(task)}
    assert len(places) > 20


def test_every_pair_comes_once_before_any_comes_twice() -> None:
    train = SMALL.split("train")
    assert len(train) == 40 * 39
    assert len({tuple(names(task)) for task in train}) == len(train)
    assert len({task.id for task in train}) == len(train)


def test_tasks_are_made_when_asked_for_by_any_index() -> None:
    train = Arithmetic().split("train")
    assert len(train) == 20_000 * 19_999
    assert train[-1] == train[len(train) - 1]
    assert train[5:7] == [train[5], train[6]]
    with pytest.raises(IndexError):
        train[len(train)]


def test_a_split_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no split 'dev'\. Have: train, test"):
        SMALL.split("dev")


def test_digits_say_how_large_the_numbers_are() -> None:
    numbers = facts(Arithmetic(digits=5).split("test")[0]).values()
    assert all(10_000 <= number <= 99_999 for number in numbers)


def outcomes(boxes: Boxes, taskset: Arithmetic, *episodes: tuple[Task, tuple[str, ...]]) -> list[Verdict]:
    async def body() -> list[Verdict]:
        verifier = taskset.verifier()
        try:
            return [(await judged(taskset, task, boxes, turns, verifier))[1] for task, turns in episodes]
        finally:
            await verifier.close()

    return asyncio.run(body())


def answer(value: JSON) -> str:
    return FORMAT.render_call("answer", {"value": value})


def check_expert_and_others(boxes: Boxes) -> None:
    """The expert earns 1 by three tool calls that work; a wrong answer, a text and silence earn 0."""
    tasks = [*SMALL.split("test")[:3], SMALL.split("train")[0]]
    gold = [(task, SMALL.demonstration(task, 0)) for task in tasks]
    wrong = [(tasks[0], (answer(1),)), (tasks[0], (answer("one or two"),)), (tasks[0], ("I give up.",))]
    verdicts = outcomes(boxes, SMALL, *gold, *wrong)
    assert [verdict.value for verdict in verdicts if isinstance(verdict, Scored)] == [1.0] * 4 + [0.0] * 3


def test_the_expert_earns_one_and_a_wrong_answer_nothing() -> None:
    boxes = ScriptedBoxes(on_this_machine)
    check_expert_and_others(boxes)
    assert boxes.lent == 0


def test_the_expert_s_calls_all_succeed() -> None:
    task = SMALL.split("test")[0]
    steps, _ = asyncio.run(play(SMALL, task, ScriptedBoxes(on_this_machine), SMALL.demonstration(task, 0)))
    assert [result.status for step in steps for result in step.results] == [CallStatus.OK] * 4
    a, b = (facts(task)[name] for name in names(task))
    assert [step.observations[0].content for step in steps] == [str(a), str(b), str(a + b), "done"]


def observe(name: str, **arguments: JSON) -> str:
    task = SMALL.split("train")[0]
    turns = [FORMAT.render_call(name, arguments)]
    steps, _ = asyncio.run(play(SMALL, task, ScriptedBoxes(on_this_machine), turns))
    return steps[0].observations[0].content


@pytest.mark.parametrize(
    ("expression", "said"),
    [
        ("1+2", "3"),
        ("12 + 30", "42"),
        ("7-10", "-3"),
        ("2+3*4-5", "9"),
        ("2*3*4", "24"),
        ("10-2*3", "4"),
        ("999999999*9999999", "error: the result is too large"),
        ("007", "7"),
        ("5", "5"),
    ],
)
def test_the_calculator_is_exact(expression: str, said: str) -> None:
    assert observe("calculate", expression=expression) == said


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "1+",
        "1/2",
        "2**3",
        "1e3",
        "0x10",
        "system(1)",
        '1"; system("touch pwned"); "',
        "1+2\n3",
        "$0",
        "NR",
        "１+１",
        "-1",
    ],
)
def test_the_calculator_runs_nothing_but_sums_and_products(expression: str) -> None:
    assert observe("calculate", expression=expression) == "error: an expression is whole numbers with + - * between"


def test_an_unknown_name_is_said() -> None:
    assert observe("lookup", key="NOBODY") == "error: no fact named NOBODY"


@pytest.mark.parametrize("key", ["", "A B", 'A"; system("touch pwned")', "../facts.txt", "$1", "A\n", "A=1", "12"])
def test_a_key_is_letters_and_never_a_program(key: str) -> None:
    assert observe("lookup", key=key) == "error: a key is letters only"


def test_each_turn_costs_what_the_option_says() -> None:
    costly = Arithmetic(train_facts=40, test_facts=20, test_tasks=50, step_cost=0.1)
    task = costly.split("test")[0]
    guess = (answer(1),)
    verdicts = outcomes(ScriptedBoxes(on_this_machine), costly, (task, costly.demonstration(task, 0)), (task, guess))
    assert not any(isinstance(verdict, NoVerdict) for verdict in verdicts)
    assert [verdict.value for verdict in verdicts if isinstance(verdict, Scored)] == [pytest.approx(0.6), -0.1]


def test_it_is_played_for_real_in_a_namespace_box() -> None:
    require("bwrap")
    check_expert_and_others(Lender(choose_backend("namespace", run="test-arithmetic")[0]))


@pytest.mark.docker
def test_it_is_played_for_real_in_a_container() -> None:
    require("docker")
    check_expert_and_others(Lender(choose_backend("docker", run="test-arithmetic")[0]))
