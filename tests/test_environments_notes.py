"""The environment `notes`: a state that lasts, goals that are judged on it, and splits that share no word."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping

import pytest

from palestra.envs.builtin.notes import Notes
from palestra.envs.builtin.notes_judge import judge
from palestra.envs.builtin.notes_tools import notes_tools
from palestra.envs.errors import ConfigError
from palestra.envs.types import JSON, CallStatus, Scored, StepResult, Task
from playing import FORMAT, Lender, judged
from sandbox_support import backend

TASKSET = Notes(train_tasks=40, test_tasks=40, digest_states=True)


def say(tool: str, /, **arguments: JSON) -> str:
    return FORMAT.render_call(tool, arguments)


def played(task: Task, *turns: str) -> tuple[list[StepResult], Scored]:
    async def body() -> tuple[list[StepResult], Scored]:
        verifier = TASKSET.verifier()
        try:
            steps, verdict = await judged(TASKSET, task, Lender(backend("namespace")), turns, verifier)
        finally:
            await verifier.close()
        assert isinstance(verdict, Scored), verdict
        return steps, verdict

    return asyncio.run(body())


def kinds() -> dict[str, Task]:
    """A task of each kind, by the first words of its question."""
    return {" ".join(task.prompt[1].content.split()[:2]): task for task in TASKSET.split("train")}


def test_the_expert_solves_a_task_of_each_kind_and_doing_nothing_solves_none() -> None:
    tasks = kinds()
    assert len({question.split()[0] for question in tasks}) == 5
    for task in tasks.values():
        steps, verdict = played(task, *TASKSET.demonstration(task, 0))
        assert steps[-1].done
        assert {result.status for step in steps for result in step.results} == {CallStatus.OK}
        assert verdict.value == 1.0, task.prompt
        _, verdict = played(task, say("answer", text="done"))
        assert verdict.value == 0.0, task.prompt


def test_a_note_more_a_note_less_or_an_open_end_earns_nothing() -> None:
    task = next(task for question, task in kinds().items() if question.startswith("Move"))
    *turns, end = TASKSET.demonstration(task, 0)
    extra = say("create_note", name="inbox/more", text="x")
    for changed in ([*turns, extra, end], [*turns[:-1], end], turns):
        assert played(task, *changed)[1].value == 0.0


def test_equal_notes_are_equal_states_and_a_move_back_leads_back() -> None:
    task = TASKSET.split("train")[0]
    name = next(iter(task.files)).removeprefix("notes/")
    steps, _ = played(
        task,
        say("list_notes"),
        say("move_note", name=name, to="away/one"),
        say("move_note", name="away/one", to=name),
        say("append_note", name=name, text="more"),
    )
    listed, moved, back, longer = (step.state for step in steps)
    assert listed is not None
    assert listed == back
    assert len({listed, moved, longer}) == 3


def test_what_cannot_be_done_is_said_and_changes_nothing() -> None:
    task = TASKSET.split("train")[0]
    first, second = (path.removeprefix("notes/") for path in list(task.files)[:2])
    turns = [
        say("read_note", name="no/such"),
        say("create_note", name=first, text="x"),
        say("move_note", name=first, to=second),
        say("append_note", name="no/such", text="x"),
        say("delete_note", name="../etc/passwd"),
        say("search_notes", text="$(touch notes/pwned)"),
    ]
    steps, _ = played(task, *turns)
    assert [step.results[0].status for step in steps] == [CallStatus.ERROR] * 4 + [
        CallStatus.INVALID_ARGUMENTS,
        CallStatus.OK,
    ]
    assert steps[0].observations[0].content == "error: there is no note no/such"
    assert steps[2].observations[0].content == f"error: there is a note {second} already"
    assert len({step.state for step in steps}) == 1


def test_a_note_is_read_found_and_listed_as_it_was_written() -> None:
    task = TASKSET.split("train")[0]
    steps, _ = played(
        task,
        say("create_note", name="a/b", text="odd: $HOME `x` 'y'"),
        say("read_note", name="a/b"),
        say("search_notes", text="$HOME `x`"),
        say("list_notes"),
    )
    assert steps[1].observations[0].content == "odd: $HOME `x` 'y'"
    assert steps[2].observations[0].content == "a/b"
    assert steps[3].observations[0].content.split("\n")[0] == "a/b"


def test_the_splits_share_no_word_and_are_the_same_each_time() -> None:
    def words(name: str) -> set[str]:
        texts = (text.decode() for task in TASKSET.split(name) for text in task.files.values())
        return {word for text in texts for word in re.findall(r"about: (\w+)", text)}

    assert len(words("train")) > 100
    assert not words("train") & words("test")
    assert list(TASKSET.split("test")) == list(Notes(train_tasks=40, test_tasks=40).split("test"))


def test_the_truth_is_in_no_prompt_and_the_tools_have_a_finish() -> None:
    for task in TASKSET.split("train"):
        assert isinstance(task.truth, Mapping)
        assert task.truth["answer"] is None or str(task.truth["answer"]) not in task.prompt[1].content
    assert [tool.name for tool in notes_tools() if tool.finishes] == ["answer"]


def test_the_judge_compares_texts_without_the_space_at_their_ends() -> None:
    truth: dict[str, JSON] = {"notes": {"a/b": "x\n"}, "answer": "12"}
    right = judge(truth, {"notes": {"a/b": "x"}, "final": {"text": " 12 "}})
    assert right == {"reward": 1.0, "right_notes": 1.0, "other_notes": 0.0, "answered": 1.0}
    assert judge(truth, {"notes": {"a/b": "x"}, "final": {"text": "13"}})["reward"] == 0.0
    assert judge(truth, {"notes": {"a/b": "x"}, "final": None})["reward"] == 0.0


@pytest.mark.parametrize(("option", "value"), [("train_tasks", 0), ("num_notes", 2)])
def test_a_wrong_option_is_refused(option: str, value: int) -> None:
    with pytest.raises(ConfigError, match=option):
        Notes(**{option: value})
