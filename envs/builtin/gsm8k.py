"""GSM8K (arXiv:2110.14168): grade-school word problems, solved with a Python tool in the box, judged outside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from palestra.envs.builtin import gsm8k_solutions
from palestra.envs.builtin.data import data_folder, json_lines
from palestra.envs.builtin.python_tool import python_tool
from palestra.envs.builtin.tasks import must_be_split
from palestra.envs.calls import JsonInTags
from palestra.envs.environment import Environment, Verifier
from palestra.envs.errors import ConfigError
from palestra.envs.runtime import RuntimeLimits
from palestra.envs.sandboxes.contract import Boxes, BoxSpec
from palestra.envs.tool_environment import ToolEnvironment
from palestra.envs.tools import Tool, ToolContext
from palestra.envs.types import JSON, Message, Task
from palestra.envs.verifiers.numeric import parse_number
from palestra.envs.verifiers.process import ProcessVerifier
from palestra.envs.verifiers.verdict import Bounds

_CALLS = JsonInTags()


def prompt(question: str, tools: Sequence[Tool]) -> tuple[Message, ...]:
    """All that a policy is told."""
    return (Message("system", f"Solve the problem.\n{_CALLS.declare(tools)}"), Message("user", question))


@dataclass(frozen=True)
class Gsm8k:
    """The taskset, read from `gsm8k/train.jsonl` and `gsm8k/test.jsonl` in the data folder."""

    max_question_chars: int = 1000
    """Longer questions are left out, so that a small model's context suffices."""
    train_tasks: int | None = None
    """At most so many, from the start of the file; None: all."""
    test_tasks: int | None = None
    tool_credit: float = 0.0
    """Reward of a wrong answer whose episode ran the Python tool at least once without an error."""
    number_credit: float = 0.0
    """Reward of a wrong answer that is a number at all; added to `tool_credit`."""
    python_timeout_s: float = 5.0
    output_chars: int = 1000
    """Characters of a program's output that the policy sees."""
    digest_states: bool = False
    """Record in which state the box was before each turn; algorithm "gigpo" compares turns taken in equal states."""
    call_reward: float = 0.0
    """What a turn earns by itself when all its calls ran; for algorithms that look at turns, beside the outcome."""

    def __post_init__(self) -> None:
        credit = self.tool_credit + self.number_credit
        if self.tool_credit < 0 or self.number_credit < 0 or credit >= 1:
            raise ConfigError(f"tool_credit + number_credit is {credit:g}; use 0 or more each and less than 1 together")
        for name, value in (("train_tasks", self.train_tasks), ("test_tasks", self.test_tasks)):
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}; use 1 or more, or leave it out for all")
        if self.output_chars < 40:
            raise ConfigError(f"output_chars is {self.output_chars}; use 40 or more")

    def split(self, name: str) -> Sequence[Task]:
        """The tasks of "train" or "test", in the order of the file. Raises ConfigError when there is no data."""
        must_be_split(name)
        most = self.train_tasks if name == "train" else self.test_tasks
        rows = enumerate(json_lines(data_folder() / "gsm8k" / f"{name}.jsonl"))
        tasks = [self._task(f"gsm8k/{name}/{index}", row) for index, row in rows]
        short = [task for task in tasks if len(task.prompt[-1].content) <= self.max_question_chars]
        if not short:
            raise ConfigError(f"max_question_chars is {self.max_question_chars}; no question of {name!r} is so short")
        return tuple(short[:most])

    def environment(self, task: Task, boxes: Boxes) -> Environment:
        """A fresh episode."""
        spec = BoxSpec(image=task.image)
        return ToolEnvironment(
            task,
            self._tools,
            boxes,
            spec=spec,
            calls=_CALLS,
            limits=RuntimeLimits(),
            digest_states=self.digest_states,
            call_reward=self.call_reward,
        )

    def verifier(self) -> Verifier:
        """1 for the right number; else the declared credits, which are less than 1 together."""
        return ProcessVerifier("palestra.envs.verifiers.numeric:judge", bounds=Bounds(0.0, 1.0))

    def demonstration(self, task: Task, seed: int) -> tuple[str, ...]:
        """The worked solution of the data as calls; `seed` chooses one call per step or one for all."""
        assert isinstance(task.truth, Mapping)
        solution, number = str(task.truth["solution"]), str(task.truth["number"])
        return gsm8k_solutions.turns(solution, number, _CALLS, seed)

    def _task(self, id: str, row: Mapping[str, JSON]) -> Task:
        question, solution = row.get("question"), row.get("answer")
        if not isinstance(question, str) or not isinstance(solution, str):
            raise ConfigError(f"{id}: expected the keys question and answer with text")
        number = solution.rpartition("####")[2].strip()
        if parse_number(number) is None:
            raise ConfigError(f"{id}: expected a number behind ####, found {number[:40]!r}")
        truth: dict[str, JSON] = {
            "number": number,
            "tool": "python",
            "tool_credit": self.tool_credit,
            "number_credit": self.number_credit,
            "solution": solution,
        }
        return Task(id, prompt(question, self._tools), truth=truth)

    @cached_property
    def _tools(self) -> tuple[Tool, ...]:
        value: dict[str, JSON] = {"type": ["number", "string"], "maxLength": 64}
        parameters: dict[str, JSON] = {
            "type": "object",
            "properties": {"value": value},
            "required": ["value"],
            "additionalProperties": False,
        }
        answer = Tool("answer", "Give the final number; this ends the task.", parameters, _answer, finishes=True)
        return (python_tool(self.python_timeout_s, self.output_chars), answer)


async def _answer(arguments: Mapping[str, JSON], context: ToolContext) -> str:
    return "done"
