"""Three views of the same sampled tokens: the engine's, the trainer's in packed rows, and a plain padded forward's."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from engine_reference import Reference
from palestra.envs.types import Scored
from palestra.rl.algorithms.base import Credit
from palestra.rl.batch import pack
from palestra.rl.learner import Learner, LearnerSettings
from palestra.rl.lora import LoraSettings
from palestra.rl.model import load_model
from palestra.rl.objective import Objective
from palestra.rollout.adapters import Adapter
from palestra.rollout.engines.protocol import Engine
from palestra.rollout.rows import Row
from palestra.rollout.types import Float32, Group, Sampling, TerminatedBy, Trajectory


async def sample_rows(
    engine: Engine, prompts: Sequence[Sequence[int]], tokens: int, temperature: float
) -> list[Trajectory]:
    """One turn of `tokens` ids after each prompt, all at once, as trajectories of one row."""

    async def one(number: int, prompt: Sequence[int]) -> Trajectory:
        sampling = Sampling(max_tokens=tokens, temperature=temperature, seed=number)
        completion = await engine.generate(prompt, sampling, session=f"row-{number}")
        await engine.end_session(f"row-{number}")
        row = Row(prompt)
        row.sampled(completion, 0, temperature)
        return Trajectory(f"t{number}", "t", "g", 0, (), (), (row.freeze(),), TerminatedBy.DONE, Scored(1.0))

    return list(await asyncio.gather(*(one(number, prompt) for number, prompt in enumerate(prompts))))


def largest_and_mean_gaps(
    folder: Path, adapter: Adapter, trajectories: Sequence[Trajectory], temperature: float, rank: int
) -> dict[str, tuple[float, float]]:
    """(largest, mean) absolute difference of natural-log probabilities on the sampled tokens, pair by pair."""
    # sorted: packing lays long rows out first, and the comparison is token by token
    loaded = load_model(str(folder))
    scale = next(iter(adapter.factors.values())).scale
    learner = Learner(loaded.model, LearnerSettings(lora=LoraSettings(rank, rank * scale)), start=adapter)
    group = Group("g", "t", tuple(trajectories))
    batch = pack([group], [Credit(tuple(np.ones(t.sampled_tokens) for t in trajectories))], 1024, Objective())
    packed = learner.sampled_logprobs(batch)
    actions = batch.actions()
    reference = Reference(folder, adapter)
    padded: dict[int, Float32] = {}
    for number, trajectory in enumerate(trajectories):
        sample = trajectory.samples[0]
        whole = reference.logprobs([sample.ids.tolist()], temperature)[0]
        padded[number] = whole[sample.sampled[1:]]
    plain = np.concatenate([padded[number] for number in dict.fromkeys(actions.trajectory.tolist())])
    engine = actions.sampling_logprobs
    pairs = {
        "engine and trainer": engine - packed,
        "engine and padded": engine - plain,
        "trainer and padded": packed - plain,
    }
    return {name: (float(np.abs(gap).max()), float(np.abs(gap).mean())) for name, gap in pairs.items()}
