"""The small parts engines are made of, one by one."""

from __future__ import annotations

import asyncio
import math
import os
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from palestra.envs.errors import EngineError
from palestra.rollout.adapters import Adapter, Factors
from palestra.rollout.engines import handover
from palestra.rollout.engines.plain_products import install
from palestra.rollout.engines.probe import check_tempered
from palestra.rollout.engines.sampling import draw, log_probs
from palestra.rollout.engines.served import ServedVersions
from palestra.rollout.engines.vllm_settings import VLLMSettings
from palestra.rollout.merge import merged, share_lost


def factors(rank: int = 2, size: tuple[int, int] = (6, 4), scale: float = 0.5, seed: int = 0) -> Factors:
    rng = np.random.default_rng(seed)
    a = rng.standard_normal((rank, size[1]), dtype=np.float32)
    return Factors(a, rng.standard_normal((size[0], rank), dtype=np.float32), scale)


def test_tempered_logprobs_are_those_of_divided_logits() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0]] * 3)
    table = log_probs(logits, torch.tensor([0.5, 1.0, 0.0]))
    assert table[0].tolist() == pytest.approx([-0.1429, -2.1429, -4.1429], abs=1e-4)
    assert table[1].tolist() == table[2].tolist() == pytest.approx([-0.4076, -1.4076, -2.4076], abs=1e-4)


def test_tokens_are_drawn_as_often_as_they_are_likely() -> None:
    logits, n = torch.tensor([2.0, 1.0, -math.inf, 0.0]), 20_000
    stream = torch.Generator().manual_seed(0)
    ids, logprobs = draw(logits.expand(n, 4), [0.5] * n, [stream] * n)
    wanted = torch.softmax(logits / 0.5, -1)
    shares = torch.bincount(ids, minlength=4) / n
    assert shares[2] == 0
    assert torch.allclose(shares, wanted, atol=4 * math.sqrt(0.25 / n))
    assert torch.allclose(logprobs.exp(), wanted[ids], atol=1e-6)


@given(st.integers(0, 2**31), st.integers(1, 5))
@settings(max_examples=30, deadline=None)
def test_a_row_is_drawn_alike_in_every_batch(seed: int, mates: int) -> None:
    logits = torch.randn(mates + 1, 50, generator=torch.Generator().manual_seed(seed))

    def streams(n: int) -> list[torch.Generator]:
        return [torch.Generator().manual_seed(seed + i) for i in range(n)]

    together, _ = draw(logits, [1.0] * (mates + 1), streams(mates + 1))
    alone, _ = draw(logits[:1], [1.0], streams(1))
    assert together[0] == alone[0]


def test_merging_never_wears_the_base_and_casts_once() -> None:
    base = torch.randn(6, 4).bfloat16()
    kept = base.clone()
    for seed in range(100):
        f = factors(seed=seed)
        wanted = (base.float() + torch.from_numpy(f.scale * f.b @ f.a)).bfloat16()
        assert torch.equal(merged(base, f), wanted)
    assert torch.equal(base, kept)
    with pytest.raises(ValueError, match="update of"):
        merged(base, factors(size=(6, 5)))


def test_the_share_of_an_update_that_a_cast_takes_is_told() -> None:
    weight = torch.tensor([[0.5, 0.02]]).bfloat16()
    tiny = Factors(np.array([[0.001, 0.00001]], np.float32), np.ones((1, 1), np.float32), 1.0)
    assert share_lost(weight, merged(weight, tiny), tiny) > 0.99
    assert share_lost(weight.float(), merged(weight.float(), tiny), tiny) < 0.01


def test_factors_cross_the_hand_over_whole_with_their_scales_folded() -> None:
    adapter = Adapter({"m.a": factors(2, scale=0.25), "m.b": factors(5, (3, 7), scale=3.0, seed=1)})
    sent = handover.folded(adapter)
    folder = handover.hand_over(sent)
    try:
        assert folder.stat().st_mode & 0o077 == 0
        got = handover.received(folder)
        assert got.digest() == sent.digest() != adapter.digest()
        for name, f in adapter.factors.items():
            assert np.allclose(got.factors[name].b @ got.factors[name].a, f.scale * f.b @ f.a, rtol=1e-5)
    finally:
        handover.withdraw(folder)
        handover.withdraw(folder)
    assert not folder.exists()


def test_folders_of_killed_processes_are_swept_and_those_of_the_living_are_not() -> None:
    dead = subprocess.Popen(["true"])
    dead.wait(timeout=10)
    root = handover.MEMORY if handover.MEMORY.is_dir() else Path("/tmp")
    folders = {
        what: root / f"{handover.FOLDER}{pid}-{what}" for what, pid in (("old", dead.pid), ("mine", os.getpid()))
    }
    folders["young"] = root / f"{handover.FOLDER}{dead.pid}-young"
    for what, folder in folders.items():
        folder.mkdir()
        if what != "young":
            os.utime(folder, (time.time() - 2 * handover.STALE_S,) * 2)
    try:
        assert handover.sweep() >= 1
        assert {what for what, folder in folders.items() if folder.exists()} == {"mine", "young"}
    finally:
        for folder in folders.values():
            handover.withdraw(folder)


def test_a_version_stays_until_its_last_request_and_a_new_one_waits_for_room() -> None:
    async def body() -> None:
        served: ServedVersions[str] = ServedVersions(limit=2)
        served.put_in_force(1, "one")
        async with served.use() as held:
            assert held is not None
            served.put_in_force(2, "two")
            assert served.idle() == []
            with pytest.raises(EngineError, match=r"in flight by version are \{1: 1, 2: 0\}"):
                await served.room(0.05)
            waiting = asyncio.create_task(served.room(5))
            await asyncio.sleep(0.01)
            assert not waiting.done()
        await waiting
        assert [old.version for old in served.idle()] == [1]
        served.forget(served.idle()[0])
        assert served.handles() == ["two"]

    asyncio.run(body())


def test_the_start_up_proof_tells_tempered_from_raw() -> None:
    table = {0: -0.4076, 1: -1.4076, 2: -2.4076}
    check_tempered(table, 1, -2.1429, 0.5, -1.4076, "float32")
    with pytest.raises(EngineError, match="not those it samples"):
        check_tempered(table, 1, -1.4076, 0.5, -1.4076, "float32")
    with pytest.raises(EngineError, match="not those it samples"):
        check_tempered(table, 1, math.nan, 0.5, -1.4076, "float32")
    with pytest.raises(EngineError, match="cannot be compared"):
        check_tempered(table, 1, -2.1429, 0.5, -2.1429, "float32")
    flat = {0: math.log(0.5), 1: math.log(0.5)}
    check_tempered(flat, 0, math.log(0.5), 0.5, math.log(0.5), "float32")


class SlotTable:
    """The part of a CPU LoRA wrapper that plain products build on."""

    def update_metadata(self, slots: torch.Tensor) -> None:
        self.token_lora_indices = self.sampler_indices = slots


@pytest.mark.parametrize("slots", [[0, 0, 0], [1, 1, 1], [0, 1, -1], [-1, -1, -1]])
def test_plain_products_give_each_row_its_own_adapter_or_none(slots: list[int]) -> None:
    wrapper = SlotTable()
    install(wrapper)
    wrapper.update_metadata(torch.tensor(slots))
    x, base = torch.randn(3, 5), torch.randn(3, 7)
    a, b = [torch.randn(2, 1, 4, 5) for _ in range(2)], [torch.randn(2, 1, out, 4) for out in (3, 4)]
    y = base.clone()
    wrapper.add_lora_linear(y, x, a, b, 0.5, (3, 4))  # type: ignore[attr-defined]
    for row, slot in enumerate(slots):
        update = [0.5 * (b[i][slot, 0] @ a[i][slot, 0] @ x[row]) for i in range(2)]
        wanted = base[row] + (torch.cat(update) if slot >= 0 else 0)
        assert torch.allclose(y[row], wanted, atol=1e-5)


def test_rank_limits_are_rounded_up_to_what_vllm_takes(tmp_path: Path) -> None:
    assert [VLLMSettings(tmp_path, 8, max_lora_rank=rank).rank_limit for rank in (1, 8, 9, 100)] == [8, 8, 16, 128]
    with pytest.raises(ValueError, match="at most 512"):
        _ = VLLMSettings(tmp_path, 8, max_lora_rank=513).rank_limit
