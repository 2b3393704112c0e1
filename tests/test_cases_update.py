"""What an update must not depend on, and what a step of the loop does when there is nothing, or too much, to learn."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from episodes import TASK, engine, episode
from learning_support import group, random_groups, rewarded, sample, tiny_llama, trajectory
from loop_support import Around, loop_around
from palestra.envs.errors import IntegrityError
from palestra.envs.types import Message
from palestra.rl.algorithms.base import Algorithm, Measured
from palestra.rl.algorithms.dr_grpo import DrGRPO
from palestra.rl.algorithms.gigpo import GiGPO
from palestra.rl.algorithms.grpo import GRPO
from palestra.rl.algorithms.outcome_turn import OutcomeTurn
from palestra.rl.algorithms.rloo import RLOO
from palestra.rl.algorithms.turn_return import TurnReturn
from palestra.rl.batch import Batch, pack
from palestra.rl.counted import Counting
from palestra.rl.critic import CriticSettings
from palestra.rl.gather import Gathered
from palestra.rl.learner import Learner, LearnerSettings
from palestra.rl.ledger import Ledger
from palestra.rl.lora import LoraSettings
from palestra.rl.objective import Objective
from palestra.rl.optimizer import OptimizerSettings
from palestra.rl.step import Practice, learn
from palestra.rl.step_metrics import learning_metrics, rollout_metrics
from palestra.rollout.budgets import Budgets
from palestra.rollout.renderer import Renderer
from palestra.rollout.types import Finish, Group
from tokenizer_kinds import KINDS
from toy_environment import Speech
from turn_support import played

PLAIN = RLOO(Objective(correction=None))


def learner(rate: float = 1e-2, critic: CriticSettings | None = None) -> Learner:
    how = OptimizerSettings(learning_rate=rate, max_grad_norm=1e9)
    return Learner(tiny_llama(), LearnerSettings(lora=LoraSettings(4, 8.0), optimizer=how, critic=critic))


def batch_of(groups: list[Group], tokens: int = 256, algorithm: Algorithm = PLAIN) -> Batch:
    return pack(groups, algorithm.credit(groups), tokens, algorithm.objective)


# -- attempts that never got to act ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        (GiGPO(step_weight=0.0), [1.0, 0.0]),
        (OutcomeTurn(std="none"), [1.0, 0.0]),
        (TurnReturn(turn_baseline="mean"), [1.0, 0.0]),
        (TurnReturn(), [1.5, 0.0]),
        (RLOO(), [1.5, 0.0]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_attempt_that_never_got_to_act_is_in_the_baseline_with_its_outcome(
    algorithm: Algorithm, expected: list[float]
) -> None:
    attempts = [played("a", [2, 1], 1.0, states=["s", "u"]), played("b", [1, 1], 0.0, states=["s", "u"])]
    full = replace(trajectory("full", [sample([5, 5], [0, 0])], -1.0), turns=())
    measured = Measured(penalties=((np.zeros(3), np.zeros(2), np.zeros(0)),))
    for given in (None, measured):
        first, second, nothing = algorithm.credit([group("g", [*attempts, full])], given)[0].advantages
        assert nothing is not None
        assert nothing.size == 0
        for stream, value in zip((first, second), expected, strict=True):
            assert stream is not None
            assert stream[-1] == pytest.approx(value)


# -- gradients that were left behind -----------------------------------------------------------------------------------


def failing_at(learner_: Learner, row: int) -> Callable[[], None]:
    """Makes the model run out of memory at this call, counted from 0. Returns what ends that."""
    calls = 0

    def fail(*_: object) -> None:
        nonlocal calls
        calls += 1
        if calls == row + 1:
            raise torch.OutOfMemoryError("once")

    return learner_._model.get_input_embeddings().register_forward_pre_hook(fail).remove


@pytest.mark.parametrize("row", [0, 1, 2])
def test_an_update_that_failed_half_way_leaves_nothing_for_the_next_one(row: int) -> None:
    groups = random_groups(np.random.default_rng(0))
    batch, other = batch_of(groups, 20), batch_of(random_groups(np.random.default_rng(1)), 20)
    assert len(batch.rows) > 2
    clean, made = learner(), learner()
    before = made.adapter().digest()
    heal = failing_at(made, row)
    with pytest.raises(torch.OutOfMemoryError):
        made.update(other, PLAIN)
    heal()
    assert made.adapter().digest() == before
    assert made.update(batch, PLAIN).grad_norm == clean.update(batch, PLAIN).grad_norm
    assert made.adapter().digest() == clean.adapter().digest()


def test_nothing_is_left_for_the_critic_either() -> None:
    groups = random_groups(np.random.default_rng(0))
    batch = batch_of(groups, 20)
    rows = []
    for row in batch.rows:
        ones = np.ones(len(row.actions))
        asked = replace(row.actions, returns=ones, old_values=0 * ones, value_weights=ones / batch.num_actions)
        rows.append(replace(row, actions=asked))
    batch = replace(batch, rows=tuple(rows))
    clean, made = (learner(critic=CriticSettings()) for _ in range(2))
    heal = failing_at(made, 1)
    with pytest.raises(torch.OutOfMemoryError):
        made.update(batch, PLAIN)
    heal()
    norms = [one.update(batch, PLAIN).metrics["value_grad_norm"] for one in (clean, made)]
    assert norms[0] == norms[1] > 0


# -- end tokens and truncation -----------------------------------------------------------------------------------------


class SaysOnce(Speech):
    """Over after one turn of the policy, whatever it says."""

    def __init__(self) -> None:
        super().__init__(TASK)

    async def start(self) -> tuple[Message, ...]:
        return TASK.prompt


def test_the_truncated_rate_knows_every_end_token() -> None:
    renderer = Renderer(KINDS["byte-level"](), [1, 2])
    made = [
        episode(engine([ids]), budgets=Budgets(steps=1, turn_tokens=3), renderer=renderer, world=SaysOnce())
        for ids in ([5, 6, 2], [5, 6, 7])
    ]
    assert [one.turns[0].finish for one in made] == [Finish.STOP, Finish.LENGTH]
    assert [one.sampled_tokens for one in made] == [3, 3]
    metrics = rollout_metrics(Gathered((Group("g0", TASK.id, tuple(made)),), ("used",)), Counting(), 0)
    assert metrics["rollout/truncated"] == 0.5


# -- observation tokens ------------------------------------------------------------------------------------------------


def near_sighted() -> Learner:
    """Each token is predicted from the one before it alone, so that more context changes no prediction."""
    model = tiny_llama()
    for layer in model.model.layers:
        torch.nn.init.zeros_(layer.self_attn.v_proj.weight)
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
    return Learner(model, LearnerSettings(lora=LoraSettings(4, 8.0), optimizer=OptimizerSettings(max_grad_norm=1e9)))


def observing(tokens: int) -> list[Group]:
    """Two attempts with so many tokens of observation between two actions, and behind the last one."""
    mask = [0, 1, 1, *[0] * tokens, 1, 1, 1, *[0] * tokens]
    rows = [sample([*range(7, 10), *[11 + i] * tokens, 13, 14, 15, *[11] * tokens], mask) for i in range(2)]
    return [group("g0", [trajectory(f"t{i}", [row], float(i)) for i, row in enumerate(rows)])]


@pytest.mark.parametrize("algorithm", [PLAIN, GRPO(), DrGRPO.with_horizon(64)])
def test_a_hundred_more_observation_tokens_change_neither_loss_nor_gradient(algorithm: Algorithm) -> None:
    short, long = near_sighted(), near_sighted()
    here = short.update(batch_of(observing(6), 512, algorithm), algorithm)
    there = long.update(batch_of(observing(106), 512, algorithm), algorithm)
    assert there.row_tokens >= here.row_tokens + 200
    assert there.loss == pytest.approx(here.loss, rel=1e-9, abs=1e-12)
    assert here.grad_norm > 0
    assert there.grad_norm == pytest.approx(here.grad_norm, rel=1e-9)
    for name, factors in short.adapter().factors.items():
        np.testing.assert_allclose(long.adapter().factors[name].b, factors.b, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("between", [6, 106])
def test_the_denominator_counts_sampled_tokens_alone(between: int) -> None:
    """Four sampled tokens of loss 1 each are a loss of 1, with 6 or 106 tokens of observation between them."""
    mask = [0, 1, 1, *[0] * between, 1, 1]
    rows = [trajectory(f"t{i}", [sample([5] * len(mask), mask)], reward) for i, reward in enumerate((1.0, 0.0))]
    actions = batch_of([group("g", rows)], 512).actions()
    np.testing.assert_allclose(actions.weights, 1 / 8)


# -- nothing to learn --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", [PLAIN, GRPO(), DrGRPO.with_horizon(64)])
def test_groups_without_a_difference_are_counted_and_do_not_weaken_the_others(algorithm: Algorithm) -> None:
    flat, telling = rewarded("g0", [1.0] * 4, [3, 4, 5, 6]), rewarded("g1", [1.0, 0.0], [3, 5])
    credit = algorithm.credit([flat])[0]
    assert all(stream is not None and not stream.any() for stream in credit.advantages)
    both, alone = learner(), learner()
    learned = learn(both, algorithm, [flat, telling], Counting(), Practice(256))
    assert learning_metrics(learned, [])["rollout/groups_without_signal"] == 1
    assert learned.action_tokens == 8
    expected = learn(alone, algorithm, [telling], Counting(), Practice(256))
    assert learned.updates[0].grad_norm == pytest.approx(expected.updates[0].grad_norm, rel=1e-9)


def test_without_signal_and_without_a_kl_nothing_moves_and_with_it_the_kl_falls() -> None:
    flat = [rewarded("g0", [1.0, 1.0], [8, 9])]

    def drifted() -> Learner:
        made, telling = learner(5e-3), batch_of([rewarded("g1", [1.0, 0.0], [8, 9])])
        for _ in range(5):
            made.update(telling, PLAIN)
        return made

    still = drifted()
    before, step = still.adapter().digest(), still.step
    for _ in range(20):
        assert learn(still, PLAIN, flat, Counting(), Practice(256)).updates == ()
    assert (still.adapter().digest(), still.step) == (before, step)
    for kind in ("k2", "k3"):
        algorithm, made = RLOO(Objective(correction=None, kl=kind, kl_coefficient=0.1)), drifted()  # type: ignore[arg-type]
        updates = [learn(made, algorithm, flat, Counting(), Practice(256)).updates[0] for _ in range(20)]
        kls = [update.metrics["kl_to_reference"] for update in updates]
        assert 0 < kls[-1] < 0.8 * kls[0]


# -- an update that is refused -----------------------------------------------------------------------------------------


class Taken:
    """A collector that has these groups."""

    def __init__(self, groups: list[Group]) -> None:
        self.groups, self.version = groups, 0

    async def take(self, count: int, *, replacing: bool = False) -> list[Group]:
        return self.groups


@pytest.mark.parametrize("updates", [1, 2])
def test_an_update_that_is_refused_is_neither_published_nor_saved_nor_recorded(updates: int, tmp_path: Path) -> None:
    """A reward beyond single precision makes the loss infinite; with two updates the other one is a good one."""
    taken = Taken([rewarded("g0", [1e300, 0.0], [3, 4]), rewarded("g1", [1.0, 0.0], [3, 4])])
    made, around, ledger = learner(), Around(), Ledger(tmp_path / "ledger.sqlite")
    ledger.begin(step=0, now=0.0)
    before = made.adapter().digest()
    practice = Practice(64, updates_per_batch=updates)
    loop = loop_around(around, taken, made, PLAIN, ledger, tmp_path, groups=2, practice=practice)
    with pytest.raises(IntegrityError, match="the weights were left as they are"):
        asyncio.run(loop.run())
    assert (around.published, around.saved, around.lines) == ([], [], [])
    assert (loop.step, loop.groups_used, taken.version) == (0, 0, 0)
    assert ledger.totals() == {}
    if updates == 1:
        assert made.adapter().digest() == before
