"""Say which functions to call: questions and declarations of the Berkeley function-calling data.

The declarations are as people write them (`envs/formats/tool_schema.py`). Functions of "test" and of "train" are
disjoint, so that what is learned is to read a declaration and not to know one.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from palestra.envs.builtin.calling import CallingEnvironment
from palestra.envs.builtin.data import data_folder
from palestra.envs.builtin.tasks import must_be_split
from palestra.envs.calls import JsonInTags
from palestra.envs.environment import Environment, Verifier
from palestra.envs.errors import ConfigError
from palestra.envs.formats.accepted_calls import AcceptedCall, example
from palestra.envs.formats.bfcl import CallRow, RefusedRow, functions_of, read_rows
from palestra.envs.sandboxes.contract import Boxes
from palestra.envs.tools import Tool, openai_schema
from palestra.envs.types import JSON, Message, Task
from palestra.envs.verifiers.process import ProcessVerifier
from palestra.envs.verifiers.verdict import Bounds

_CALLS = JsonInTags()
_FILES = ("simple_python", "parallel")


@dataclass(frozen=True)
class ToolSchema:
    """The taskset, read from `bfcl/` in the data folder. Same options, same tasks, on every machine."""

    seed: int = 0
    rows: Literal["simple_python", "parallel", "both"] = "both"
    """One call for each question, several, or the two mixed."""
    test_fraction: float = 0.25
    """Share of the functions whose questions are for testing only."""

    def __post_init__(self) -> None:
        if not 0 < self.test_fraction < 1:
            raise ConfigError(f"test_fraction is {self.test_fraction}; use more than 0 and less than 1")

    def split(self, name: str) -> Sequence[Task]:
        """The questions of "train" or "test". A row that mixes functions of both is in neither."""
        must_be_split(name)
        functions = self._test_functions
        testing = name == "test"
        return tuple(
            self._task(row)
            for row in self._rows
            if all((each.name in functions) is testing for each in row.declarations)
        )

    def refused(self) -> tuple[RefusedRow, ...]:
        """The rows that are in no split because they cannot be read, and why."""
        return self._read[1]

    def environment(self, task: Task, boxes: Boxes) -> Environment:
        """A fresh episode; it needs no box."""
        return CallingEnvironment(task, _tools(self._by_id[task.id]), calls=_CALLS)

    def verifier(self) -> Verifier:
        """1 for exactly the accepted calls, else 0."""
        return ProcessVerifier("palestra.envs.builtin.tool_schema_judge:judge", bounds=Bounds(0.0, 1.0))

    def demonstration(self, task: Task, seed: int) -> tuple[str, ...]:
        """All calls in one turn; `seed` chooses among the accepted values and the order."""
        rng = random.Random(f"{seed}/{task.id}")
        answers = self._by_id[task.id].answers
        return ("".join(_written(answer, rng) for answer in rng.sample(answers, len(answers))),)

    @cached_property
    def _read(self) -> tuple[tuple[CallRow, ...], tuple[RefusedRow, ...]]:
        folder = data_folder() / "bfcl"
        rows: list[CallRow] = []
        refused: list[RefusedRow] = []
        for name in _FILES:
            if self.rows in (name, "both"):
                good, bad = read_rows(folder / f"{name}.jsonl", folder / "answers" / f"{name}.jsonl")
                rows += good
                refused += bad
        return tuple(rows), tuple(refused)

    @property
    def _rows(self) -> tuple[CallRow, ...]:
        return self._read[0]

    @cached_property
    def _by_id(self) -> dict[str, CallRow]:
        return {f"tool_schema/{row.id}": row for row in self._rows}

    @cached_property
    def _test_functions(self) -> frozenset[str]:
        names = functions_of(self._rows)
        count = max(1, round(len(names) * self.test_fraction))
        return frozenset(random.Random(f"{self.seed}/functions").sample(names, count))

    def _task(self, row: CallRow) -> Task:
        truth: list[JSON] = [answer.plain() for answer in row.answers]
        return Task(f"tool_schema/{row.id}", _prompt(row), truth={"calls": truth})


def _tools(row: CallRow) -> tuple[Tool, ...]:
    return tuple(declaration.tool for declaration in row.declarations)


def _prompt(row: CallRow) -> tuple[Message, ...]:
    """The declarations as JSON, one a line, the form of a call, and the question."""
    lines = [json.dumps(schema["function"], ensure_ascii=False) for schema in openai_schema(_tools(row))]
    told = ["Answer with calls of these functions, all of them in one turn:", *lines, f"Write each as {_CALLS.form}"]
    return (Message("system", "\n".join(told)), *row.question)


def _written(answer: AcceptedCall, rng: random.Random) -> str:
    arguments: dict[str, JSON] = {}
    for name, values in answer.arguments.items():
        if values and not (name in answer.optional and rng.random() < 0.5):
            arguments[name] = example(rng.choice(values))
    return _CALLS.render_call(answer.name, arguments)
