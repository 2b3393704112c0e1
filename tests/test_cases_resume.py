"""What goes on after a stop as if there had been none: the order of tasks, the optimizer, the rate, the summary."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path

import numpy as np
import pytest
import torch

from episodes import Sums
from learning_support import random_groups, tiny_llama
from loop_support import Around, loop_around
from palestra.envs.errors import IntegrityError
from palestra.rl.algorithms.rloo import RLOO
from palestra.rl.batch import pack
from palestra.rl.learner import Learner, LearnerSettings
from palestra.rl.learner_plan import LearnerPlan
from palestra.rl.ledger import Consumed, Ledger
from palestra.rl.lineage import check_tasks
from palestra.rl.load_config import parse_config
from palestra.rl.loop_settings import num_updates
from palestra.rl.lora import LoraSettings
from palestra.rl.optimizer import OptimizerSettings, load_moments, make_optimizer, moments
from palestra.rl.order import TaskOrder
from palestra.rl.publish import Proof
from palestra.rl.summary import Summary
from palestra.rollout.collector import Collector, CollectorSettings
from test_collector import Plays

# -- the order of tasks ------------------------------------------------------------------------------------------------


class Run:
    """Lives of one run over few tasks. Every attempt succeeds, so that steps are taken and no weights are needed."""

    def __init__(self, folder: Path, learner: Learner, tasks: int, groups: int, steps: int) -> None:
        folder.mkdir()
        self.folder, self.learner, self.tasks, self.groups, self.steps = folder, learner, tasks, groups, steps

    def live(self, step: int = 0, used: int = 0, stop_at: int | None = None) -> tuple[bool, tuple[int, int]]:
        """From a step on, until the end or until stopped. Returns whether it came to the end, and what was saved."""
        order = TaskOrder(self.tasks, seed=7)

        def task_at(position: int) -> tuple[int, str]:
            return order.index(position), f"train-{order.index(position)}"

        async def body() -> tuple[bool, tuple[int, int]]:
            ledger, around = Ledger(self.folder / "ledger.sqlite"), Around(stop_at)
            life = ledger.begin(step=step, now=0.0)
            how = CollectorSettings(
                group_size=1, groups_per_step=self.groups, max_groups=self.groups * self.steps, max_lag=1
            )
            collector = Collector(
                Plays(Sums(self.tasks)), ledger, task_at, self.folder, how, already_consumed=used, life=life
            )
            loop = loop_around(
                *(around, collector, self.learner, RLOO(), ledger, self.folder),
                steps=self.steps,
                groups=self.groups,
                step=step,
                groups_used=used,
            )
            done = await loop.run()
            await collector.close()
            ledger.close()
            return done, around.saved[-1]

        return asyncio.run(body())

    def trained(self) -> list[tuple[int, int, str]]:
        """Step, position and task of everything that counts."""
        with sqlite3.connect(self.folder / "ledger.sqlite") as db:
            return list(db.execute("SELECT step, position, task_id FROM trained WHERE undone = 0 ORDER BY position"))


@pytest.mark.parametrize(("tasks", "groups", "steps"), [(6, 1, 12), (3, 2, 3)], ids=["aligned", "across"])
def test_a_run_stopped_after_any_step_of_two_epochs_goes_on_with_the_same_tasks(
    tmp_path: Path, tasks: int, groups: int, steps: int
) -> None:
    learner = Learner(tiny_llama(), LearnerSettings(lora=LoraSettings(2, 2.0)))
    whole = Run(tmp_path / "whole", learner, tasks, groups, steps)
    assert whole.live() == (True, (steps, steps * groups))
    expected = whole.trained()
    assert [row[:2] for row in expected] == [(1 + i // groups, i) for i in range(steps * groups)]
    for epoch in range(steps * groups // tasks):  # every task once in each
        names = {name for _, position, name in expected if position // tasks == epoch}
        assert names == {f"train-{i}" for i in range(tasks)}
    for stop in range(1, steps):
        broken = Run(tmp_path / f"stopped{stop}", learner, tasks, groups, steps)
        assert broken.live(stop_at=stop) == (False, (stop, stop * groups))
        assert broken.live(stop, stop * groups) == (True, (steps, steps * groups))
        assert broken.trained() == expected


# -- the optimizer -----------------------------------------------------------------------------------------------------

GRADIENTS = (1.0, 0.5, -0.25, 2.0, -0.1, 0.3)


@pytest.mark.parametrize(("kept", "expected"), [(True, 0.559789), (False, 0.529421)])
def test_moments_that_come_back_give_the_weight_of_a_run_that_never_stopped(kept: bool, expected: float) -> None:
    """Without them the weight is another one, so the numbers would show the loss."""
    how = OptimizerSettings(learning_rate=0.1)

    def go_on(weight: torch.nn.Parameter, optimizer: torch.optim.AdamW, gradients: tuple[float, ...]) -> None:
        for gradient in gradients:
            weight.grad = torch.tensor([gradient])
            optimizer.step()

    first = torch.nn.Parameter(torch.tensor([1.0]))
    optimizer = make_optimizer(how, [first])
    go_on(first, optimizer, GRADIENTS[:3])
    saved = moments(optimizer, {"w": first}, lambda tensor: tensor, keep=True)
    second = torch.nn.Parameter(first.detach().clone())
    optimizer = make_optimizer(how, [second])
    if kept:
        load_moments(optimizer, {"w": second}, saved, lambda own, other: own.copy_(other))
    go_on(second, optimizer, GRADIENTS[3:])
    assert second.item() == pytest.approx(expected, abs=1e-6)


def test_a_learner_that_comes_back_is_the_one_that_went_before_its_first_update() -> None:
    how = LearnerSettings(
        lora=LoraSettings(4, 8.0),
        optimizer=OptimizerSettings(
            learning_rate=0.01, schedule="linear", total_steps=10, warmup_steps=2, weight_decay=0.1
        ),
    )
    groups, algorithm = random_groups(np.random.default_rng(0)), RLOO()
    batch = pack(groups, algorithm.credit(groups), 30, algorithm.objective)
    whole, other = Learner(tiny_llama(), how), Learner(tiny_llama(), how, seed=9)
    for _ in range(4):
        whole.update(batch, algorithm)
    other.load_state(whole.state())
    before, after = whole.state(), other.state()
    assert (after.step, other.step) == (before.step, 4)
    assert after.tensors.keys() == before.tensors.keys()
    assert all(torch.equal(after.tensors[name], tensor) for name, tensor in before.tensors.items())
    assert other.settings.optimizer == whole.settings.optimizer
    mine, theirs = other.update(batch, algorithm), whole.update(batch, algorithm)
    assert mine.learning_rate == theirs.learning_rate == pytest.approx(0.006)  # four of ten updates done
    assert other.adapter().digest() == whole.adapter().digest()


# -- the learning rate -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", [{}, {"updates_per_batch": 2}, {"updates_per_batch": 2, "epochs": 2}])
def test_the_rate_that_a_configuration_gives_falls_in_a_line_over_its_updates(
    asked: dict[str, int], tmp_path: Path
) -> None:
    config = parse_config(
        {
            "run": {"steps": 10, "groups_per_step": 4},
            "optimizer": {"learning_rate": 1e-3, "schedule": "linear", "warmup_steps": 0},
            "algorithm": asked,
        },
        "test",
    )
    updates = num_updates(config)
    assert updates == 10 * asked.get("updates_per_batch", 1) * asked.get("epochs", 1)
    optimizer = LearnerPlan.of(config, tmp_path, None, updates).settings.optimizer
    rates = [optimizer.rate_after(done) for done in range(updates)]
    assert rates == pytest.approx([1e-3 * (1 - done / updates) for done in range(updates)])


# -- the summary -------------------------------------------------------------------------------------------------------


def test_the_gap_in_the_summary_is_of_all_lives_of_a_run() -> None:
    first, second = Summary("e", "s", 0), Summary("e", "s", 0)
    first.sampled_gap(0.5, 3.0, 100)
    second.go_on_from(first.counts())
    assert second.as_dict()["sampled_logprob_gap"] == {"mean": 0.5, "max": 3.0}
    second.sampled_gap(0.1, 1.0, 300)
    found = second.as_dict()["sampled_logprob_gap"]
    assert (found["mean"], found["max"]) == (pytest.approx(0.2), 3.0)
    third = Summary("e", "s", 0)
    third.go_on_from(second.counts())
    third.sampled_gap(0.2, 4.0, 1)
    assert third.as_dict()["sampled_logprob_gap"]["max"] == 4.0
    assert third.as_dict()["max_logprob_gap"] is None  # nothing was published in any of them


def test_the_gap_of_the_probes_in_the_summary_is_of_all_lives_of_a_run() -> None:
    def proved(gap: float) -> Proof:
        return Proof(1, "d", 1, "merged", gap, gap, None, 0.0)

    first, second, third = (Summary("e", "s", 0) for _ in range(3))
    first.proofs = [proved(0.2), proved(0.3)]
    second.go_on_from(first.counts())
    second.proofs = [proved(0.1)]
    third.go_on_from(second.counts())
    assert [one.as_dict()["max_logprob_gap"] for one in (first, second, third)] == [0.3, 0.3, 0.3]


def test_a_summary_goes_on_from_a_checkpoint_that_kept_less() -> None:
    older = Summary("e", "s", 0)
    older.go_on_from({"episodes": 7})
    told = older.as_dict()
    assert (told["episodes"], told["sampled_logprob_gap"], told["max_logprob_gap"]) == (7, None, None)


def test_a_taskset_that_has_changed_under_a_run_is_noticed(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    ledger.begin(step=0, now=0.0)

    def task_of(tasks: int, position: int) -> tuple[int, str]:
        index = TaskOrder(tasks, seed=7).index(position)
        return index, f"train-{index}"

    ledger.train(1, [Consumed(position, task_of(6, position)[1], 0, "trained", 1) for position in range(3)])
    check_tasks(ledger, lambda position: task_of(6, position))
    with pytest.raises(IntegrityError, match=r"place \d of the run was task 'train-\d' and is 'train-\d+' now"):
        check_tasks(ledger, lambda position: task_of(20, position))
    ledger.close()
