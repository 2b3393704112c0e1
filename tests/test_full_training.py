"""All weights trained: published whole, served as they are, proved, and taken back to the base's."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from engine_reference import Reference
from learning_support import random_groups, tiny_llama
from palestra.envs.errors import EngineError
from palestra.rl.algorithms.rloo import RLOO
from palestra.rl.batch import Batch, pack
from palestra.rl.learner import Learner, LearnerSettings
from palestra.rl.objective import Objective
from palestra.rl.optimizer import OptimizerSettings
from palestra.rollout.adapters import Adapter, Factors
from palestra.rollout.engines.handover import folded, hand_over, received, withdraw
from palestra.rollout.engines.transformers import TransformersEngine, TransformersSettings
from palestra.rollout.types import Sampling
from test_train import configuration, palestra, summary, weights
from tests_support import require
from tiny_models import make_tinier, make_tiny, random_adapter

FULL = LearnerSettings(train="full", optimizer=OptimizerSettings(learning_rate=1e-2))
NOTHING = np.zeros((1, 32), np.float32), np.zeros((64, 1), np.float32)
IDS = [3, 9, 4, 200, 17, 5]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tinier(tmp_path_factory.mktemp("model"))


def changed(model: Path, by: float) -> Adapter:
    """The weights of the model, each moved a little."""
    rng = np.random.default_rng(0)
    named = AutoModelForCausalLM.from_pretrained(model).named_parameters()
    moved = {n: p.detach().numpy() + by * rng.standard_normal(p.shape) for n, p in named}
    return Adapter({}, {name: weight.astype(np.float32) for name, weight in moved.items()})


def scored(model: Path, adapter: Adapter) -> np.ndarray:
    """The row's log-probabilities by plain transformers with these weights."""
    plain = AutoModelForCausalLM.from_pretrained(model)
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            if name in adapter.weights:
                parameter.copy_(torch.tensor(adapter.weights[name]))
        table = torch.log_softmax(plain(torch.tensor([IDS])).logits[0], dim=-1)
    return table[:-1].gather(1, torch.tensor(IDS[1:])[:, None])[:, 0].numpy()


def test_an_engine_serves_whole_weights_and_goes_back_to_the_base(model: Path) -> None:
    one, two = changed(model, 0.02), changed(model, 0.05)
    nothing = Adapter({"model.layers.0.self_attn.q_proj": Factors(*NOTHING, 1.0)})
    some = Adapter({}, {"model.norm.weight": two.weights["model.norm.weight"]})

    async def body() -> None:
        engine = TransformersEngine(TransformersSettings(model, context_tokens=64, threads=1))
        await engine.start()
        try:
            for version, adapter in enumerate((one, two, some, nothing)):
                receipt = await engine.load(adapter, version)
                assert (receipt.digest, receipt.matched_modules) == (adapter.digest(), adapter.num_parts)
                assert receipt.mode == ("merged" if adapter.weights else "adapter")
                np.testing.assert_allclose(await engine.score(IDS), scored(model, adapter), atol=1e-5)
            with pytest.raises(EngineError, match=r"has no 'model\.nose\.weight'"):
                await engine.load(Adapter({}, {"model.nose.weight": one.weights["model.norm.weight"]}), 9)
            with pytest.raises(EngineError, match=r"a weight of \(32,\) for \(330, 32\)"):
                await engine.load(Adapter({}, {"model.embed_tokens.weight": one.weights["model.norm.weight"]}), 9)
            poisoned = np.full(32, np.nan, np.float32)
            with pytest.raises(EngineError, match="not finite"):
                await engine.load(Adapter({}, {"model.norm.weight": poisoned}), 9)
            np.testing.assert_allclose(await engine.score(IDS), scored(model, nothing), atol=1e-5)
        finally:
            await engine.close()

    asyncio.run(body())


def test_a_request_in_flight_keeps_the_weights_that_it_began_with(model: Path) -> None:
    one, two = changed(model, 0.02), changed(model, 0.3)
    ask = Sampling(max_tokens=40, temperature=1.0, seed=3, stop_ids=frozenset())

    async def body() -> None:
        engine = TransformersEngine(TransformersSettings(model, context_tokens=64, threads=1))
        await engine.start()
        try:
            await engine.load(one, 1)
            alone = await engine.generate(IDS, ask, session="a")
            task = asyncio.create_task(engine.generate(IDS, ask, session="b"))
            await asyncio.sleep(0.01)
            await engine.load(two, 2)
            across = await task
            assert set(across.versions.tolist()) == {1}
            assert across.ids.tolist() == alone.ids.tolist()
        finally:
            await engine.close()

    asyncio.run(body())


def test_the_digest_and_the_way_to_a_worker_hold_whole_weights(model: Path) -> None:
    one = changed(model, 0.02)
    assert one.digest() != changed(model, 0.03).digest() != Adapter({}).digest()
    folder = hand_over(folded(one))
    try:
        assert received(folder).digest() == one.digest()
    finally:
        withdraw(folder)


def some_batch(seed: int, objective: Objective) -> Batch:
    groups = random_groups(np.random.default_rng(seed))
    return pack(groups, [RLOO().advantages(group) for group in groups], 60, objective)


def test_the_reference_of_full_training_is_a_frozen_copy_of_the_start() -> None:
    objective = Objective(kl_coefficient=0.1)
    learner = Learner(tiny_llama(), LearnerSettings(train="full", optimizer=FULL.optimizer, keep_start=True))
    batch = some_batch(0, objective)
    at_first = learner.sampled_logprobs(batch)
    assert learner.update(batch, RLOO(objective)).metrics["kl_to_reference"] == pytest.approx(0.0, abs=1e-12)
    assert learner.update(batch, RLOO(objective)).metrics["kl_to_reference"] > 1e-6
    np.testing.assert_allclose(learner.reference_logprobs(batch), at_first, atol=1e-6)
    assert np.abs(learner.sampled_logprobs(batch) - at_first).max() > 1e-3


def test_a_run_trains_all_weights_and_engines_serve_them(tmp_path: Path, model: Path) -> None:
    words = ["model.train=full", "optimizer.learning_rate=1e-3", "evaluation.tasks=2"]
    done = palestra("train", configuration(tmp_path, model, steps=2), *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert summary(tmp_path)["max_logprob_gap"] < 1e-3  # type: ignore[operator]
    assert weights(tmp_path, "run", 2).keys() >= {"weight/model.norm.weight", "weight/model.embed_tokens.weight"}
    lines = (tmp_path / "runs" / "run" / "metrics.jsonl").read_text().splitlines()
    moved = [json.loads(line).get("publish/moved") for line in lines]
    assert any(value is not None and value > 1e-4 for value in moved)
    longer = palestra("train", configuration(tmp_path, model, steps=3), *words)
    assert longer.returncode == 0, longer.stdout + longer.stderr
    assert "resuming from" in longer.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["model.dtype=bfloat16"], "loses small updates"),
        (["warm_start.demonstrations=2"], 'set warm_start.train to "full"'),
        (["rollout.engine.kind=vllm", "rollout.engine.sync_mode=adapter"], 'set rollout.engine.sync_mode to "merged"'),
    ],
)
def test_what_cannot_be_trained_in_full_is_refused_before_anything_starts(
    tmp_path: Path, model: Path, words: list[str], said: str
) -> None:
    done = palestra("train", configuration(tmp_path, model), "model.train=full", *words)
    assert done.returncode == 2, done.stderr
    assert said in done.stderr


@pytest.mark.vllm
def test_vllm_serves_whole_weights_and_goes_back_to_base_and_adapter(tmp_path: Path) -> None:
    require("vllm")
    from palestra.rollout.engines.vllm import VLLMEngine
    from palestra.rollout.engines.vllm_settings import VLLMSettings

    folder = make_tiny(tmp_path / "model")
    one, two, factors = changed(folder, 0.01), changed(folder, 0.03), random_adapter(folder, rank=4)

    async def body() -> None:
        engine = VLLMEngine(VLLMSettings(folder, 256, sync_mode="merged", max_num_seqs=4, kv_cache_gib=0.25))
        await engine.start()
        try:
            for version, adapter in enumerate((one, two, factors, one)):
                receipt = await engine.load(adapter, version)
                assert (receipt.digest, receipt.matched_modules) == (folded(adapter).digest(), adapter.num_parts)
                wanted = scored(folder, adapter) if adapter.weights else Reference(folder, adapter).logprobs([IDS])[0]
                np.testing.assert_allclose(await engine.score(IDS), wanted, atol=1e-5, err_msg=f"version {version}")
        finally:
            await engine.close()

    asyncio.run(body())
