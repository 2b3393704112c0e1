"""Keep a notebook: find, file, mark, prune and index notes. The state lasts through the episode and is what is judged.

The notes lie in the box, where only the tools reach them; at the end they are exported and compared with the state that
was asked for. Words of "test" and of "train" are disjoint.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial

from palestra.envs.builtin.notes_goals import Goal, make_goal
from palestra.envs.builtin.notes_tools import FOLDER, notes_tools
from palestra.envs.builtin.tasks import TasksOnDemand, must_be_split
from palestra.envs.calls import JsonInTags
from palestra.envs.environment import Environment, Verifier
from palestra.envs.errors import ConfigError
from palestra.envs.sandboxes.contract import Boxes, ExportLimits
from palestra.envs.tool_environment import ToolEnvironment
from palestra.envs.tools import Tool
from palestra.envs.types import JSON, Artefact, Message, Task
from palestra.envs.verifiers.process import ProcessVerifier
from palestra.envs.verifiers.verdict import Bounds

_CALLS = JsonInTags()
_EXPORT = ExportLimits(total_bytes=2**19, files=500, depth=8)


class NotesEnvironment(ToolEnvironment):
    """One episode. What leaves is the answer with the notes in it, `{"notes": {name: text}, "final": ..., ...}`."""

    async def export(self) -> Artefact:
        """The notes and the answer, as plain data. Raises SandboxError."""
        assert self._box is not None, "exported between start and close"
        artefact = await super().export()
        tree = await self._box.export([FOLDER], _EXPORT)
        assert isinstance(artefact.answer, dict)
        notes: dict[str, JSON] = {
            path.removeprefix(f"{FOLDER}/"): data.decode(errors="replace") for path, data in tree.files.items()
        }
        # too many or too long: no notes are none that any task asks for
        return Artefact({**artefact.answer, "notes": notes}, skipped=tree.skipped, flags=artefact.flags)


@dataclass(frozen=True)
class Notes:
    """The taskset. Same options, same tasks, on every machine."""

    seed: int = 0
    train_tasks: int = 5000
    test_tasks: int = 200
    num_notes: int = 8
    """Notes in the box at the start."""
    digest_states: bool = False
    """Record in which state the notes were before each turn; algorithm "gigpo" compares turns of equal states."""
    call_reward: float = 0.0
    """What a turn earns by itself when all its calls ran; for algorithms that look at turns, beside the outcome."""

    def __post_init__(self) -> None:
        for name, value in (("train_tasks", self.train_tasks), ("test_tasks", self.test_tasks)):
            if value < 1:
                raise ConfigError(f"{name} is {value}; use 1 or more")
        if not 4 <= self.num_notes <= 100:
            raise ConfigError(f"num_notes is {self.num_notes}; use 4 to 100")

    def split(self, name: str) -> Sequence[Task]:
        """The tasks of "train" or "test", made when they are asked for."""
        must_be_split(name)
        return TasksOnDemand(self.train_tasks if name == "train" else self.test_tasks, partial(self._task, name))

    def environment(self, task: Task, boxes: Boxes) -> Environment:
        """A fresh episode."""
        return NotesEnvironment(
            task, self._tools, boxes, calls=_CALLS, digest_states=self.digest_states, call_reward=self.call_reward
        )

    def verifier(self) -> Verifier:
        """1 for the state and the answer that were asked for, else 0."""
        return ProcessVerifier("palestra.envs.builtin.notes_judge:judge", bounds=Bounds(0.0, 1.0))

    def demonstration(self, task: Task, seed: int) -> tuple[str, ...]:
        """An expert's calls, one a turn. There is one way, whatever the seed."""
        _, split, index = task.id.split("/")
        return tuple(_CALLS.render_call(name, arguments) for name, arguments in self._goal(split, int(index)).calls)

    def _goal(self, split: str, index: int) -> Goal:
        return make_goal(split, random.Random(f"{self.seed}/notes/{split}/{index}"), self.num_notes)

    def _task(self, split: str, index: int) -> Task:
        goal = self._goal(split, index)
        return Task(
            id=f"notes/{split}/{index}",
            prompt=(Message("system", _CALLS.declare(self._tools)), Message("user", goal.question)),
            files={f"{FOLDER}/{name}": text.encode() for name, text in goal.before.items()},
            truth={"notes": dict(goal.after), "answer": goal.answer},
        )

    @cached_property
    def _tools(self) -> tuple[Tool, ...]:
        return notes_tools()
