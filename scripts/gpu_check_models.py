"""Models with random weights, and groups of made-up episodes, for the check of one GPU."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from palestra.envs.types import Scored
from palestra.rl.algorithms.base import Credit
from palestra.rl.batch import Batch, pack
from palestra.rl.objective import Objective
from palestra.rollout.types import Group, Sample, TerminatedBy, Trajectory

VOCAB = 512
SHAPES = {
    "0.6B": {"hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "intermediate_size": 3072},
    "4B": {"hidden_size": 2560, "num_hidden_layers": 36, "num_attention_heads": 32, "intermediate_size": 9728},
}


def tiny(kind: str) -> PreTrainedModel:
    """Two layers in float32 on the CPU, the same weights each time. "llama" ties its head, "qwen3" does not."""
    common = {"vocab_size": VOCAB, "max_position_embeddings": 2048, "pad_token_id": 1, "eos_token_id": 1}
    body = {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "initializer_range": 0.08,
    }
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if kind == "gpt2":  # absolute positions
            config: PretrainedConfig = GPT2Config(
                n_embd=128, n_layer=2, n_head=2, n_positions=2048, bos_token_id=1, initializer_range=0.08, **common
            )
            return GPT2LMHeadModel(config)
        if kind == "llama":
            return LlamaForCausalLM(LlamaConfig(**body, **common, tie_word_embeddings=True))
        return Qwen3ForCausalLM(Qwen3Config(**body, **common, tie_word_embeddings=False))


def shaped(name: str, *, small: bool, device: str) -> PreTrainedModel:
    """A model of the shape of Qwen3-0.6B or Qwen3-4B in bfloat16, made on the device; small: of neither."""
    little = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
    config = Qwen3Config(
        **(little if small else SHAPES[name]),
        vocab_size=VOCAB if small else 151_936,
        num_key_value_heads=2 if small else 8,
        head_dim=32 if small else 128,
        max_position_embeddings=40_960,
        rope_theta=1_000_000.0,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=0,
    )
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            return Qwen3ForCausalLM(config)
    finally:
        torch.set_default_dtype(torch.float32)


def groups(rng: np.random.Generator, *, longest: int, shared: int = 24, vocab: int = VOCAB) -> list[Group]:
    """Two groups of three ragged episodes of several turns; each group's episodes begin alike, one is in two rows."""
    made = []
    for g in range(2):
        prompt = rng.integers(2, vocab, shared)
        members = [[_sample(rng, prompt, longest, vocab)] for _ in range(3)]
        members[0].append(_fork(rng, members[0][0], longest, vocab))
        made.append(Group(f"g{g}", f"t{g}", tuple(episode(f"g{g}e{e}", rows) for e, rows in enumerate(members))))
    return made


def group_of(rng: np.random.Generator, *, episodes: int, shared: int, own: int, sampled: float, vocab: int) -> Group:
    """Episodes that begin with the same `shared` tokens and go on with `own` ones, a share of which was sampled."""
    prompt = rng.integers(2, vocab, shared)
    rows = []
    for _ in range(episodes):
        ids = np.concatenate([prompt, rng.integers(2, vocab, own)])
        where = np.zeros(len(ids), bool)
        for start in range(shared, len(ids), 256):  # turns of 256 tokens, the policy's words first
            where[start : start + int(256 * sampled)] = True
        where[0] = False
        rows.append(_row(rng, ids, where))
    return Group("g", "t", tuple(episode(f"e{n}", [row]) for n, row in enumerate(rows)))


def episode(name: str, rows: Sequence[Sample]) -> Trajectory:
    """An episode of these rows."""
    return Trajectory(name, "t", "g", 0, (), (), tuple(rows), TerminatedBy.DONE, Scored(1.0))


def batch(
    found: Sequence[Group], rng: np.random.Generator, *, tokens: int = 1 << 20, share: bool = True, **objective: object
) -> Batch:
    """One optimiser step: advantages of either sign, the same over an episode."""
    credits = [
        Credit(tuple(np.full(t.sampled_tokens, float(rng.choice([-1.0, 0.5, 1.5]))) for t in group.trajectories))
        for group in found
    ]
    return pack(found, credits, tokens, Objective(**objective), share_prefixes=share)  # type: ignore[arg-type]


def _sample(rng: np.random.Generator, prompt: np.ndarray, longest: int, vocab: int) -> Sample:
    ids = np.concatenate([prompt, rng.integers(2, vocab, int(rng.integers(longest // 3, longest)))])
    where, at = np.zeros(len(ids), bool), len(prompt)
    while at < len(ids):
        end = at + int(rng.integers(2, 12))
        where[at:end] = True
        at = end + int(rng.integers(1, 16))
    return _row(rng, ids, where)


def _fork(rng: np.random.Generator, sample: Sample, longest: int, vocab: int) -> Sample:
    """The same history up to its half, then another one; what was sampled before is not sampled again."""
    half = len(sample) // 2
    ids = np.concatenate([sample.ids[:half], rng.integers(2, vocab, longest // 3)])
    where = np.zeros(len(ids), bool)
    where[half + 2 : half + 20] = True
    return _row(rng, ids, where)


def _row(rng: np.random.Generator, ids: np.ndarray, where: np.ndarray) -> Sample:
    """Poison wherever nothing was sampled: whoever reads it is found out."""
    logprobs = -rng.random(len(ids)) * 8
    return Sample(
        ids=ids.astype(np.int32),
        sampled=where,
        logprobs=np.where(where, logprobs, np.nan).astype(np.float32),
        temperature=np.where(where, rng.choice([0.7, 1.0]), np.nan).astype(np.float32),
        version=np.where(where, 0, -1).astype(np.int32),
        turn=np.where(where, 0, -1).astype(np.int16),
    )
