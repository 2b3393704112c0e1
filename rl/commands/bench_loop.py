"""`palestra bench loop`: what the agent loop, the renderer and the record cost per turn, without engine and tools."""

from __future__ import annotations

import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from palestra.envs.calls import JsonInTags
from palestra.envs.types import Action, Artefact, Message, Scored, StepResult, Task, ToolResult, Verdict
from palestra.envs.types import CallStatus as Status
from palestra.rl.exit_codes import DONE
from palestra.rl.new_policy import NewPolicySettings, new_policy
from palestra.rollout import record
from palestra.rollout.budgets import Budgets
from palestra.rollout.engines.scripted import ScriptedEngine
from palestra.rollout.load_renderer import load_renderer
from palestra.rollout.play import Stage, Ticket, play
from palestra.rollout.renderer import Renderer
from palestra.rollout.types import Trajectory

CONTEXTS = (500, 1000, 2000, 4000, 8000)
AT = 2000  # the context that the headline figure is for
TURNS, GROUP, GROUPS = 12, 8, 8  # a group's records reach the disk together, as the collector writes them
TURN = 'I look it up.<tool_call>{"name": "lookup", "arguments": {"key": "BADO"}}</tool_call>'
SEEN = "BADO is 42; it was last changed on a Monday."


def run_bench_loop(json_file: Path | None) -> int:
    """Print the figures, and write them as one JSON object when asked to."""
    figures = asyncio.run(measure())
    for name, value in figures.items():
        print(f"{name:32} {value}")
    if json_file is not None:
        json_file.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return DONE


async def measure() -> dict[str, object]:
    """Microseconds per turn at each context length, its growth, and episodes per second at the headline context."""
    with tempfile.TemporaryDirectory() as scratch:
        words = [TURN, SEEN, _filler(50)]
        shape = NewPolicySettings(hidden_size=32, intermediate_size=32, layers=1, heads=1, context_tokens=64)
        renderer = load_renderer(new_policy(Path(scratch) / "model", shape, words, seed=0))
        by_context, written = {}, 0
        for context in CONTEXTS:
            seconds, num_bytes = await _episodes(renderer, context, Path(scratch) / f"{context}.jsonl")
            by_context[context] = [1e6 * s / TURNS for s in seconds]
            written = num_bytes if context == AT else written
    medians = {context: statistics.median(times) for context, times in by_context.items()}
    slope = np.polyfit(list(medians), list(medians.values()), 1)[0]
    return {
        "turn_overhead_us_p50": round(medians[AT], 1),
        "turn_overhead_us_p95": round(float(np.quantile(by_context[AT], 0.95)), 1),
        "context_tokens": AT,
        "turn_overhead_us_by_context": {str(context): round(value, 1) for context, value in medians.items()},
        "growth_us_per_1000_tokens": round(1000 * float(slope), 1),
        "turns_per_episode": TURNS,
        "episodes_per_s": round(1e6 / (medians[AT] * TURNS), 1),
        "bytes_per_episode": written // (GROUP * GROUPS),
    }


async def _episodes(renderer: Renderer, context: int, file: Path) -> tuple[list[float], int]:
    """Seconds per episode of each group, its records on the disk included; bytes written after the warm-up."""
    task = Task("bench", (Message("user", _filler_of(renderer, context)),))
    turn = renderer.encoder.glue([TURN])
    engine = ScriptedEngine(lambda prompt, session, index: turn, context_tokens=10**6)
    budgets = Budgets(steps=TURNS, tokens=10**6, context_tokens=10**6)
    stage = Stage(engine, renderer, JsonInTags(), budgets)
    seconds, written = [], 0
    for number in range(1 + GROUPS):
        begun = time.perf_counter()
        group: list[Trajectory] = [
            await play(task, _Echo(task), _Judge(), stage, Ticket(f"b{number}-{member}", "b", number))
            for member in range(GROUP)
        ]
        num_bytes = record.append(file, group)
        if number:  # the first group warms up
            seconds.append((time.perf_counter() - begun) / GROUP)
            written += num_bytes
    return seconds, written


class _Echo:
    """An environment that costs nothing and always answers the same."""

    tools = ()

    def __init__(self, task: Task) -> None:
        self._task = task

    async def start(self) -> tuple[Message, ...]:
        return self._task.prompt

    async def step(self, action: Action) -> StepResult:
        results = tuple(ToolResult(Status.OK, SEEN, call.name, call.id, call.arguments) for call in action.calls)
        return StepResult((Message("tool", SEEN, name="lookup"),), results)

    async def export(self) -> Artefact:
        return Artefact()

    async def close(self) -> None:
        return None


class _Judge:
    async def verify(self, task: Task, artefact: Artefact) -> Verdict:
        return Scored(0.0)

    async def close(self) -> None:
        return None


def _filler(words: int) -> str:
    syllables: Sequence[str] = ("ba", "do", "li", "ru", "me", "ka", "so", "ti")
    return " ".join(syllables[i % 8] + syllables[(i * 5) % 7] for i in range(words))


def _filler_of(renderer: Renderer, tokens: int) -> str:
    """Text of about `tokens` tokens."""
    sample = _filler(200)
    return _filler(max(1, round(200 * tokens / len(renderer.encoder.data(sample)))))
