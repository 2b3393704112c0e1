"""float16: gradients that would vanish or overflow do neither, no batch is lost, and what no scale can mend stops."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from learning_support import random_groups, tiny_llama
from palestra.envs.errors import IntegrityError
from palestra.rl.algorithms.rloo import RLOO
from palestra.rl.batch import Batch, pack
from palestra.rl.learner import Learner, LearnerSettings
from palestra.rl.lora import LoraSettings
from palestra.rl.loss_scale import LossScale
from palestra.rl.ranks import Ranks
from ranks_support import together

SETTINGS = LearnerSettings(lora=LoraSettings(rank=2, alpha=4.0))
MUCH = 2.0**40  # far beyond what float16 holds


def half_learner(ranks: Ranks | None = None, sharding: str = "replicate") -> Learner:
    model = tiny_llama(dtype=torch.float16)
    return Learner(model, replace(SETTINGS, sharding=sharding), ranks=ranks)  # type: ignore[arg-type]


def some_batch(ranks: int = 1) -> Batch:
    groups = random_groups(np.random.default_rng(0))
    credits = [RLOO().advantages(group) for group in groups]
    return pack(groups, credits, 60, RLOO().objective, ranks=ranks)


def test_an_update_in_float16_is_that_in_float32_up_to_rounding() -> None:
    half, full = half_learner(), Learner(tiny_llama(dtype=torch.float32), SETTINGS)
    rough, exact = half.update(some_batch(), RLOO()), full.update(some_batch(), RLOO())
    assert rough.loss == pytest.approx(exact.loss, abs=2e-2)
    assert rough.grad_norm == pytest.approx(exact.grad_norm, rel=5e-2)
    assert all(factors.a.dtype == np.float32 for factors in half.adapter().factors.values())


def test_a_gradient_that_overflows_is_not_applied_and_the_batch_is_computed_again_at_a_lower_scale() -> None:
    learner, steady = half_learner(), half_learner()
    learner._loss_scale = LossScale(MUCH)
    stats, plain = learner.update(some_batch(), RLOO()), steady.update(some_batch(), RLOO())
    assert stats.step == 1
    assert stats.metrics["overflows"] > 3
    assert stats.metrics["loss_scale"] == MUCH / 2 ** stats.metrics["overflows"]
    assert stats.grad_norm == pytest.approx(plain.grad_norm, rel=1e-2)
    state = learner.state()
    other = half_learner()
    other.load_state(state)
    assert other.update(some_batch(), RLOO()).metrics["loss_scale"] == stats.metrics["loss_scale"]


def test_what_overflows_at_every_scale_stops_with_the_weights_as_they_were() -> None:
    learner = half_learner()
    before = learner.adapter().digest()
    learner._loss_scale = LossScale(MUCH, smallest=MUCH / 4)
    with pytest.raises(IntegrityError, match="even at a loss scale of"):
        learner.update(some_batch(), RLOO())
    assert learner.adapter().digest() == before
    assert learner.step == 0


def test_a_loss_that_is_no_number_is_not_for_want_of_range() -> None:
    learner = half_learner()
    with torch.no_grad():
        next(iter(learner._named.values())).fill_(float("nan"))
    with pytest.raises(IntegrityError, match="loss nan"):
        learner.update(some_batch(), RLOO())
    assert learner._loss_scale is not None
    assert learner._loss_scale.overflows == 0


def test_the_scale_grows_after_enough_updates_without_overflow() -> None:
    scale = LossScale(8.0, growth_updates=3)
    for _ in range(3):
        scale.worked()
    assert (scale.value, scale.good) == (16.0, 0)
    scale.worked()
    scale.overflowed(5)
    assert (scale.value, scale.good, scale.overflows) == (8.0, 0, 1)


def overflowing(ranks: Ranks, sharding: str) -> tuple[float, float, float]:
    learner = half_learner(ranks, sharding)
    learner._loss_scale = LossScale(MUCH)
    stats = learner.update(some_batch(ranks.size), RLOO())
    return stats.metrics["loss_scale"], stats.metrics["overflows"], stats.grad_norm


def test_ranks_lower_the_scale_together(tmp_path: Path) -> None:
    for sharding in ("replicate", "shard"):
        one, two = together(2, overflowing, tmp_path / sharding, sharding)
        assert one == two
        assert one[1] > 3
