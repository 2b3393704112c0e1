"""The scripted engine: what it says, and that it refuses, counts and stamps as an engine with a model does."""

from __future__ import annotations

import asyncio
import math
import subprocess
import sys

import numpy as np
import pytest

from palestra.envs.errors import EngineError
from palestra.rollout.adapters import Adapter, Factors
from palestra.rollout.engines.checks import UNPUBLISHED
from palestra.rollout.engines.scripted import Reply, ScriptedEngine
from palestra.rollout.types import Finish, Sampling

END = 1


def adapter(*names: str, fill: float = 1.0) -> Adapter:
    a, b = np.full((2, 4), fill, np.float32), np.full((3, 2), fill, np.float32)
    return Adapter({name: Factors(a, b, 0.5) for name in names or ("model.q_proj",)})


def letters(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def test_every_session_plays_its_turns_in_order() -> None:
    async def body() -> None:
        engine = ScriptedEngine(["ab", (7, 8)], encode=letters)
        asked = Sampling(10, stop_ids=(END,))
        for session in ("one", "two"):
            first = await engine.generate([5], asked, session=session)
            second = await engine.generate([5, 6], asked, session=session)
            assert first.ids.tolist() == [97, 98, END]
            assert second.ids.tolist() == [7, 8, END]
            assert first.finish is second.finish is Finish.STOP
        with pytest.raises(ValueError, match="its script has 2"):
            await engine.generate([5], asked, session="one")
        await engine.end_session("one")
        assert (await engine.generate([5], asked, session="one")).ids.tolist() == [97, 98, END]
        assert engine.calls["generate"] == 6
        assert engine.requests[1].prompt == (5, 6)

    asyncio.run(body())


def test_scripts_by_session_and_by_function() -> None:
    async def body() -> None:
        asked = Sampling(10, stop_ids=(END,))
        named = ScriptedEngine({"a": [(3,)], "b": [(4,)]})
        assert (await named.generate([5], asked, session="b")).ids.tolist() == [4, END]
        echo = ScriptedEngine(lambda prompt, session, turn: [prompt[-1] + turn])
        assert [(await echo.generate([9], asked, session="s")).ids[0] for _ in range(3)] == [9, 10, 11]

    asyncio.run(body())


def test_a_long_turn_is_cut_and_a_stop_id_inside_ends_it() -> None:
    async def body() -> None:
        engine = ScriptedEngine(lambda prompt, session, turn: (3, 4, 5, 6))
        cut = await engine.generate([2], Sampling(2, stop_ids=(END,)), session="s")
        assert (cut.ids.tolist(), cut.finish) == ([3, 4], Finish.LENGTH)
        ended = await engine.generate([2], Sampling(9, stop_ids=(8, 5)), session="s")
        assert (ended.ids.tolist(), ended.finish) == ([3, 4, 5], Finish.STOP)
        exact = await engine.generate([2], Sampling(4, stop_ids=(END,)), session="s")
        assert (exact.ids.tolist(), exact.finish) == ([3, 4, 5, 6], Finish.LENGTH)
        with pytest.raises(ValueError, match="no stop ids"):
            await engine.generate([2], Sampling(9), session="s")

    asyncio.run(body())


def test_logprobs_are_constant_given_or_computed_from_ids_and_version() -> None:
    async def body() -> None:
        asked = Sampling(9, stop_ids=(END,))
        constant = ScriptedEngine([(3, 4)])
        assert np.allclose((await constant.generate([2], asked, session="s")).logprobs, math.log(0.5))
        given = ScriptedEngine([Reply((3, 4, END), logprobs=(-0.1, -0.2, -0.3))])
        assert (await given.generate([2], asked, session="s")).logprobs == pytest.approx([-0.1, -0.2, -0.3])
        short = ScriptedEngine([Reply((3, 4), logprobs=(-0.1,))])
        with pytest.raises(ValueError, match="log-probabilities for 3 tokens"):
            await short.generate([2], asked, session="s")
        computed = ScriptedEngine(
            [(3, 4)], logprobs=lambda ids, version, temperature: [-0.01 * i * version for i in ids[1:]]
        )
        await computed.load(adapter(), 10)
        assert (await computed.generate([2, 9], asked, session="s")).logprobs == pytest.approx([-0.3, -0.4, -0.1])
        assert (await computed.score([2, 3])).tolist() == pytest.approx([-0.3])

    asyncio.run(body())


def test_loads_are_proved_rejected_and_stamped() -> None:
    async def body() -> None:
        engine = ScriptedEngine(lambda p, s, t: (3,), modules=("model.q_proj", "model.k_proj"), rejected=(3,))
        asked = Sampling(9, stop_ids=(END,))
        assert (await engine.generate([2], asked, session="s")).versions.tolist() == [UNPUBLISHED] * 2
        sent = adapter("model.q_proj", fill=2.0)
        receipt = await engine.load(sent, 2)
        assert (receipt.version, receipt.digest, receipt.matched_modules) == (2, sent.digest(), 1)
        for bad, message in (
            (adapter("base.model.q_proj"), "matched 0 of 1 modules"),
            (adapter("model.q_proj", "model.o_proj"), "matched 1 of 2 modules"),
            (adapter("model.q_proj", fill=math.inf), "not finite"),
            (Adapter({}), "names no module"),
        ):
            with pytest.raises(EngineError, match=message):
                await engine.load(bad, 4)
        with pytest.raises(EngineError, match="rejected"):
            await engine.load(sent, 3)
        assert (await engine.generate([2], asked, session="s")).versions.tolist() == [2, 2]

    asyncio.run(body())


def test_a_request_in_flight_keeps_its_version() -> None:
    async def body() -> None:
        engine = ScriptedEngine([Reply((3,), delay_s=0.05)])
        await engine.load(adapter(), 1)
        flying = asyncio.create_task(engine.generate([2], Sampling(9, stop_ids=(END,)), session="s"))
        await asyncio.sleep(0.01)
        await engine.load(adapter(), 2)
        assert (await flying).versions.tolist() == [1, 1]

    asyncio.run(body())


def test_failing_stalling_and_dying() -> None:
    async def body() -> None:
        asked = Sampling(9, stop_ids=(END,))
        script = [Reply((3,), error="out of memory"), Reply((3,), delay_s=math.inf), Reply((3,), delay_s=0.05)]
        engine = ScriptedEngine(script, request_timeout_s=0.1)
        with pytest.raises(EngineError, match="out of memory"):
            await engine.generate([2], asked, session="s")
        with pytest.raises(EngineError, match=r"no answer within 0\.1 s"):
            await engine.generate([2], asked, session="s")
        flying = asyncio.create_task(engine.generate([2], asked, session="s"))
        await asyncio.sleep(0.01)
        engine.die()
        for call in (flying, engine.score([1, 2]), engine.load(adapter(), 1), engine.end_session("s")):
            with pytest.raises(EngineError, match="gone"):
                await call
        await engine.close()
        await engine.close()

    asyncio.run(body())


def test_what_does_not_fit_is_refused() -> None:
    async def body() -> None:
        engine = ScriptedEngine([(3,)], context_tokens=256, vocab=10)
        with pytest.raises(ValueError, match="make 274"):
            await engine.generate([2] * 273, Sampling(1), session="s")
        with pytest.raises(ValueError, match="outside the vocabulary"):
            await engine.generate([10], Sampling(1), session="s")
        assert len((await engine.generate([2] * 255, Sampling(1), session="s")).ids) == 1

    asyncio.run(body())


def test_it_needs_no_torch() -> None:
    code = "import sys, palestra.rollout.engines.scripted; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
