"""The learner's benchmark: its batches are what they say, and all that it compares has one gradient."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from branching import branching_groups
from learning_support import tiny_llama
from palestra.envs.errors import ConfigError
from palestra.rl import lora, plain_path
from palestra.rl.algorithms.rloo import RLOO
from palestra.rl.attention import use_packed_attention
from palestra.rl.batch import pack
from palestra.rl.bench_batches import PEERS, SHAPES, SIZES, Work, work_of
from palestra.rl.bench_learner import accumulated, gradients_of, padded_out, peak_mb, scored_everywhere, stir
from palestra.rl.commands.bench_learner import run_bench_learner
from palestra.rl.fused_layers import unfuse


def small_work() -> Work:
    groups = tuple(branching_groups(np.random.default_rng(0)))
    return Work(groups, tuple(RLOO().credit(groups)))


def adapted() -> PreTrainedModel:
    model = tiny_llama(dtype=torch.float32).eval()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        lora.attach(model, lora.LoraSettings(rank=2, alpha=4.0))
    stir(model)
    return model


def test_our_path_and_the_plain_one_have_the_same_gradients() -> None:
    work = small_work()
    plain = adapted()
    unfuse(plain)
    optimizer = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=0.0)
    (row,) = pack(work.groups, work.credits, 10**9, work.objective, share_prefixes=False).rows
    plain_path.step(plain, optimizer, list(plain_path.padded(row, 150)), work.objective)
    expected = gradients_of(plain)

    ours = adapted()
    use_packed_attention(ours)
    batch, alone = (pack(work.groups, work.credits, 60, work.objective, share_prefixes=s) for s in (True, False))
    everywhere = replace(batch, rows=tuple(map(scored_everywhere, batch.rows)))
    wide = replace(alone, rows=tuple(padded_out(row, 70) for row in alone.rows))
    assert wide.num_tokens == 70 * sum(len(row.parents) for row in alone.rows)
    for other in (batch, alone, everywhere, wide):
        found = accumulated(ours, other, work)
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("size", SIZES)
def test_batches_are_what_they_say_and_the_same_every_time(size: str) -> None:
    work, again = work_of(size), work_of(size)
    rows = [sample for g in work.groups for t in g.trajectories for sample in t.samples]
    same = zip(rows, (s for g in again.groups for t in g.trajectories for s in t.samples), strict=True)
    assert all(np.array_equal(a.ids, b.ids) for a, b in same)
    assert all(
        len(set(g.trajectories[0].samples[0].ids[:50]) & set(g.trajectories[1].samples[0].ids[:50])) >= 40
        for g in work.groups
    )
    if size in SHAPES:
        shape = SHAPES[size]
        assert len(rows) == shape.groups * shape.per_group
        assert all(shape.shortest <= len(row) <= shape.longest for row in rows)
        more = sum(len(row) - shape.prompt for row in rows)
        assert sum(int(row.sampled.sum()) for row in rows) == pytest.approx(0.4 * more, abs=len(rows))
    elif size in PEERS:
        assert sum(map(len, rows)) == {"peer-small": 1704, "peer-long-tail": 4244}[size]
    else:
        assert [len(t.samples) for t in work.groups[0].trajectories] == [4] * 4


def test_an_unknown_size_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'tiny'; use one of small, long-tail"):
        run_bench_learner("tiny", 1, None)


def test_the_peak_is_of_this_process() -> None:
    assert 50 < peak_mb() < 100_000
