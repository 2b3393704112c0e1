"""Rows, groups, golden cases and small models for the tests of the learning layer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from palestra.envs.types import NoVerdict, Scored
from palestra.rollout.types import Group, Sample, TerminatedBy, Trajectory

GOLDEN = Path(__file__).parent / "golden"
POISONS = (float("nan"), 1e30, float("-inf"))


def golden(file: str) -> dict[str, Any]:
    """Cases of one golden file by their id."""
    return {case["id"]: case for case in json.loads((GOLDEN / f"{file}.json").read_text())["cases"]}


def shared_batch() -> dict[str, Any]:
    """The batch that most golden cases use; null is poison."""
    batch: dict[str, Any] = json.loads((GOLDEN / "policy.json").read_text())["shared_batch"]
    return batch


def poisoned(rows: Sequence[Sequence[float | None]], poison: float) -> np.ndarray:
    """A golden table with its nulls replaced."""
    return np.array([[poison if value is None else value for value in row] for row in rows], dtype=np.float64)


def sample(
    ids: Sequence[int],
    mask: Sequence[int],
    *,
    logprobs: Sequence[float] | None = None,
    temperature: float = 1.0,
    poison: float = float("nan"),
    turn: Sequence[int] | None = None,
) -> Sample:
    """A row whose unsampled places are poisoned."""
    sampled = np.array(mask, dtype=bool)
    values = np.full(len(ids), -1.0) if logprobs is None else np.array(logprobs)
    turns = np.zeros(len(ids), int) if turn is None else np.array(turn)
    return Sample(
        ids=np.array(ids, np.int32),
        sampled=sampled,
        logprobs=np.where(sampled, values, poison).astype(np.float32),
        temperature=np.where(sampled, temperature, poison).astype(np.float32),
        version=np.where(sampled, 0, -1).astype(np.int32),
        turn=np.where(sampled, turns, -1).astype(np.int16),
    )


def trajectory(name: str, samples: Sequence[Sample], reward: float | None) -> Trajectory:
    """An episode of these rows; no reward: it could not be judged."""
    return Trajectory(
        id=name,
        task_id="task",
        group_id="group",
        seed=0,
        messages=(),
        turns=(),
        samples=tuple(samples),
        terminated_by=TerminatedBy.DONE,
        verdict=NoVerdict("no judge") if reward is None else Scored(reward),
    )


def group(name: str, trajectories: Sequence[Trajectory]) -> Group:
    """Trajectories of one task."""
    return Group(name, "task", tuple(trajectories))


def rewarded(name: str, rewards: Sequence[float | None], tokens: Sequence[int] | None = None) -> Group:
    """A group of one-row trajectories with these rewards, of `tokens` sampled tokens each."""
    lengths = tokens or [2] * len(rewards)
    rows = [sample([5] * (n + 1), [0] + [1] * n) for n in lengths]
    return group(name, [trajectory(f"{name}{i}", [rows[i]], reward) for i, reward in enumerate(rewards)])


def random_groups(
    rng: np.random.Generator, *, groups: int = 2, per_group: int = 3, vocab: int = 50, longest: int = 24
) -> list[Group]:
    """Ragged multi-turn trajectories, some of two rows; rewards 0 and 1, both in each group."""
    made = []
    for g in range(groups):
        trajectories = []
        for t in range(per_group):
            rows = [random_sample(rng, vocab, longest) for _ in range(int(rng.integers(1, 3)))]
            trajectories.append(trajectory(f"g{g}t{t}", rows, float(t == 0 or (t > 1 and rng.random() < 0.5))))
        made.append(group(f"g{g}", trajectories))
    return made


def random_sample(rng: np.random.Generator, vocab: int, longest: int) -> Sample:
    """A row of a prompt and alternating spans of sampled and observed tokens."""
    length = int(rng.integers(4, longest + 1))
    mask = np.zeros(length, int)
    at = int(rng.integers(1, 3))
    while at < length:
        end = min(length, at + int(rng.integers(1, 6)))
        mask[at:end] = 1
        at = end + int(rng.integers(1, 5))
    return sample(
        rng.integers(0, vocab, length).tolist(),
        mask.tolist(),
        logprobs=(-rng.random(length) * 4).tolist(),
        temperature=float(rng.choice([0.5, 1.0, 2.0])),
    )


def tiny_llama(
    *, tie: bool = True, dtype: torch.dtype = torch.float64, vocab: int = 50, seed: int = 0
) -> PreTrainedModel:
    """Rotary positions, grouped keys and values; 20 thousand parameters."""
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=vocab,
        max_position_embeddings=256,
        initializer_range=0.2,
        tie_word_embeddings=tie,
        pad_token_id=1,
        eos_token_id=1,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).to(dtype)


def exact_llama(dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    """With norms in its own precision: transformers computes them in float32, which alone differs by 1e-9."""
    model = tiny_llama(dtype=dtype)
    for name, module in list(model.named_modules()):
        if name.endswith("norm"):
            exact = torch.nn.RMSNorm(model.config.hidden_size, model.config.rms_norm_eps, dtype=dtype)
            model.get_submodule(name.rpartition(".")[0]).register_module(name.rpartition(".")[2], exact)
            assert module.weight.eq(1).all()
    return model


def tiny_gpt2(*, dtype: torch.dtype = torch.float64, vocab: int = 50, seed: int = 0) -> PreTrainedModel:
    """Absolute positions, dropout in its configuration, tied head."""
    config = GPT2Config(
        n_embd=32,
        n_layer=2,
        n_head=4,
        vocab_size=vocab,
        n_positions=256,
        initializer_range=0.2,
        bos_token_id=1,
        eos_token_id=1,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return GPT2LMHeadModel(config).to(dtype)
