"""The transformers engine: batching, kept keys and values, and models that number positions absolutely."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from engine_reference import Reference
from palestra.envs.errors import EngineError
from palestra.rollout.adapters import Adapter, Factors
from palestra.rollout.engines.decoding import Batch, prefill
from palestra.rollout.engines.kept import Kept, KeptSessions
from palestra.rollout.engines.transformers import TransformersEngine, TransformersSettings
from palestra.rollout.types import Completion, Sampling
from tiny_models import END_ID, make_tinier, random_adapter

GAP = 1e-5
VOCAB = 330


def make_gpt2(folder: Path) -> Path:
    """Learned absolute positions and fused [in, out] weights: everything a Llama is not."""
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=2, n_head=2, n_embd=32, vocab_size=VOCAB, n_positions=256, bos_token_id=None, eos_token_id=END_ID
    )
    model = GPT2LMHeadModel(config)
    with torch.no_grad():
        model.transformer.wpe.weight.mul_(20)  # so that a wrong position shows
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=[make_tinier, make_gpt2])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    make: Callable[[Path], Path] = request.param
    return make(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def tinier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tinier(tmp_path_factory.mktemp("tinier"))


def use(folder: Path, body: Callable[[TransformersEngine], Coroutine[Any, Any, None]], **settings: Any) -> None:
    async def run() -> None:
        engine = TransformersEngine(TransformersSettings(folder, 256, **settings))
        await engine.start()
        try:
            await body(engine)
        finally:
            await engine.close()

    asyncio.run(run())


def test_a_rows_logprobs_do_not_depend_on_its_batch_mates(folder: Path) -> None:
    plain = Reference(folder)
    prompts = [list(range(5, 5 + n)) for n in (3, 60, 11, 150, 31)]

    async def body(engine: TransformersEngine) -> None:
        async def one(n: int, wait_s: float) -> Completion:
            await asyncio.sleep(wait_s)  # rows join at different steps
            return await engine.generate(prompts[n], Sampling(10 + 12 * n, 1.0, seed=n), session=str(n))

        together = await asyncio.gather(*[one(n, 0.02 * n) for n in range(5)])
        for n, done in enumerate(together):
            alone = await engine.generate(prompts[n], Sampling(10 + 12 * n, 1.0, seed=n), session=f"alone {n}")
            assert alone.ids.tolist() == done.ids.tolist()
            wanted = plain.logprobs([[*prompts[n], *done.ids.tolist()]])[0][len(prompts[n]) - 1 :]
            assert np.abs(done.logprobs - wanted).max() < GAP

    use(folder, body, max_num_seqs=4)


def test_an_adapter_binds_to_transposed_weights_too(tmp_path: Path) -> None:
    folder, rng = make_gpt2(tmp_path), np.random.default_rng(0)
    factors = {
        f"transformer.h.{layer}.{name}": Factors(
            rng.standard_normal((4, 32), dtype=np.float32), rng.standard_normal((out, 4), dtype=np.float32) * 0.1, 0.5
        )
        for layer in range(2)
        for name, out in (("attn.c_attn", 96), ("mlp.c_fc", 128))
    }
    model = GPT2LMHeadModel.from_pretrained(folder).eval()
    with torch.no_grad():
        for name, f in factors.items():
            model.get_submodule(name).weight.add_(torch.from_numpy(f.scale * f.b @ f.a).T)
    ids = list(range(5, 40))
    wanted = model(torch.tensor([ids])).logits[0].log_softmax(-1)[:-1].gather(-1, torch.tensor(ids)[1:, None])[:, 0]

    async def body(engine: TransformersEngine) -> None:
        receipt = await engine.load(Adapter(factors), 1)
        assert receipt.matched_modules == 4
        assert np.abs(await engine.score(ids) - wanted.detach().numpy()).max() < GAP

    use(folder, body)


def test_a_turn_computes_only_what_is_new_and_a_load_forgets_what_was_kept(tinier: Path) -> None:
    async def body(engine: TransformersEngine) -> None:
        ran: list[int] = []
        engine._model.register_forward_pre_hook(
            lambda module, args, kwargs: ran.append(kwargs["input_ids"].shape[1]), with_kwargs=True
        )
        first = await engine.generate(list(range(3, 103)), Sampling(10, seed=1), session="s")
        prompt = [*range(3, 103), *first.ids.tolist(), 7, 8, 9]
        ran.clear()
        second = await engine.generate(prompt, Sampling(1, seed=2), session="s")
        assert ran == [4]  # the last sampled token and the three new ones
        edited = [*prompt[:50], 4, *prompt[51:]]
        ran.clear()
        await engine.generate(edited, Sampling(1, seed=2), session="s")
        assert ran == [len(edited) - 50]  # the common prefix by ids
        await engine.load(random_adapter(tinier), 1)
        ran.clear()
        await engine.generate(edited, Sampling(1, seed=2), session="s")
        assert ran == [len(edited)]
        await engine.end_session("s")
        ran.clear()
        again = await engine.generate(prompt, Sampling(1, seed=2), session="s")
        assert ran == [len(prompt)]
        assert second.versions.tolist() != again.versions.tolist()

    use(tinier, body)


def test_kept_states_are_bounded_and_the_least_recently_used_goes_first() -> None:
    def kept(n: int) -> Kept:
        states = torch.zeros(1, 1, n, 4)
        return Kept(tuple(range(n)), 0, [(states, states)])  # 32 n bytes

    store = KeptSessions(max_bytes=32 * 10)
    store.put("a", kept(4))
    store.put("b", kept(4))
    assert store.prefix("a", range(9), 0) is not None
    store.put("c", kept(5))
    assert (store.prefix("b", range(9), 0), len(store), store.num_bytes) == (None, 2, 32 * 9)
    assert store.prefix("a", range(9), 1) is None  # another load
    store.put("a", kept(6))
    assert store.num_bytes == 32 * 6  # c had to go
    store.put("a", kept(11))
    assert (len(store), store.num_bytes) == (0, 0)


def test_more_requests_than_rows_wait_their_turn_and_all_are_answered(tinier: Path) -> None:
    async def body(engine: TransformersEngine) -> None:
        asked = [engine.generate([5, 6, n], Sampling(1 + n % 7, seed=n), session=str(n)) for n in range(40)]
        answers = await asyncio.gather(*asked)
        assert [len(done.ids) for done in answers] == [1 + n % 7 for n in range(40)]

    use(tinier, body, max_num_seqs=3)


def test_a_cancelled_request_leaves_the_batch(tinier: Path) -> None:
    async def body(engine: TransformersEngine) -> None:
        gone = asyncio.create_task(engine.generate([5], Sampling(250, seed=1), session="gone"))
        await asyncio.sleep(0.05)
        gone.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gone
        done = await asyncio.wait_for(engine.generate([5], Sampling(3, seed=2), session="next"), 10)
        assert len(done.ids) == 3

    use(tinier, body, max_num_seqs=1)


def test_a_request_past_its_deadline_is_an_engine_error(tinier: Path) -> None:
    async def body(engine: TransformersEngine) -> None:
        with pytest.raises(EngineError, match="not answered within"):
            await engine.generate([5], Sampling(250, seed=1), session="slow")

    use(tinier, body, request_timeout_s=0.01)


def test_a_folder_without_a_model_and_a_context_beyond_it_fail_at_start(tinier: Path, tmp_path: Path) -> None:
    for folder, context, message in ((tmp_path, 64, "cannot serve"), (tinier, 513, "has 512 positions")):
        engine = TransformersEngine(TransformersSettings(folder, context))
        with pytest.raises(EngineError, match=message):
            asyncio.run(engine.start())


def test_rows_leave_a_batch_without_touching_the_others(folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    rows = [list(range(5, 5 + n)) for n in (4, 90, 20)]
    with torch.inference_mode():
        batch = Batch.empty()
        for row in rows:
            batch.join(prefill(model, row, None)[1])
        batch.leave([2, 0])
        assert batch.layers[0][0].shape[2] == 20
        logits = batch.step(model, [7, 8])
        for got, row in zip(logits, ([*rows[2], 7], [*rows[0], 8]), strict=True):
            assert torch.allclose(got, model(torch.tensor([row])).logits[0, -1], atol=1e-4)
