"""What the trainer relies on, asked of every engine that runs a model: one suite, three ways to serve."""

from __future__ import annotations

import asyncio
import hashlib
import multiprocessing
import os
import time
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

from agreement import largest_and_mean_gaps, sample_rows
from engine_reference import Reference
from palestra.envs.errors import EngineError
from palestra.rollout.adapters import Adapter, Factors
from palestra.rollout.engines.checks import UNPUBLISHED
from palestra.rollout.engines.handover import FOLDER, MEMORY
from palestra.rollout.engines.protocol import Engine, EngineFacts
from palestra.rollout.engines.vllm_settings import VLLMSettings
from palestra.rollout.types import Completion, Finish, Sampling
from tests_support import require
from tiny_models import make_tiny, random_adapter

T = TypeVar("T")

VLLM = [pytest.param(kind, marks=pytest.mark.vllm) for kind in ("vllm adapter", "vllm merged")]
CONTEXT = 512
GAP = 1e-5  # natural logarithm, float32, 3M parameters
PROMPT = list(range(3, 80))


@dataclass
class Served:
    """A started engine, the event loop it lives in, and its model's folder."""

    kind: str
    engine: Engine
    facts: EngineFacts
    folder: Path
    runner: asyncio.Runner

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(work)

    def load(self, seed: int, version: int, scale: float = 1.0) -> Adapter:
        adapter = random_adapter(self.folder, rank=8, seed=seed, scale=scale)
        self.run(self.engine.load(adapter, version))
        return adapter

    def generate(self, prompt: list[int], sampling: Sampling, session: str = "s") -> Completion:
        return self.run(self.engine.generate(prompt, sampling, session=session))


@pytest.fixture(scope="module", params=["transformers", *VLLM])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    kind: str = request.param
    # tied embeddings under the merge, where they could come apart; an own head beside factors
    folder = make_tiny(tmp_path_factory.mktemp("model"), tie=kind != "vllm adapter")
    with asyncio.Runner() as runner:
        engine = _engine(kind, folder)
        facts = runner.run(engine.start())
        yield Served(kind, engine, facts, folder, runner)
        runner.run(engine.close())


def _engine(kind: str, folder: Path) -> Engine:
    if kind == "transformers":
        from palestra.rollout.engines.transformers import TransformersEngine, TransformersSettings

        return TransformersEngine(TransformersSettings(folder, CONTEXT, max_num_seqs=16))
    require("vllm")
    from palestra.rollout.engines.vllm import VLLMEngine

    mode = "merged" if kind == "vllm merged" else "adapter"
    return VLLMEngine(VLLMSettings(folder, CONTEXT, sync_mode=mode, max_num_seqs=16, kv_cache_gib=0.25))


def test_before_any_publish_tokens_are_stamped_as_unpublished(served: Served) -> None:
    done = served.generate(PROMPT, Sampling(4, seed=1))
    assert set(done.versions.tolist()) == {UNPUBLISHED}
    wanted = Reference(served.folder).logprobs([[*PROMPT, *done.ids.tolist()]])[0][len(PROMPT) - 1 :]
    assert np.abs(wanted - done.logprobs).max() < GAP


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_sampled_logprobs_are_those_of_a_plain_padded_forward(served: Served, temperature: float) -> None:
    adapter = served.load(seed=1, version=1)

    async def sample() -> list[Completion]:
        requests = [
            served.engine.generate(PROMPT[:n], Sampling(40, temperature, seed=n), session=f"t{n}") for n in (9, 33, 77)
        ]
        return await asyncio.gather(*requests)

    completions = served.run(sample())
    rows = [[*PROMPT[:n], *done.ids.tolist()] for n, done in zip((9, 33, 77), completions, strict=True)]
    plain, base = Reference(served.folder, adapter), Reference(served.folder)
    for n, row, done, other in zip((9, 33, 77), rows, completions, base.logprobs(rows, temperature), strict=True):
        wanted = plain.logprobs([row], temperature)[0][n - 1 :]
        assert np.abs(wanted - done.logprobs).max() < GAP
        assert np.abs(other[n - 1 :] - done.logprobs).max() > 0.05  # the adapter matters


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_engine_trainer_and_padded_forward_agree_on_what_was_sampled(served: Served, temperature: float) -> None:
    adapter = served.load(seed=11, version=40 + int(10 * temperature))
    prompts = [list(range(3 + i, 20 + 13 * i)) for i in range(8)]
    rows = served.run(sample_rows(served.engine, prompts, 40, temperature))
    gaps = largest_and_mean_gaps(served.folder, adapter, rows, temperature, rank=8)
    assert all(largest < GAP for largest, _ in gaps.values()), gaps


def test_scores_are_raw_and_whole_however_often_they_are_asked_for(served: Served) -> None:
    adapter = served.load(seed=2, version=2)
    row = [*PROMPT, *PROMPT, *PROMPT]
    wanted = Reference(served.folder, adapter).logprobs([row])[0]
    for _ in range(2):  # the second time its prefix is cached
        assert np.abs(served.run(served.engine.score(row)) - wanted).max() < GAP


def test_greedy_is_the_trainers_greedy_with_logprobs_at_temperature_one(served: Served) -> None:
    adapter = served.load(seed=3, version=3)
    done = served.generate(PROMPT, Sampling(12, temperature=0.0))
    plain = Reference(served.folder, adapter)
    assert done.ids.tolist() == plain.greedy(PROMPT, 12)
    wanted = plain.logprobs([[*PROMPT, *done.ids.tolist()]])[0][len(PROMPT) - 1 :]
    assert np.abs(wanted - done.logprobs).max() < GAP


def test_nothing_cached_under_an_older_version_answers(served: Served) -> None:
    prompt = [(37 * i) % 2000 + 10 for i in range(300)]
    served.load(seed=4, version=4)
    old = served.generate(prompt, Sampling(8, seed=1))
    new_adapter = served.load(seed=5, version=5)
    new = served.generate(prompt, Sampling(8, seed=1))
    assert set(old.versions.tolist()) == {4}
    assert set(new.versions.tolist()) == {5}
    wanted = Reference(served.folder, new_adapter).logprobs([[*prompt, *new.ids.tolist()]])[0][len(prompt) - 1 :]
    assert np.abs(wanted - new.logprobs).max() < GAP


def test_a_session_goes_on_where_it_ended(served: Served) -> None:
    adapter = served.load(seed=6, version=6)
    plain, prompt = Reference(served.folder, adapter), list(PROMPT)
    for turn in range(4):
        done = served.generate(prompt, Sampling(20, seed=turn), session="long")
        wanted = plain.logprobs([[*prompt, *done.ids.tolist()]])[0][len(prompt) - 1 :]
        assert np.abs(wanted - done.logprobs).max() < GAP
        prompt = [*prompt, *done.ids.tolist(), 7, 8, 9]
    served.run(served.engine.end_session("long"))
    served.run(served.engine.end_session("long"))


def test_the_receipt_proves_what_is_served(served: Served) -> None:
    adapter = random_adapter(served.folder, rank=8, seed=7, scale=0.3)
    receipt = served.run(served.engine.load(adapter, 70))
    assert receipt.digest == adapter.digest()
    assert receipt.matched_modules == len(adapter.factors) == 21
    assert (receipt.version, receipt.mode) == (70, served.facts.sync_mode)
    assert set(served.generate(PROMPT, Sampling(3, seed=1)).versions.tolist()) == {70}


def test_every_module_keeps_its_own_rank_and_scale(served: Served) -> None:
    narrow = random_adapter(served.folder, rank=3, seed=8).factors
    wide = random_adapter(served.folder, rank=8, seed=9).factors
    mixed = {
        name: Factors(wide[name].a, wide[name].b, 0.5) if "mlp" in name else Factors(f.a, f.b, 2.0)
        for name, f in narrow.items()
    }
    served.run(served.engine.load(Adapter(mixed), 8))
    wanted = Reference(served.folder, Adapter(mixed)).logprobs([PROMPT])[0]
    assert np.abs(served.run(served.engine.score(PROMPT)) - wanted).max() < GAP


def test_an_adapter_of_some_modules_changes_those_alone(served: Served) -> None:
    some = {name: f for name, f in random_adapter(served.folder, 8, 10).factors.items() if name.endswith("q_proj")}
    served.load(seed=11, version=10)  # so that remains of the one before would show
    receipt = served.run(served.engine.load(Adapter(some), 11))
    assert receipt.matched_modules == 3
    wanted = Reference(served.folder, Adapter(some)).logprobs([PROMPT])[0]
    assert np.abs(served.run(served.engine.score(PROMPT)) - wanted).max() < GAP


@pytest.mark.parametrize("wrong", ["every name", "one name", "a shape", "not a number"])
def test_an_adapter_that_does_not_fit_is_refused_and_the_old_version_serves_on(served: Served, wrong: str) -> None:
    adapter = served.load(seed=13, version=20)
    factors = dict(random_adapter(served.folder, 8, 14).factors)
    first = sorted(factors)[0]
    told = {
        "every name": (Adapter({f"base.{name}": f for name, f in factors.items()}), "matched 0 of 21 modules"),
        "one name": (Adapter({**factors, "model.layers.9.mlp.up_proj": factors[first]}), "matched 21 of 22 modules"),
        "a shape": (
            Adapter({**factors, first: Factors(factors[first].a[:, :-1], factors[first].b, 1.0)}),
            "do not fit a layer",
        ),
        "not a number": (
            Adapter({**factors, first: Factors(factors[first].a * np.float32("nan"), factors[first].b, 1.0)}),
            "not finite",
        ),
    }
    bad, message = told[wrong]
    with pytest.raises(EngineError, match=message):
        served.run(served.engine.load(bad, 21))
    done = served.generate(PROMPT, Sampling(8, seed=1))
    assert set(done.versions.tolist()) == {20}
    wanted = Reference(served.folder, adapter).logprobs([[*PROMPT, *done.ids.tolist()]])[0][len(PROMPT) - 1 :]
    assert np.abs(wanted - done.logprobs).max() < GAP


def test_requests_in_flight_across_a_load_say_which_weights_sampled_each_token(served: Served) -> None:
    old = served.load(seed=15, version=30)
    new = random_adapter(served.folder, rank=8, seed=16)
    prompts = [[n + 3] * 200 for n in range(8)]  # together too much for one step, when they are computed again

    async def across() -> list[Completion]:
        flying = [
            asyncio.create_task(served.engine.generate(prompt, Sampling(200, seed=n), session=f"f{n}"))
            for n, prompt in enumerate(prompts)
        ]
        await asyncio.sleep(0.2)
        await served.engine.load(new, 31)
        late = await served.engine.generate(PROMPT, Sampling(5, seed=1), session="late")
        return [*await asyncio.gather(*flying), late]

    *completions, late = served.run(across())
    rows = [[*prompt, *done.ids.tolist()] for prompt, done in zip(prompts, completions, strict=True)]
    plain = {30: Reference(served.folder, old).logprobs(rows), 31: Reference(served.folder, new).logprobs(rows)}
    for n, done in enumerate(completions):
        assert len(done.ids) == 200
        wanted = [plain[version][n][199 + t] for t, version in enumerate(done.versions.tolist())]
        assert np.abs(np.asarray(wanted) - done.logprobs).max() < GAP
    assert set(late.versions.tolist()) == {31}
    before = {30} if served.facts.sync_mode == "adapter" else {30, 31}
    assert set(np.concatenate([done.versions for done in completions]).tolist()) == before


def test_a_row_scored_while_weights_change_is_scored_by_one_version(served: Served) -> None:
    old, row = served.load(seed=20, version=32), [(7 * i) % 2000 + 5 for i in range(500)]
    new = random_adapter(served.folder, rank=8, seed=21)

    async def across() -> list[Any]:
        return await asyncio.gather(*[served.engine.score(row) for _ in range(4)], served.engine.load(new, 33))

    *scores, _ = served.run(across())
    plain = [Reference(served.folder, adapter).logprobs([row])[0] for adapter in (old, new)]
    for score in scores:
        assert min(np.abs(score - wanted).max() for wanted in plain) < GAP


def test_the_same_seed_samples_the_same_and_others_differ(served: Served) -> None:
    served.load(seed=17, version=40)

    async def group() -> list[tuple[int, ...]]:
        requests = [served.engine.generate(PROMPT, Sampling(24, seed=n), session=f"g{n}") for n in range(8)]
        return [tuple(done.ids.tolist()) for done in await asyncio.gather(*requests)]

    first = served.run(group())
    assert len(set(first)) == 8
    assert served.run(group()) == first
    alone = served.generate(PROMPT, Sampling(24, seed=5), session="alone")
    assert tuple(alone.ids.tolist()) == first[5]
    unseeded = {tuple(served.generate(PROMPT, Sampling(24)).ids.tolist()) for _ in range(4)}
    assert len(unseeded) == 4


def test_many_long_seeded_prompts_at_once_are_all_served(served: Served) -> None:
    # more tokens than any engine prefills in one step
    adapter = served.load(seed=19, version=42)
    prompts = [[(11 * n + i) % 2000 + 5 for i in range(400)] for n in range(12)]

    async def flood() -> list[Completion]:
        requests = [served.engine.generate(p, Sampling(6, seed=n), session=f"p{n}") for n, p in enumerate(prompts)]
        return await asyncio.gather(*requests)

    completions = served.run(flood())
    rows = [[*p, *done.ids.tolist()] for p, done in zip(prompts, completions, strict=True)]
    wanted = Reference(served.folder, adapter).logprobs(rows)
    for done, plain in zip(completions, wanted, strict=True):
        assert np.abs(plain[399:] - done.logprobs).max() < GAP


def test_any_of_several_stop_ids_ends_a_turn_and_is_its_last_token(served: Served) -> None:
    served.load(seed=18, version=41)
    free = served.generate(PROMPT, Sampling(30, seed=3))
    assert (free.finish, len(free.ids), len(free.logprobs), len(free.versions)) == (Finish.LENGTH, 30, 30, 30)
    stop = int(free.ids[12])
    at = free.ids.tolist().index(stop)
    done = served.generate(PROMPT, Sampling(30, seed=3, stop_ids=(2047, stop)))
    assert done.finish is Finish.STOP
    assert done.ids.tolist() == free.ids[: at + 1].tolist()
    exact = served.generate(PROMPT, Sampling(at + 1, seed=3, stop_ids=(stop,)))
    assert exact.finish is Finish.STOP  # the end token is sampled with the last token of the budget


def test_what_does_not_fit_is_refused_before_any_request(served: Served) -> None:
    full = served.generate([5] * (CONTEXT - 1), Sampling(1, seed=1))
    assert len(full.ids) == 1
    for prompt, sampling in (
        ([5] * CONTEXT, Sampling(1)),
        ([5] * 10, Sampling(CONTEXT)),
        ([5, 2048], Sampling(1)),
        ([-1], Sampling(1)),
        ([], Sampling(1)),
        ([5], Sampling(0)),
        ([5], Sampling(1, temperature=float("nan"))),
    ):
        with pytest.raises(ValueError, match=r"tokens|token id|temperature"):
            served.generate(prompt, sampling)
    assert len(served.run(served.engine.score([5] * CONTEXT))) == CONTEXT - 1


def test_twenty_loads_leave_no_more_than_the_versions_in_flight(served: Served) -> None:
    for n in range(20):
        served.load(seed=n, version=100 + n, scale=0.1)
    mine = list(MEMORY.glob(f"{FOLDER}{os.getpid()}-*"))
    assert len(mine) <= 2
    done = served.generate(PROMPT, Sampling(4, seed=1))
    assert set(done.versions.tolist()) == {119}


@pytest.mark.parametrize("served", VLLM, indirect=True)
def test_serving_leaves_the_base_and_the_environment_as_they_were(served: Served) -> None:
    weights = served.folder / "model.safetensors"
    again = make_tiny(served.folder.parent / "again", tie="adapter" not in served.kind) / "model.safetensors"
    assert hashlib.sha256(weights.read_bytes()).digest() == hashlib.sha256(again.read_bytes()).digest()
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in os.environ
    assert "vllm" not in os.environ.get("LD_PRELOAD", "")


@pytest.mark.parametrize("served", [VLLM[0]], indirect=True)
def test_adapters_of_dropped_versions_leave_vllms_memory(served: Served) -> None:
    held = served.run(served.engine._engine.list_loras())  # type: ignore[attr-defined]  # what it holds, by its word
    assert len(held) == 1


@pytest.mark.parametrize("served", [VLLM[0]], indirect=True)
def test_a_load_waits_for_the_oldest_version_in_flight(served: Served) -> None:
    served.load(seed=1, version=200)

    async def three() -> tuple[Completion, bool]:
        flying = asyncio.create_task(served.engine.generate(PROMPT, Sampling(250, seed=1), session="old"))
        await asyncio.sleep(0.1)
        await served.engine.load(random_adapter(served.folder, 8, 2), 201)
        early = flying.done()
        await served.engine.load(random_adapter(served.folder, 8, 3), 202)  # a third would drop 200's factors
        return await flying, early

    done, early = served.run(three())
    assert not early
    assert set(done.versions.tolist()) == {200}


@pytest.mark.parametrize("served", ["transformers", VLLM[0]], indirect=True)
def test_closing_answers_whoever_waits(served: Served) -> None:
    # the last test of each engine: it ends it
    async def close() -> list[Completion | BaseException]:
        flying = [
            asyncio.create_task(served.engine.generate(PROMPT, Sampling(400, seed=n), session=f"c{n}"))
            for n in range(3)
        ]
        await asyncio.sleep(0.1)
        started = time.perf_counter()
        await served.engine.close()
        answers = await asyncio.gather(*flying, return_exceptions=True)
        assert time.perf_counter() - started < 20
        return answers

    assert all(isinstance(answer, EngineError) for answer in served.run(close()))
    with pytest.raises(EngineError):
        served.generate(PROMPT, Sampling(1))
    served.run(served.engine.close())


@pytest.mark.parametrize("served", [VLLM[1]], indirect=True)
def test_the_death_of_vllms_process_answers_whoever_waits(served: Served) -> None:
    # the last test of this engine
    async def kill() -> list[Completion | BaseException]:
        flying = [
            asyncio.create_task(served.engine.generate(PROMPT, Sampling(400, seed=n), session=f"k{n}"))
            for n in range(3)
        ]
        await asyncio.sleep(0.1)
        for child in multiprocessing.active_children():
            child.kill()
        return await asyncio.wait_for(asyncio.gather(*flying, return_exceptions=True), 20)

    assert all(isinstance(answer, EngineError) for answer in served.run(kill()))
    with pytest.raises(EngineError):
        served.load(seed=1, version=300)
    with pytest.raises(EngineError, match="died"):
        served.generate(PROMPT, Sampling(1))
