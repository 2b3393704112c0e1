"""A run that dies at any moment, again and again, ends as one that did not: same tasks, each once, and same weights.

The loop, the collector, the ledger, the learner and the checkpoints are the real ones. Episodes are made up from their
seeds, and a death is an exception that nobody catches at one of the places where a process may be killed.
"""

from __future__ import annotations

import asyncio
import random
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from learning_support import sample, tiny_llama, trajectory
from palestra.envs.types import Scored
from palestra.rl.algorithms.rloo import RLOO
from palestra.rl.checkpoints import Checkpoints
from palestra.rl.counted import Counting
from palestra.rl.gap_watch import GapWatch
from palestra.rl.gather import GatherSettings
from palestra.rl.learner import Learner, LearnerSettings
from palestra.rl.ledger import Ledger
from palestra.rl.lora import LoraSettings
from palestra.rl.optimizer import OptimizerSettings
from palestra.rl.order import TaskOrder
from palestra.rl.step import Practice
from palestra.rl.step_metrics import Metrics
from palestra.rl.summary import Summary
from palestra.rl.train import Loop, LoopSettings
from palestra.rollout.collector import Collector, CollectorSettings
from palestra.rollout.player import EpisodeRequest
from palestra.rollout.types import Trajectory

TASKS, GROUPS, SIZE = 12, 2, 3  # six steps would be an epoch, were no group replaced
ORDER = TaskOrder(TASKS, seed=1)


class Killed(BaseException):
    """The process is gone."""


@dataclass
class Fate:
    """Counts the moments at which a process may die, and ends it at one of them."""

    at: int | None = None
    passed: int = 0

    def moment(self) -> None:
        self.passed += 1
        if self.passed == self.at:
            raise Killed


class Plays:
    """Episodes made up from their seeds, one slower than the other; half of the groups teach nothing."""

    def __init__(self, fate: Fate) -> None:
        self.fate = fate

    async def run(self, request: EpisodeRequest) -> Trajectory:
        self.fate.moment()
        rng = np.random.default_rng(request.ticket.seed)
        await asyncio.sleep(float(rng.random()) / 2000)
        length = int(rng.integers(1, 5))
        row = sample(rng.integers(3, 50, length + 1).tolist(), [0] + [1] * length, logprobs=[-3.0] * (length + 1))
        made = trajectory(request.ticket.trajectory_id, [row], None)
        reward = float(rng.random() < 0.5) if request.index % 2 else 1.0
        return replace(made, group_id=request.ticket.group_id, verdict=Scored(reward), seed=request.ticket.seed)


class Outside:
    """What is published and logged, which goes wherever."""

    def __init__(self, fate: Fate) -> None:
        self.fate = fate

    async def publish(self, version: int) -> SimpleNamespace:
        self.fate.moment()
        return SimpleNamespace(gap=0.0, gap_mean=0.0, moved=1.0, matched_modules=1, digest="d", seconds=0.0)

    def log(self, step: int, values: Metrics) -> None:
        self.fate.moment()

    async def evaluate(self, step: int) -> None: ...


@dataclass(frozen=True)
class Run:
    """How a run is made."""

    folder: Path
    steps: int = 6
    save_every: int = 2
    lag: int = 0
    dynamic: bool = True

    def life(self, fate: Fate) -> Learner:
        """From the newest checkpoint to the end, unless it dies before. Returns the learner as it is then."""
        learner = Learner(tiny_llama(dtype=torch.float32), LEARNER)
        checkpoints = Checkpoints(self.folder / "checkpoints", base="b")
        found = checkpoints.newest()
        step, used = 0, 0
        if found is not None:
            state, extra = checkpoints.load(found.folder)
            learner.load_state(state)
            step, used = found.step, int(str(extra["groups_used"]))
        ledger = Ledger(self.folder / "ledger.sqlite")
        life = ledger.begin(step=step, now=0.0)
        assert ledger.consumed_positions() == list(range(used))
        (self.folder / "trajectories").mkdir(exist_ok=True)
        collector = Collector(
            Plays(fate),
            ledger,
            lambda position: (ORDER.index(position), f"train-{ORDER.index(position)}"),
            self.folder / "trajectories",
            CollectorSettings(SIZE, GROUPS, self.steps * GROUPS, max_lag=self.lag, seed=5),
            already_consumed=used,
            already_replaced=used - step * GROUPS,
            life=life,
        )
        outside = Outside(fate)

        def save(step: int) -> None:
            fate.moment()
            checkpoints.save(learner.state(), {"groups_used": loop.groups_used}, step=step)
            fate.moment()

        loop = Loop(
            settings=LoopSettings(
                *(self.steps, self.save_every, 0, 99, 1 << 30),
                GatherSettings(GROUPS, dynamic_sampling=self.dynamic, max_refills=6),
                Counting(),
                Practice(64, updates_per_batch=2),
            ),
            collector=collector,
            learner=learner,
            algorithm=RLOO(),
            publisher=outside,  # type: ignore[arg-type]
            ledger=ledger,
            log=outside,
            summary=Summary("e", "s", 0),
            gap=GapWatch(on_policy=False),
            save=save,
            evaluate=outside.evaluate,
            trajectories=self.folder / "trajectories",
            say=lambda line: None,
            stop=asyncio.Event(),
            step=step,
            groups_used=used,
        )
        collector.version = learner.step
        try:
            assert asyncio.run(loop.run())
        finally:
            ledger.close()
        return learner

    def rows(self) -> list[tuple[object, ...]]:
        """What was used, in order."""
        with sqlite3.connect(self.folder / "ledger.sqlite") as db:
            columns = "position, step, task_id, outcome, sampled_tokens"
            return list(db.execute(f"SELECT {columns} FROM trained WHERE undone = 0 ORDER BY position"))


LEARNER = LearnerSettings(lora=LoraSettings(4, 4.0), optimizer=OptimizerSettings(learning_rate=1e-2, warmup_steps=0))


def lives(run: Run, deaths: Sequence[int]) -> Learner:
    """Die at each of these moments in turn, then live to the end."""
    for at in deaths:
        try:
            return run.life(Fate(at))
        except Killed:
            continue
    return run.life(Fate())


@pytest.mark.parametrize(("lag", "dynamic"), [(0, True), (0, False), (1, True)])
def test_a_run_that_dies_at_many_moments_uses_each_task_once_and_ends_the_same(
    tmp_path: Path, lag: int, dynamic: bool
) -> None:
    whole = Run(tmp_path / "whole", lag=lag, dynamic=dynamic)
    whole.folder.mkdir()
    fate = Fate()
    unbroken = whole.life(fate)
    moments = fate.passed
    assert moments > 40
    if dynamic:
        assert any(row[3] == "filtered" for row in whole.rows())
        assert len(whole.rows()) > 6 * GROUPS
    rng = random.Random(lag)
    for trial in range(6):
        killed = Run(tmp_path / f"killed{trial}", lag=lag, dynamic=dynamic)
        killed.folder.mkdir()
        learner = lives(killed, [rng.randrange(1, moments) for _ in range(5)])
        assert [row[0] for row in killed.rows()] == list(range(len(killed.rows())))
        assert [row[2] for row in killed.rows()] == [f"train-{ORDER.index(p)}" for p in range(len(killed.rows()))]
        if not lag:  # with a lag, how many groups were begun by which weights depends on when it died
            assert killed.rows() == whole.rows()
            assert learner.adapter().digest() == unbroken.adapter().digest()


def test_a_run_that_stops_anywhere_goes_on_with_the_next_task_also_at_the_end_of_an_epoch(tmp_path: Path) -> None:
    """Two epochs of six steps; no task is left out or comes twice wherever the first life ends."""
    for stop in (1, 5, 6, 7, 11):
        folder = tmp_path / str(stop)
        folder.mkdir()
        Run(folder, steps=stop, save_every=1, dynamic=False).life(Fate())
        run = Run(folder, steps=12, save_every=99, dynamic=False)
        run.life(Fate())
        assert [row[1] for row in run.rows()] == [1 + i // GROUPS for i in range(24)]
        tasks = [str(row[2]) for row in run.rows()]
        assert sorted(tasks[:12]) == sorted(tasks[12:]) == sorted(f"train-{i}" for i in range(12))
