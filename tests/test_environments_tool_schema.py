"""The environment `tool_schema`: every row of the data loads, its answers are right, and anything else is not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from palestra.envs.builtin.tool_schema import ToolSchema
from palestra.envs.builtin.tool_schema_judge import judge
from palestra.envs.formats.accepted_calls import example, from_plain, trouble
from palestra.envs.formats.bfcl import read_rows
from palestra.envs.sandboxes.scripted import ScriptedBoxes
from palestra.envs.schemas import validator
from palestra.envs.types import JSON, CallStatus, Scored, Task
from playing import FORMAT, judged, play
from tests_support import data_folder, require


@pytest.fixture(scope="module")
def taskset() -> ToolSchema:
    require("data")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PALESTRA_DATA", str(data_folder()))
        made = ToolSchema()
        made.split("train")
    return made


def both(taskset: ToolSchema) -> list[Task]:
    return [*taskset.split("train"), *taskset.split("test")]


def test_every_row_is_a_task_of_one_split_or_is_refused_with_a_reason(taskset: ToolSchema) -> None:
    tasks = both(taskset)
    assert len({task.id for task in tasks}) == len(tasks)
    assert len(tasks) + len(taskset.refused()) == 600
    assert all(refused.reason for refused in taskset.refused())
    assert len(tasks) > 590


def test_the_splits_share_no_function(taskset: ToolSchema) -> None:
    def functions(name: str) -> set[str]:
        boxes = ScriptedBoxes()
        return {tool.name for task in taskset.split(name) for tool in taskset.environment(task, boxes).tools}

    assert not functions("train") & functions("test")


def test_every_accepted_value_satisfies_its_declaration(taskset: ToolSchema) -> None:
    for task in both(taskset):
        tools = {tool.name: tool for tool in taskset.environment(task, ScriptedBoxes()).tools}
        assert isinstance(task.truth, Mapping)
        for raw in task.truth["calls"]:
            call = from_plain(raw)
            whole = {name: example(values[0]) for name, values in call.arguments.items() if values}
            check = validator(tools[call.name].parameters)
            for name, values in call.arguments.items():
                for value in values:
                    assert check.is_valid({**whole, name: example(value)}), f"{task.id}: {name}={value}"


def test_the_demonstration_of_every_task_is_right(taskset: ToolSchema) -> None:
    async def body() -> None:
        for task in both(taskset):
            steps, artefact = await play(taskset, task, ScriptedBoxes(), taskset.demonstration(task, seed=3))
            assert steps[-1].done, task.id
            assert judge(task.truth, artefact.answer)["reward"] == 1.0, task.id

    asyncio.run(body())


def test_every_task_refuses_a_mutated_answer_and_the_argument_is_named(taskset: ToolSchema) -> None:
    for task in both(taskset):
        assert isinstance(task.truth, Mapping)
        calls = [from_plain(raw) for raw in task.truth["calls"]]
        first = calls[0]
        right: dict[str, JSON] = {name: example(values[0]) for name, values in first.arguments.items() if values}
        for name in right:
            for wrong in ("no such value", -987_654, [["no"]]):
                assert (trouble(first, first.name, {**right, name: wrong}) or "").startswith(f"{name}: "), task.id
        made: list[JSON] = [{"name": first.name, "arguments": {**right, name: "no such value"}}]
        assert judge(task.truth, {"calls": made, "turns": 1})["reward"] == 0.0


def test_a_call_that_breaks_its_declaration_is_told_and_may_be_made_again(taskset: ToolSchema) -> None:
    task = next(task for task in both(taskset) if task.id == "tool_schema/simple_python_0")
    wrong = FORMAT.render_call("calculate_triangle_area", {"base": "ten", "height": 5})
    right = FORMAT.render_call("calculate_triangle_area", {"base": 10, "height": 5})

    async def body() -> None:
        verifier = taskset.verifier()
        try:
            (told, done), verdict = await judged(taskset, task, ScriptedBoxes(), [wrong, right], verifier)
            assert told.results[0].status is CallStatus.INVALID_ARGUMENTS
            assert told.observations[0].content == 'error: base: expected integer, found "ten"'
            assert done.done
            assert isinstance(verdict, Scored)
            assert verdict.value == 1.0
            _, verdict = await judged(taskset, task, ScriptedBoxes(), [right + right], verifier)
            assert isinstance(verdict, Scored)
            assert (verdict.value, verdict.parts["right_calls"], verdict.parts["made_calls"]) == (0.0, 1.0, 2.0)
            steps, verdict = await judged(taskset, task, ScriptedBoxes(), ["words"], verifier)
            assert steps[0].results[0].status is CallStatus.NO_CALL
            assert isinstance(verdict, Scored)
            assert verdict.value == 0.0
        finally:
            await verifier.close()

    asyncio.run(body())


def test_the_prompt_shows_declarations_and_no_answer(taskset: ToolSchema) -> None:
    task = next(task for task in both(taskset) if task.id == "tool_schema/parallel_0")
    told = task.prompt[0].content
    assert '"spotify.play"' in told
    assert '"type": "integer"' in told
    assert "Maroon" not in told


def test_a_row_that_cannot_be_used_is_refused_with_its_reason_and_takes_no_other_with_it(tmp_path: Path) -> None:
    good = {"name": "f", "parameters": {"type": "dict", "properties": {"x": {"type": "int"}}, "required": ["x"]}}
    odd = {"name": "g", "parameters": {"type": "dict", "properties": {"x": {"type": "matrix"}}}}
    question = [[{"role": "user", "content": "?"}]]
    rows = [
        {"id": "a", "question": question, "function": [good]},
        {"id": "b", "question": question, "function": [odd]},
        {"id": "c", "question": question * 2, "function": [good]},
        {"id": "d", "question": question, "function": [good]},
        {"id": "e", "question": question, "function": [good]},
    ]
    answers: list[JSON] = [{"id": id, "ground_truth": [{"f": {"x": [1]}}]} for id in "abc"]
    answers.append({"id": "e", "ground_truth": [{"h": {"x": [1]}}]})
    for name, lines in (("questions", rows), ("answers", answers)):
        (tmp_path / name).write_text("\n".join(map(json.dumps, lines)))
    read, refused = read_rows(tmp_path / "questions", tmp_path / "answers")
    assert [row.id for row in read] == ["a"]
    reasons = {row.id: row.reason for row in refused}
    assert "matrix" in reasons["b"]
    assert "one turn" in reasons["c"]
    assert "ground_truth is null" in reasons["d"]
    assert '"h", which is not declared' in reasons["e"]
