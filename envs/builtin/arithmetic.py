"""Look two numbers up and add them: the smallest task that needs tools, generated from a seed.

"What is BADO + LIRU?" has no answer in any weights: the numbers are in a table in the box. A policy must look both up,
add, and say so. The names of "test" and of "train" are disjoint, and a box holds facts of its own split only.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from palestra.envs.builtin.arithmetic_tools import FACTS_FILE, arithmetic_tools
from palestra.envs.builtin.tasks import TasksOnDemand, must_be_split
from palestra.envs.calls import JsonInTags
from palestra.envs.environment import Environment, Verifier
from palestra.envs.errors import ConfigError
from palestra.envs.runtime import RuntimeLimits
from palestra.envs.sandboxes.contract import Boxes, BoxSpec
from palestra.envs.tool_environment import ToolEnvironment
from palestra.envs.tools import Tool, signature
from palestra.envs.types import Message, Task
from palestra.envs.verifiers.process import ProcessVerifier
from palestra.envs.verifiers.verdict import Bounds

_SYLLABLES = tuple(consonant + vowel for consonant in "BDKLMNRSTZ" for vowel in "AEIOU")
_MAX_FACTS = 50_000  # of 117,600 names with three different syllables
_SYLLABLES_PER_NAME = 3
_CALLS = JsonInTags()


def prompt(a: str, b: str, tools: Sequence[Tool]) -> tuple[Message, ...]:
    """All that a policy is told."""
    return (
        Message("system", f"Tools: {', '.join(signature(tool) for tool in tools)}."),
        Message("user", f"What is {a} + {b}?"),
    )


@dataclass(frozen=True)
class Arithmetic:
    """The taskset. Same options, same tasks, on every machine."""

    seed: int = 0
    train_facts: int = 20_000
    """Names with a number that training tasks ask for."""
    test_facts: int = 500
    """Names with a number that test tasks ask for; none of them is a training fact."""
    train_tasks: int | None = None
    """Length of the training split; None: every pair of names once. Tasks are made when they are asked for."""
    test_tasks: int | None = 200
    """Length of the test split, likewise."""
    digits: int = 2
    """Digits of every fact's number."""
    table_facts: int = 32
    """Names in the table of one box: the two that are asked for, and others of the split as far as it has them."""
    step_cost: float = 0.0
    """Taken off the reward for each turn, at most 1 in all."""
    digest_states: bool = False
    """Record in which state the box was before each turn; algorithm "gigpo" compares turns taken in equal states."""
    call_reward: float = 0.0
    """What a turn earns by itself when all its calls ran; for algorithms that look at turns, beside the outcome."""

    def __post_init__(self) -> None:
        if self.train_facts < 2 or self.test_facts < 2 or self.train_facts + self.test_facts > _MAX_FACTS:
            found = f"{self.train_facts} and {self.test_facts}"
            raise ConfigError(
                f"train_facts and test_facts are {found}; use 2 or more each, at most {_MAX_FACTS} in all"
            )
        for split, tasks, facts in (
            ("train", self.train_tasks, self.train_facts),
            ("test", self.test_tasks, self.test_facts),
        ):
            pairs = facts * (facts - 1)
            if tasks is not None and not 1 <= tasks <= pairs:
                raise ConfigError(f"{split}_tasks is {tasks}; use 1 to {pairs}, the pairs of {facts} {split}_facts")
        if self.table_facts < 2:
            raise ConfigError(f"table_facts is {self.table_facts}; use 2 or more: two are asked for")
        if not 1 <= self.digits <= 8:
            raise ConfigError(f"digits is {self.digits}; use 1 to 8")
        if not 0 <= self.step_cost <= 1:
            raise ConfigError(f"step_cost is {self.step_cost}; use 0 to 1")

    def split(self, name: str) -> Sequence[Task]:
        """The tasks of "train" or "test"."""
        must_be_split(name)
        facts = self._facts[name]
        names = tuple(facts)
        rng = random.Random(f"{self.seed}/{name}/pairs")
        num_pairs = len(names) * (len(names) - 1)
        offset, stride = rng.randrange(num_pairs), _coprime(num_pairs, rng)

        def make(index: int) -> Task:
            first, second = divmod((offset + index * stride) % num_pairs, len(names) - 1)
            a, b = names[first], names[second + (second >= first)]
            return Task(
                id=f"arithmetic/{name}/{index}",
                prompt=prompt(a, b, self._tools),
                files={FACTS_FILE: self._table(facts, names, (a, b), index)},
                truth={"number": facts[a] + facts[b], "turn_cost": self.step_cost, "facts": {a: facts[a], b: facts[b]}},
            )

        length = self.train_tasks if name == "train" else self.test_tasks
        return TasksOnDemand(num_pairs if length is None else length, make)

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
        """1 for the right sum, 0 for anything else, minus the turns' cost."""
        low = -1.0 if self.step_cost > 0 else 0.0
        return ProcessVerifier("palestra.envs.verifiers.numeric:judge", bounds=Bounds(low, 1.0))

    def demonstration(self, task: Task, seed: int) -> tuple[str, ...]:
        """Look up the first name, look up the second, add, answer. There is one way, whatever the seed."""
        assert isinstance(task.truth, Mapping)
        facts = task.truth["facts"]
        assert isinstance(facts, Mapping)
        lookups = [_CALLS.render_call("lookup", {"key": key}) for key in facts]
        expression = "+".join(str(number) for number in facts.values())
        return (
            *lookups,
            _CALLS.render_call("calculate", {"expression": expression}),
            _CALLS.render_call("answer", {"value": task.truth["number"]}),
        )

    def _table(self, facts: Mapping[str, int], names: Sequence[str], asked: tuple[str, str], index: int) -> bytes:
        """The table of one task's box, in an order that says nothing about the question."""
        rng = random.Random(f"{self.seed}/{index}/table")
        others = (name for name in rng.sample(names, min(self.table_facts, len(names))) if name not in asked)
        rows = [*asked, *list(others)[: self.table_facts - 2]]
        rng.shuffle(rows)
        return "".join(f"{name} {facts[name]}\n" for name in rows).encode()

    @cached_property
    def _tools(self) -> tuple[Tool, ...]:
        return arithmetic_tools()

    @cached_property
    def _facts(self) -> dict[str, dict[str, int]]:
        rng = random.Random(f"{self.seed}/facts")
        names: dict[str, None] = {}
        while len(names) < self.train_facts + self.test_facts:
            names["".join(rng.sample(_SYLLABLES, _SYLLABLES_PER_NAME))] = None
        low, high = 10 ** (self.digits - 1), 10**self.digits - 1
        facts = {name: rng.randint(low, high) for name in names}
        train = dict(list(facts.items())[: self.train_facts])
        return {"train": train, "test": {name: facts[name] for name in facts if name not in train}}


def _coprime(number: int, rng: random.Random) -> int:
    """A stride that visits every residue of `number` once."""
    while math.gcd(stride := rng.randrange(1, number + 1), number) != 1:
        pass
    return stride
