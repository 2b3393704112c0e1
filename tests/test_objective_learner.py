"""Every objective through the real learner on a tiny model: as configured, in any packing, over several updates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from learning_support import random_groups, tiny_llama
from palestra.envs.errors import ConfigError
from palestra.rl.algorithms.make import make_algorithm
from palestra.rl.batch import Batch, pack
from palestra.rl.learner import Learner, LearnerSettings
from palestra.rl.load_config import load_config
from palestra.rl.lora import LoraSettings
from palestra.rl.optimizer import OptimizerSettings
from palestra.rl.settings_algorithm import AlgorithmSettings
from palestra.rl.step import freezes

CHOICES: list[dict[str, Any]] = [
    {},
    {"surrogate": "cispo_two_sided"},
    {"surrogate": "cispo_upper", "cispo_max_ratio": 5.0, "ratio": "turn"},
    {"surrogate": "importance_sampling", "mode": "decoupled", "correction": "seq_tis"},
    {"surrogate": "dppo_tv", "mode": "bypass", "correction": "none"},
    {
        "surrogate": "dppo_kl",
        "mode": "decoupled",
        "correction": "icepop",
        "correction_low": 0.01,
        "correction_high": 99,
    },
    {"ratio": "sequence", "aggregation": "traj-mean-token-mean", "mode": "decoupled"},
    {"mode": "decoupled_loglinear", "correction": "turn_geo_mask", "correction_low": 0.01, "correction_high": 99.0},
    {"mode": "decoupled", "correction": "opsm", "opsm_delta": 0.1, "kl": "k3_is", "kl_coefficient": 0.1},
    {"kl": "k2", "kl_coefficient": 0.1, "entropy_coefficient": 0.01},
    {"aggregation": "seq-mean-token-sum-norm", "correction": "turn_tis"},
]


def fresh_learner(model: PreTrainedModel | None = None) -> Learner:
    optimizer = OptimizerSettings(learning_rate=0.02, max_grad_norm=1e9)
    return Learner(model or tiny_llama(), LearnerSettings(lora=LoraSettings(rank=4, alpha=8.0), optimizer=optimizer))


def batch_of(algorithm: Any, tokens: int) -> Batch:
    groups = random_groups(np.random.default_rng(5))
    return pack(groups, algorithm.credit(groups), tokens, algorithm.objective)


@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: " ".join(f"{v}" for v in choice.values()) or "default")
def test_two_updates_are_the_same_in_any_packing(choice: dict[str, Any]) -> None:
    algorithm = make_algorithm(AlgorithmSettings(**choice), budget_tokens=64)
    found = []
    for tokens in (64, 4096):
        learner, batch = fresh_learner(), batch_of(algorithm, tokens)
        old = learner.sampled_logprobs(batch) if freezes(algorithm.objective, 2) else None
        found.append([learner.update(batch, algorithm, old) for _ in range(2)])
        assert len(batch.rows) > 1 or tokens > 64
    for small, large in zip(*found, strict=True):
        assert 0 < small.grad_norm < float("inf")
        assert small.loss == pytest.approx(large.loss, rel=1e-5)
        assert small.grad_norm == pytest.approx(large.grad_norm, rel=1e-5)
        assert small.metrics == pytest.approx(large.metrics, rel=1e-4, abs=1e-6)
    first, second = found[0]
    assert first.metrics["staleness_max"] == 0.0  # the tokens are of version 0, and so is the learner
    assert second.metrics["staleness_mean"] == 1.0
    if algorithm.objective.mode in ("on_policy", "decoupled"):
        assert first.metrics["ratio_max"] == pytest.approx(1.0, abs=1e-5)
        assert second.metrics["ratio_max"] > 1.0 + 1e-4


def test_a_kl_in_the_reward_costs_the_update_no_reference_pass() -> None:
    algorithm = make_algorithm(AlgorithmSettings(kl="reward_k1", kl_coefficient=0.1, name="reinforce_pp"), 64)
    model = tiny_llama()
    learner, batch = fresh_learner(model), batch_of(algorithm, 4096)
    calls: list[torch.Size] = []
    handle = model.get_input_embeddings().register_forward_hook(
        lambda module, inputs, output: calls.append(output.shape)
    )
    stats = learner.update(batch, algorithm)
    handle.remove()
    assert len(calls) == len(batch.rows)
    assert "kl_to_reference" not in stats.metrics


def test_reinforce_cannot_use_a_batch_twice(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text("[algorithm]\nname = 'reinforce'\nepochs = 2", encoding="utf-8")
    with pytest.raises(ConfigError, match="importance_sampling"):
        load_config(path, [])
