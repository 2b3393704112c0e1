"""HumanEval (arXiv:2107.03374) as repair: a function with one fault, mended in a box and judged by its hidden tests."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from palestra.envs.builtin.data import data_folder, json_lines
from palestra.envs.builtin.faults import faults_of
from palestra.envs.builtin.file_tools import file_tools
from palestra.envs.builtin.humaneval_faults import FAULTS, MISPRINTED
from palestra.envs.builtin.humaneval_tests import hidden_cases, visible_examples, visible_tests
from palestra.envs.builtin.shell_tool import run_tool, submit_tool
from palestra.envs.builtin.tasks import check_common, must_be_split
from palestra.envs.calls import JsonInTags
from palestra.envs.environment import Environment, Verifier
from palestra.envs.errors import ConfigError
from palestra.envs.sandboxes.contract import Boxes, BoxSpec, ExportLimits
from palestra.envs.tool_environment import ToolEnvironment
from palestra.envs.tools import Tool
from palestra.envs.types import JSON, Artefact, Message, Task
from palestra.envs.verifiers.boxed import BoxVerifier, Examination
from palestra.envs.verifiers.function_tests import FunctionCase, FunctionExamination

SOLUTION, VISIBLE = "solution.py", "test_visible.py"
TEST_SHARE = 5  # every fifth function is for testing, with all its faults
_CALLS = JsonInTags()


@dataclass(frozen=True)
class HumanEvalRepair:
    """The taskset, read from `humaneval/HumanEval.jsonl` in the data folder."""

    faults_per_function: int = 1
    """Tasks made of one function, each with another fault; fewer where it has fewer."""
    seed: int = 0
    """Which of its faults a function gets."""
    train_tasks: int | None = None
    """At most so many, from the start; None: all."""
    test_tasks: int | None = None
    command_timeout_s: float = 10.0
    output_chars: int = 4000
    """Characters of a file or of a command's output that the policy sees at once."""
    judging_timeout_s: float = 20.0
    """For all hidden tests of a function together."""
    digest_states: bool = False
    """Record in which state the box was before each turn; algorithm "gigpo" compares turns taken in equal states."""

    def __post_init__(self) -> None:
        counts = {name: getattr(self, name) for name in ("faults_per_function", "train_tasks", "test_tasks")}
        check_common(counts, self.output_chars, self.judging_timeout_s)

    def split(self, name: str) -> Sequence[Task]:
        """The tasks of "train" or "test"; they share no function. Raises ConfigError when there is no data."""
        must_be_split(name)
        rows = enumerate(json_lines(data_folder() / "humaneval" / "HumanEval.jsonl"))
        ours = [row for number, row in rows if (number % TEST_SHARE == 0) == (name == "test")]
        tasks = [task for row in ours for task in self._tasks(row)]
        return tuple(tasks[: self.train_tasks if name == "train" else self.test_tasks])

    def environment(self, task: Task, boxes: Boxes) -> Environment:
        """A fresh episode."""
        return RepairEnvironment(
            task, self._tools, boxes, spec=BoxSpec(image=task.image), calls=_CALLS, digest_states=self.digest_states
        )

    def verifier(self) -> Verifier:
        """1 where all hidden tests pass, else 0."""
        return BoxVerifier(RepairExaminer(self.judging_timeout_s))

    def demonstration(self, task: Task, seed: int) -> tuple[str, ...]:
        """Look, run the visible tests, mend, hand in; `seed` chooses whether a piece or the whole file is written."""
        faulty, good = task.files[SOLUTION].decode(), str(_truth(task)["solution"])
        old, new = changed_lines(faulty, good)
        mend = _CALLS.render_call("edit_file", {"path": SOLUTION, "old": old, "new": new})
        if faulty.count(old) != 1 or seed % 2:
            mend = _CALLS.render_call("write_file", {"path": SOLUTION, "text": good})
        look = _CALLS.render_call("read_file", {"path": SOLUTION})
        check = _CALLS.render_call("run", {"command": f"python3 {VISIBLE}"})
        return (look, check, mend, check, _CALLS.render_call("submit", {}))

    def _tasks(self, row: Mapping[str, JSON]) -> list[Task]:
        """The function's tasks; none where no fault of it is caught by its tests."""
        id, prompt, entry_point, body, test = (
            row.get(key) for key in ("task_id", "prompt", "entry_point", "canonical_solution", "test")
        )
        if not (
            isinstance(id, str)
            and isinstance(prompt, str)
            and isinstance(entry_point, str)
            and isinstance(body, str)
            and isinstance(test, str)
        ):
            raise ConfigError(f"{id}: expected the keys of HumanEval, each of them a text")
        good = prompt + body
        cases = hidden_cases(id, good, entry_point, test)
        shown = [each for each in visible_examples(prompt, entry_point) if each[0] not in MISPRINTED.get(id, ())]
        visible = visible_tests(tuple(shown), entry_point).encode()
        truth: JSON = {"solution": good, "entry_point": entry_point, "cases": [list(case) for case in cases]}
        faults = faults_of(good, entry_point)
        caught = list(FAULTS.get(id, ()))
        if caught and caught[-1] >= len(faults):
            raise ConfigError(f"{id}: has {len(faults)} faults, expected more; is the data that of HumanEval?")
        random.Random(f"{self.seed} {id}").shuffle(caught)
        return [
            Task(
                f"{id}/{number}",
                self._prompt(prompt, entry_point),
                {SOLUTION: faults[number].applied(good).encode(), VISIBLE: visible},
                truth=truth,
            )
            for number in caught[: self.faults_per_function]
        ]

    def _prompt(self, prompt: str, entry_point: str) -> tuple[Message, ...]:
        system = (
            f"The function {entry_point} in {SOLUTION} has a fault. Find it, mend it in that file and submit. "
            f"`python3 {VISIBLE}` runs its visible tests; others decide.\n{_CALLS.declare(self._tools)}"
        )
        return (Message("system", system), Message("user", prompt.strip()))

    @cached_property
    def _tools(self) -> tuple[Tool, ...]:
        # without byte code beside the source, no run sees an older solution.py than the last edit
        run = run_tool(self.command_timeout_s, self.output_chars, {"PYTHONDONTWRITEBYTECODE": "1"})
        return (*file_tools(self.output_chars), run, submit_tool())


class RepairEnvironment(ToolEnvironment):
    """One episode. What leaves is `solution.py` alone, whatever else lies in the box."""

    async def export(self) -> Artefact:
        """The answer and the file. Raises SandboxError."""
        assert self._box is not None, "exported between start and close"
        answer = (await super().export()).answer
        tree = await self._box.export([SOLUTION], ExportLimits())
        if tree.over is not None:
            return Artefact(answer, skipped=tree.skipped, failure="artefact_too_large")
        if set(tree.files) != {SOLUTION}:  # removed, or a folder, a link or a device in its place
            return Artefact(answer, skipped=tree.skipped, failure="artefact_missing")
        return Artefact(answer, tree.files, skipped=tree.skipped)


@dataclass(frozen=True, slots=True)
class RepairExaminer:
    """See Examiner: the hidden tests against a solution.py."""

    timeout_s: float

    def examination(self, task: Task, artefact: Artefact) -> Examination:
        """See Examiner. An artefact without the file defines no function, and so fails."""
        truth = _truth(task)
        cases = truth["cases"]
        assert isinstance(cases, list)
        pairs = [case for case in cases if isinstance(case, list)]
        return FunctionExamination(
            artefact.files.get(SOLUTION, b""),
            str(truth["entry_point"]),
            [FunctionCase(str(id), str(test)) for id, test in pairs],
            spec=BoxSpec(image=task.image, role="verifier"),
            timeout_s=self.timeout_s,
        )

    def control(self, task: Task) -> Examination:
        """See Examiner: the solution of the data."""
        return self.examination(task, Artefact(files={SOLUTION: str(_truth(task)["solution"]).encode()}))


def changed_lines(faulty: str, good: str) -> tuple[str, str]:
    """The lines in which the two differ, from the first to the last of them, in each."""
    old, new = faulty.splitlines(keepends=True), good.splitlines(keepends=True)
    first = next(n for n, (a, b) in enumerate(zip(old, new, strict=False)) if a != b)
    last = next(n for n, (a, b) in enumerate(zip(old[::-1], new[::-1], strict=False)) if a != b)
    return "".join(old[first : len(old) - last]), "".join(new[first : len(new) - last])


def _truth(task: Task) -> Mapping[str, JSON]:
    assert isinstance(task.truth, Mapping), f"{task.id}: no task of this taskset"
    return task.truth
