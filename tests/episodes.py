"""A small environment and everything to play it with, in memory: for tests of what stands above an environment."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from palestra.envs.calls import JsonInTags
from palestra.envs.environment import Environment, Verifier
from palestra.envs.runtime import RuntimeLimits
from palestra.envs.sandboxes.contract import Boxes, BoxSpec, Sandbox
from palestra.envs.sandboxes.scripted import ScriptedSandbox
from palestra.envs.tool_environment import ToolEnvironment
from palestra.envs.tools import Tool, ToolContext
from palestra.envs.types import JSON, Artefact, Message, NoVerdict, Scored, Task, Verdict
from palestra.rollout.budgets import Budgets
from palestra.rollout.engines.scripted import Script, ScriptedEngine
from palestra.rollout.play import Stage, Ticket, play
from palestra.rollout.renderer import Renderer
from palestra.rollout.types import Trajectory
from tiny_models import make_tokenizer

FORMAT = JsonInTags()
TOKENIZER = make_tokenizer(600)
RENDERER = Renderer(TOKENIZER, [TOKENIZER.eos_token_id])


def call(name: str, **arguments: JSON) -> str:
    return FORMAT.render_call(name, arguments)


ADD = call("add", a=2, b=3)
ANSWER = call("answer", value=5)


async def add(arguments: Mapping[str, JSON], context: ToolContext) -> str:
    return str(arguments["a"] + arguments["b"])  # type: ignore[operator]


async def answer(arguments: Mapping[str, JSON], context: ToolContext) -> str:
    return "noted"


def number(*names: str) -> dict[str, JSON]:
    return {
        "type": "object",
        "properties": {name: {"type": "integer"} for name in names},
        "required": list(names),
        "additionalProperties": False,
    }


TOOLS = (
    Tool("add", "Adds.", number("a", "b"), add),
    Tool("answer", "Ends.", number("value"), answer, finishes=True),
)
TASK = Task("two-and-three", (Message("system", "Tools: add, answer."), Message("user", "What is 2 + 3?")), truth=5)


class CountedBoxes:
    """Lends boxes in memory and knows how many are out."""

    def __init__(self) -> None:
        self.lent = self.made = 0

    async def acquire(self, spec: BoxSpec, files: Mapping[str, bytes], *, episode: str) -> Sandbox:
        self.lent += 1
        self.made += 1
        box = ScriptedSandbox(id=f"box-{self.made}")
        await box.reset(files)
        return box

    async def release(self, box: Sandbox) -> None:
        self.lent -= 1

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    def leaked(self) -> int:
        return self.lent


@dataclass
class Judge:
    """1 for the truth, 0 for anything else; or whatever it is told."""

    says: Callable[[Task, Artefact], Verdict] | None = None
    asked: int = 0

    async def verify(self, task: Task, artefact: Artefact) -> Verdict:
        self.asked += 1
        if self.says is not None:
            return self.says(task, artefact)
        final = artefact.answer["final"] if isinstance(artefact.answer, dict) else None
        return Scored(float(isinstance(final, dict) and final.get("value") == task.truth))

    async def close(self) -> None: ...


@dataclass
class Sums:
    """A taskset of additions: task i asks for i + 1."""

    tasks: int = 10
    judge: Judge = field(default_factory=Judge)
    tools: Sequence[Tool] = TOOLS

    def split(self, name: str) -> Sequence[Task]:
        return [Task(f"{name}-{i}", TASK.prompt, truth=i + 1) for i in range(self.tasks)]

    def environment(self, task: Task, boxes: Boxes) -> Environment:
        return environment(task, boxes, self.tools)

    def verifier(self) -> Verifier:
        return self.judge

    def demonstration(self, task: Task, seed: int) -> tuple[str, ...]:
        assert isinstance(task.truth, int)
        return (call("add", a=task.truth - 1, b=1), call("answer", value=task.truth))


def environment(task: Task, boxes: Boxes, tools: Sequence[Tool] = TOOLS) -> ToolEnvironment:
    return ToolEnvironment(task, tools, boxes, spec=BoxSpec(), calls=FORMAT, limits=RuntimeLimits())


def engine(script: Script, **options: object) -> ScriptedEngine:
    return ScriptedEngine(script, encode=RENDERER.encoder.data, **options)  # type: ignore[arg-type]


def episode(
    script: Script | ScriptedEngine,
    *,
    budgets: Budgets | None = None,
    judge: Judge | None = None,
    tools: Sequence[Tool] = TOOLS,
    world: Environment | None = None,
    renderer: Renderer = RENDERER,
) -> Trajectory:
    """Play one scripted episode of TASK in an event loop of its own."""

    async def body() -> Trajectory:
        boxes = CountedBoxes()
        engine_ = script if isinstance(script, ScriptedEngine) else engine(script)
        stage = Stage(engine_, renderer, FORMAT, budgets or Budgets())
        ticket = Ticket("t", "g", seed=1)
        trajectory = await play(TASK, world or environment(TASK, boxes, tools), judge or Judge(), stage, ticket)
        assert boxes.lent == 0, "the environment did not give its box back"
        return trajectory

    return asyncio.run(body())


def sampled_text(trajectory: Trajectory) -> list[str]:
    """What the policy sampled, turn by turn, read from the ids that will be trained."""
    turns: dict[int, list[int]] = {}
    for sample in trajectory.samples:
        for token, turn in zip(sample.ids[sample.sampled].tolist(), sample.turn[sample.sampled].tolist(), strict=True):
            turns.setdefault(turn, []).append(token)
    return [RENDERER.encoder.text(ids) for _, ids in sorted(turns.items())]


def no_verdict(task: Task, artefact: Artefact) -> Verdict:
    return NoVerdict("the judge was out")
