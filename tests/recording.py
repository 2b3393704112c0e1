"""Recorded episodes of the toy environment, spelled with a model folder's own tokenizer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from palestra.envs.calls import JsonInTags
from palestra.rollout import record
from palestra.rollout.budgets import Budgets
from palestra.rollout.engines.scripted import ScriptedEngine
from palestra.rollout.load_renderer import load_renderer
from palestra.rollout.play import Stage, Ticket, play
from palestra.rollout.types import Trajectory
from toy_environment import EvenLength, Speech, Speeches


def recorded(model: Path, words: Sequence[tuple[str, int, str]]) -> list[Trajectory]:
    """Episodes of (split, task, what the policy said); an even number of characters earns 1."""
    renderer = load_renderer(model)
    taskset = Speeches()

    async def one(number: int, split: str, index: int, said: str) -> Trajectory:
        task = taskset.split(split)[index]
        engine = ScriptedEngine([said], encode=renderer.encoder.data)
        stage = Stage(engine, renderer, JsonInTags(), Budgets(context_tokens=256, turn_tokens=200))
        trajectory = await play(task, Speech(task), EvenLength(), stage, Ticket(f"r{number}", "g", seed=number))
        return replace(trajectory, seconds=0.0)

    async def all_of_them() -> list[Trajectory]:
        return [await one(number, *what) for number, what in enumerate(words)]

    return asyncio.run(all_of_them())


def written(folder: Path, episodes: Sequence[Trajectory], name: str = "step_000001.jsonl") -> Path:
    """The episodes in a file of a folder, which is returned."""
    folder.mkdir(parents=True, exist_ok=True)
    record.append(folder / name, episodes)
    return folder
