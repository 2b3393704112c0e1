"""Training on humaneval_repair with policies that are known: in every group half repair the function and half cheat."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from learning_support import tiny_llama
from loop_support import Around, loop_around
from palestra.envs.builtin.humaneval_repair import HumanEvalRepair
from palestra.envs.sandboxes.contract import Limits
from palestra.envs.sandboxes.pool import PoolSettings, SandboxPool
from palestra.rl.algorithms.grpo import GRPO
from palestra.rl.learner import Learner, LearnerSettings
from palestra.rl.ledger import Ledger
from palestra.rl.lora import LoraSettings
from palestra.rl.objective import Objective
from palestra.rl.step import Practice
from palestra.rollout.budgets import Budgets
from palestra.rollout.collector import Collector, CollectorSettings
from palestra.rollout.engines.scripted import ScriptedEngine
from palestra.rollout.player import EpisodeRequest, Player, PlayerSettings
from palestra.rollout.types import Trajectory
from repair_policies import CHEATS
from tiny_models import make_tiny, make_tokenizer

VOCAB = 600
HONEST = "an honest repair"
GROUP = 4
BUDGETS = Budgets(tokens=16_384, turn_tokens=8_192, context_tokens=30_000)


@dataclass
class Outcomes:
    """What each episode earned, and what the policy of it did."""

    rewards: list[tuple[str, str, float | None, str]] = field(default_factory=list)  # task, policy, reward, cause
    moved: bool = False  # whether the weights are others than at the start
    steps: int = 0
    leaked: int = 0

    def wrong(self) -> list[tuple[str, str, float | None, str]]:
        """Episodes that did not earn what their policy deserves."""
        return [row for row in self.rewards if row[2] != (1.0 if row[1] == HONEST else 0.0)]


class Mixture:
    """A player that notes which policy an episode has before it is played: the engine's script looks it up."""

    def __init__(self, taskset: HumanEvalRepair) -> None:
        self._taskset = taskset
        self._tasks = taskset.split("train")
        self._turns: dict[str, Sequence[str]] = {}
        self.player: Player | None = None
        self.outcomes = Outcomes()

    async def run(self, request: EpisodeRequest) -> Trajectory:
        """One episode: members 0 and 1 of a group are honest, the others cheat, each in another way."""
        task, name = self._tasks[request.index], request.ticket.trajectory_id
        member = sum(known.startswith(f"{request.ticket.group_id}-") for known in self._turns)
        policy = HONEST
        if member < 2:
            self._turns[name] = self._taskset.demonstration(task, member)
        else:
            policy = list(CHEATS)[(2 * request.index + member) % len(CHEATS)]
            self._turns[name] = CHEATS[policy](task)
        assert self.player is not None
        trajectory = await self.player.run(request)
        self.outcomes.rewards.append((task.id, policy, trajectory.reward, f"{trajectory.verdict} {trajectory.error}"))
        return trajectory

    def turn(self, prompt: Sequence[int], session: str, index: int) -> str:
        """The script; a second try of an episode has a name that goes on from that of the first."""
        name = next(known for known in self._turns if session == known or session.startswith(f"{known}."))
        return self._turns[name][index]


def train(folder: Path, tasks: int, groups_per_step: int) -> Outcomes:
    """Play one group of each task through player and collector, with a GRPO step after each few groups."""
    make_tiny(folder / "model", hidden=32, layers=1, heads=2, vocab=VOCAB, context=32_768)
    taskset = HumanEvalRepair(train_tasks=tasks, output_chars=400)
    mixture = Mixture(taskset)
    ids = [task.id for task in taskset.split("train")]
    assert len(ids) == tasks
    tokenizer = make_tokenizer(VOCAB)
    engine = ScriptedEngine(mixture.turn, encode=lambda text: tokenizer(text, add_special_tokens=False).input_ids)
    settings = PlayerSettings(
        str(folder / "model"), "humaneval_repair", {"train_tasks": tasks, "output_chars": 400}, BUDGETS
    )
    limits = Limits(memory_bytes=256 * 2**20, scratch_bytes=32 * 2**20, processes=32)
    pool = PoolSettings(backend="namespace", max_boxes=4, limits=limits, run="repair-mixture")
    mixture.player = Player(settings, engine, lambda: SandboxPool(pool))
    learner = Learner(tiny_llama(dtype=torch.float32, vocab=VOCAB), LearnerSettings(lora=LoraSettings(4, 4.0)))
    before = learner.adapter().digest()

    async def body(player: Player) -> None:
        ledger, around = Ledger(folder / "ledger.sqlite"), Around()
        life = ledger.begin(step=0, now=0.0)
        how = CollectorSettings(group_size=GROUP, groups_per_step=groups_per_step, max_groups=tasks)
        await player.start()
        try:
            collector = Collector(mixture, ledger, lambda at: (at, ids[at]), folder, how, life=life)
            loop = loop_around(
                *(around, collector, learner, GRPO(Objective(correction=None)), ledger, folder),
                steps=tasks // groups_per_step,
                groups=groups_per_step,
                practice=Practice(8192),
            )
            assert await loop.run()
            await collector.close()
            mixture.outcomes.steps = loop.step
        finally:
            mixture.outcomes.leaked = await player.close()
            ledger.close()

    asyncio.run(body(mixture.player))
    mixture.outcomes.moved = learner.adapter().digest() != before
    return mixture.outcomes
