"""The learner: one step, its bookkeeping, and that nothing moves that should not."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from learning_support import exact_llama, random_groups, rewarded, sample, tiny_gpt2, tiny_llama, trajectory
from palestra.envs.errors import ConfigError, IntegrityError
from palestra.rl.aggregation import Aggregation
from palestra.rl.algorithms.grpo import GRPO
from palestra.rl.algorithms.rloo import RLOO
from palestra.rl.batch import Batch, pack
from palestra.rl.imitation import Imitation, imitate, imitation_batch
from palestra.rl.learner import Learner, LearnerSettings
from palestra.rl.learner_plan import LearnerPlan
from palestra.rl.load_config import parse_config
from palestra.rl.loop_settings import num_updates
from palestra.rl.lora import LoraSettings
from palestra.rl.objective import Objective
from palestra.rl.optimizer import OptimizerSettings
from palestra.rl.surrogates import PPOClip
from palestra.rollout.adapters import Adapter, Factors
from palestra.rollout.types import Group

FAST = OptimizerSettings(learning_rate=0.02, max_grad_norm=1e9)
LORA = LearnerSettings(lora=LoraSettings(rank=4, alpha=8.0), optimizer=FAST)
FULL = LearnerSettings(train="full", optimizer=FAST)
NO_CORRECTION = RLOO(Objective(correction=None))


def learner(settings: LearnerSettings = LORA, dtype: torch.dtype = torch.float64, **facts: Any) -> Learner:
    return Learner(tiny_llama(dtype=dtype), settings, **facts)


def batch_of(groups: list[Group], tokens: int = 200, algorithm: RLOO | GRPO = NO_CORRECTION, ranks: int = 1) -> Batch:
    return pack(groups, [algorithm.advantages(g) for g in groups], tokens, algorithm.objective, ranks=ranks)


def some_batch(seed: int = 0, tokens: int = 200, algorithm: RLOO | GRPO = NO_CORRECTION) -> Batch:
    return batch_of(random_groups(np.random.default_rng(seed)), tokens, algorithm)


def nonzero(adapter: Adapter, seed: int = 0) -> Adapter:
    rng = np.random.default_rng(seed)
    return Adapter(
        {
            name: Factors(f.a, (0.3 * rng.standard_normal(f.b.shape)).astype(np.float32), f.scale)
            for name, f in adapter.factors.items()
        }
    )


def weights(adapter: Adapter) -> np.ndarray:
    return np.concatenate([part.ravel() for _, f in sorted(adapter.factors.items()) for part in (f.a, f.b)])


def test_the_first_step_has_ratio_one_exactly_and_a_gradient() -> None:
    for dtype in (torch.float64, torch.float32):
        stats = learner(dtype=dtype).update(some_batch(), NO_CORRECTION)
        assert stats.metrics["ratio_mean"] == stats.metrics["ratio_max"] == 1.0
        assert stats.metrics["clip_low_fraction"] == stats.metrics["clip_high_fraction"] == 0.0
        assert stats.grad_norm > 0
        assert stats.step == 1


def test_the_first_step_has_ratio_one_with_dropout_in_the_model() -> None:
    model = tiny_gpt2(dtype=torch.float32)
    assert model.config.resid_pdrop > 0
    stats = Learner(model, LORA).update(some_batch(), NO_CORRECTION)
    assert stats.metrics["ratio_max"] == 1.0


def test_only_the_adapter_moves() -> None:
    model = tiny_llama()
    made = Learner(model, LORA)
    before = {name: p.clone() for name, p in model.named_parameters()}
    made.update(some_batch(), NO_CORRECTION)
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved
    assert all("lora_" in name for name in moved)


def test_a_better_rewarded_trajectory_becomes_more_likely() -> None:
    made = learner()
    groups = random_groups(np.random.default_rng(2), groups=1, per_group=2)
    batch = batch_of(groups)
    before = made.sampled_logprobs(batch)
    for _ in range(3):
        made.update(batch, NO_CORRECTION)
    gain = made.sampled_logprobs(batch) - before
    assert gain[batch.actions().advantages > 0].mean() > 0 > gain[batch.actions().advantages < 0].mean()


@pytest.mark.parametrize("settings", [LORA, FULL], ids=["lora", "full"])
def test_micro_batching_does_not_change_the_step(settings: LearnerSettings) -> None:
    def after(tokens: int) -> tuple[float, float, np.ndarray]:
        made = learner(settings)
        stats = made.update(some_batch(tokens=tokens), NO_CORRECTION)
        state = made.state()
        return (
            stats.loss,
            stats.grad_norm,
            np.concatenate(
                [t.double().numpy().ravel() for k, t in sorted(state.tensors.items()) if k.startswith("exp_avg/")]
            ),
        )

    one = after(10_000)
    for tokens in (1, 25, 60):
        many = after(tokens)
        assert many[:2] == pytest.approx(one[:2], rel=1e-9)
        np.testing.assert_allclose(many[2], one[2], atol=1e-9)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 1000), tokens=st.integers(1, 120), order=st.randoms(use_true_random=False))
def test_neither_micro_batching_nor_the_order_of_groups_changes_loss_or_norm(
    seed: int, tokens: int, order: random.Random
) -> None:
    groups = random_groups(np.random.default_rng(seed), groups=3)
    algorithm = RLOO(Objective(correction=None, aggregation=Aggregation("prompt-mean-token-mean")))
    one = Learner(exact_llama(), LORA).update(batch_of(groups, 10_000, algorithm), algorithm)
    order.shuffle(groups)
    many = Learner(exact_llama(), LORA).update(batch_of(groups, tokens, algorithm), algorithm)
    assert (many.loss, many.grad_norm) == pytest.approx((one.loss, one.grad_norm), rel=1e-9, abs=1e-12)


def test_gradient_checkpointing_changes_nothing_but_memory() -> None:
    found = []
    for checkpointing in (False, True):
        made = Learner(tiny_gpt2(), replace(LORA, gradient_checkpointing=checkpointing))
        stats = made.update(some_batch(), NO_CORRECTION)
        found.append((stats.loss, stats.grad_norm, weights(made.adapter())))
    assert found[0][:2] == pytest.approx(found[1][:2], rel=1e-12)
    np.testing.assert_allclose(found[0][2], found[1][2], atol=1e-7)


def test_tied_embeddings_get_both_gradients_in_full_training() -> None:
    model = tiny_llama(tie=True)
    made = Learner(model, FULL)
    batch = some_batch()
    row = batch.rows[0]
    reference = tiny_llama(tie=True)
    reference.set_attn_implementation("sdpa")
    total = torch.zeros((), dtype=torch.float64)
    for start, end in zip(row.boundaries[:-1], row.boundaries[1:], strict=True):
        logits = reference(input_ids=torch.from_numpy(row.ids[None, start:end]), use_cache=False).logits[0]
        mine = np.flatnonzero((row.predictors >= start) & (row.predictors < end))
        tempered = logits[row.predictors[mine] - start] / torch.from_numpy(row.actions.temperature[mine])[:, None]
        logp = torch.log_softmax(tempered, -1)[torch.arange(len(mine)), torch.from_numpy(row.actions.targets[mine])]
        scale = torch.from_numpy(row.actions.weights[mine] * row.actions.advantages[mine])
        total = total - (scale * torch.exp(logp - logp.detach())).sum()
    total.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in reference.parameters() if p.grad is not None])
    stats = made.update(batch, NO_CORRECTION)
    assert stats.grad_norm == pytest.approx(float(norm), rel=1e-9)
    assert stats.loss == pytest.approx(float(total.detach()), rel=1e-9)


def test_trainer_log_probabilities_agree_with_a_plain_forward_of_base_plus_adapter() -> None:
    made = learner()
    adapter = nonzero(made.adapter())
    started = learner(start=adapter)
    ids = [3, 4, 5, 6, 7, 8, 9]
    plain = tiny_llama()
    with torch.no_grad():
        for name, factors in adapter.factors.items():
            layer = plain.get_submodule(name)
            layer.weight += torch.from_numpy(
                factors.scale * factors.b.astype(np.float64) @ factors.a.astype(np.float64)
            )
        logits = plain(torch.tensor([ids])).logits[0, :-1]
    expected = torch.log_softmax(logits, -1)[torch.arange(6), torch.tensor(ids[1:])]
    np.testing.assert_allclose(started.score(ids), expected, atol=1e-6)
    assert np.abs(made.score(ids) - started.score(ids)).max() > 1e-3


def test_an_adapter_goes_out_and_comes_back_unchanged() -> None:
    made = learner()
    made.update(some_batch(), NO_CORRECTION)
    adapter = made.adapter()
    assert learner(start=adapter).adapter().digest() == adapter.digest()
    assert len(adapter.factors) == 2 * 7
    assert "model.layers.0.self_attn.q_proj" in adapter.factors
    assert adapter.factors["model.layers.0.self_attn.q_proj"].scale == 2.0
    copy = weights(adapter).copy()
    made.update(some_batch(1), NO_CORRECTION)
    assert np.array_equal(weights(adapter), copy)  # handed over means not edited any more


def test_an_adapter_of_another_shape_is_refused() -> None:
    adapter = learner().adapter()
    other = replace(LORA, lora=LoraSettings(rank=2, alpha=8.0))
    with pytest.raises(ConfigError, match="rank"):
        learner(other, start=adapter)
    name = next(iter(adapter.factors))
    with pytest.raises(ConfigError, match="differ in 1 modules"):
        learner(start=Adapter({key: value for key, value in adapter.factors.items() if key != name}))


def test_rank_stabilised_adapters_say_their_scale() -> None:
    made = learner(replace(LORA, lora=LoraSettings(rank=4, alpha=8.0, rank_stabilised=True)))
    assert {f.scale for f in made.adapter().factors.values()} == {4.0}


def test_the_reference_is_the_adapter_that_training_started_from() -> None:
    algorithm = RLOO(Objective(correction=None, kl_coefficient=0.1))
    fresh = learner()
    start = nonzero(fresh.adapter())
    for made in (fresh, learner(start=start)):
        first = made.update(some_batch(algorithm=algorithm), algorithm)
        assert first.metrics["kl_to_reference"] == pytest.approx(0.0, abs=1e-12)
        moved = made.update(some_batch(1, algorithm=algorithm), algorithm)
        assert moved.metrics["kl_to_reference"] > 1e-6


def test_without_signal_a_kl_pulls_back_and_nothing_else_moves() -> None:
    start = nonzero(learner().adapter())
    flat = [rewarded("g", [1.0, 1.0], [8, 9])]

    def drift(coefficient: float) -> list[float]:
        algorithm = RLOO(Objective(correction=None, kl="k2", kl_coefficient=coefficient))
        made = learner()
        # the fresh adapter is the reference; the weights are then moved away from it
        state = made.state()
        tensors = dict(learner(start=start).state().tensors)
        made.load_state(replace(state, tensors=tensors))
        batch = batch_of(flat, algorithm=algorithm)
        return [made.update(batch, algorithm).metrics["kl_to_reference"] for _ in range(5)]

    falling = drift(0.1)
    assert falling[-1] < falling[0]


def test_the_entropy_bonus_raises_the_entropy() -> None:
    algorithm = RLOO(Objective(correction=None, entropy_coefficient=1.0))
    made = learner(replace(LORA, optimizer=replace(FAST, learning_rate=0.002)))
    batch = batch_of([rewarded("g", [1.0, 1.0], [8, 9])], algorithm=algorithm)
    entropies = [made.update(batch, algorithm).metrics["entropy"] for _ in range(4)]
    assert entropies == sorted(entropies)
    assert entropies[-1] > entropies[0]


def test_a_gradient_that_is_not_finite_stops_the_run_with_the_weights_untouched() -> None:
    made = learner()
    batch = some_batch()
    broken = replace(
        batch.rows[0], actions=replace(batch.rows[0].actions, weights=np.full(len(batch.rows[0].predictors), np.inf))
    )
    before = made.adapter().digest()
    with pytest.raises(IntegrityError, match="weights were left"):
        made.update(replace(batch, rows=(broken,)), NO_CORRECTION)
    assert made.adapter().digest() == before
    assert made.step == 0
    assert made.update(batch, NO_CORRECTION).grad_norm < float("inf")  # nothing of it is left in the gradients


def test_a_batch_without_signal_is_refused() -> None:
    with pytest.raises(ValueError, match="skip the step"):
        learner().update(batch_of([rewarded("g", [1.0, 1.0])]), NO_CORRECTION)


def test_the_norm_is_logged_before_clipping_and_clipping_bounds_the_step() -> None:
    loose, tight = (
        learner(replace(LORA, optimizer=replace(FAST, max_grad_norm=norm))).update(some_batch(), NO_CORRECTION)
        for norm in (1e9, 1e-3)
    )
    assert loose.grad_norm == pytest.approx(tight.grad_norm)
    assert tight.grad_norm > 1e-3


def test_the_learning_rate_moves_once_per_update_whatever_the_micro_batches() -> None:
    linear = OptimizerSettings(learning_rate=1.0, schedule="linear", total_steps=10)
    assert linear.rate_after(4) == pytest.approx(0.6)
    warm = OptimizerSettings(learning_rate=1.0, warmup_steps=4)
    assert [warm.rate_after(step) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    cosine = OptimizerSettings(learning_rate=1.0, schedule="cosine", total_steps=10)
    assert [cosine.rate_after(step) for step in (0, 5, 10, 99)] == pytest.approx([1.0, 0.55, 0.1, 0.1])
    made = learner(replace(LORA, optimizer=replace(linear, learning_rate=0.01)))
    rates = [made.update(some_batch(tokens=5), NO_CORRECTION).learning_rate for _ in range(3)]
    assert rates == pytest.approx([0.01, 0.009, 0.008])


def test_a_linear_schedule_falls_over_all_updates_of_the_run() -> None:
    """Update k of n has 1 - k / n, where n counts every optimiser step that batches serve."""
    for algorithm, updates in (({}, 10), ({"updates_per_batch": 2, "epochs": 3}, 60)):
        config = parse_config(
            {
                "run": {"steps": 10},
                "optimizer": {"schedule": "linear", "warmup_steps": 0, "learning_rate": 1.0},
                "algorithm": algorithm,
            },
            "run.toml",
        )
        assert num_updates(config) == updates
        rates = LearnerPlan.of(config, Path("."), None, num_updates(config)).settings.optimizer
        found = [rates.rate_after(k) for k in range(updates)]
        assert found == pytest.approx([1 - k / updates for k in range(updates)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("how", [LORA, FULL], ids=["lora", "full"])
def test_resuming_is_the_same_as_never_having_stopped(how: LearnerSettings, dtype: torch.dtype) -> None:
    unbroken = learner(how, dtype)
    for seed in range(5):
        unbroken.update(some_batch(seed), NO_CORRECTION)
    stopped = learner(how, dtype)
    for seed in range(3):
        stopped.update(some_batch(seed), NO_CORRECTION)
    resumed = learner(how, dtype, seed=99)
    resumed.load_state(stopped.state())
    for seed in (3, 4):
        resumed.update(some_batch(seed), NO_CORRECTION)
    ours, theirs = resumed.state(), unbroken.state()
    assert ours.step == theirs.step == 5
    assert ours.tensors.keys() == theirs.tensors.keys()
    for key, tensor in ours.tensors.items():
        assert torch.equal(tensor, theirs.tensors[key]), key


def test_the_state_of_other_parameters_is_refused() -> None:
    with pytest.raises(ConfigError, match="trains full"):
        learner().load_state(learner(FULL).state())


def test_bypass_trains_against_the_sampled_log_probabilities() -> None:
    algorithm = RLOO(Objective(PPOClip(0.2, 0.2, None), None, mode="bypass"))
    stats = learner().update(some_batch(algorithm=algorithm), algorithm)
    assert stats.metrics["ratio_max"] > 1.0
    assert stats.metrics["clip_low_fraction"] + stats.metrics["clip_high_fraction"] > 0


def test_sampled_log_probabilities_are_those_at_the_sampling_temperature() -> None:
    made = learner()
    batch = some_batch()
    row = batch.rows[0]
    found = made.sampled_logprobs(batch)
    cold = replace(row, actions=replace(row.actions, temperature=np.ones_like(row.actions.temperature)))
    other = made.sampled_logprobs(replace(batch, rows=(cold,)))
    tempered = row.actions.temperature != 1.0
    assert np.array_equal(found[~tempered], other[~tempered])
    assert not np.allclose(found[tempered], other[tempered])


def test_imitation_copies_scripted_episodes_that_have_no_log_probabilities() -> None:
    rows = [
        sample([3, 4, 5, 6, 7], [0, 1, 1, 0, 1], logprobs=[float("nan")] * 5, temperature=float("nan"))
        for _ in range(4)
    ]
    episodes = [trajectory(f"t{i}", [row], 1.0) for i, row in enumerate(rows)]
    how = Imitation(epochs=10, trajectories_per_step=3)
    made = learner(FULL)
    stats = imitate(made, episodes, how, random.Random(0))
    assert len(stats) == how.num_updates(4) == 20
    assert stats[-1].loss < 0.2 < stats[0].loss
    assert "log_rho_abs_mean" not in stats[0].metrics


def test_the_imitation_loss_is_the_mean_negative_log_probability_of_the_sampled_tokens() -> None:
    episodes = [trajectory("t", [sample([3, 4, 5, 6, 7], [0, 1, 1, 0, 1])], None)]
    made = learner()
    batch = imitation_batch(episodes, Imitation())
    scores = made.score([3, 4, 5, 6, 7])[[0, 1, 3]]
    assert made.update(batch, Imitation()).loss == pytest.approx(-scores.mean(), abs=1e-6)


def test_full_training_needs_full_precision() -> None:
    with pytest.raises(ConfigError, match="float32"):
        learner(FULL, torch.bfloat16)


def test_a_bfloat16_base_trains_a_float32_adapter() -> None:
    made = learner(dtype=torch.bfloat16)
    stats = made.update(some_batch(), NO_CORRECTION)
    assert np.isfinite(stats.grad_norm)
    assert all(t.dtype == torch.float32 for key, t in made.state().tensors.items() if key.startswith("weight/"))
