"""A pool of engines: who is served where, what a publish proves, and what a death costs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from palestra.envs.errors import EngineError, IntegrityError
from palestra.rollout.players import PlayerPool
from palestra.rollout.pool import EnginePool
from palestra.rollout.replicas import Limits, Replicas
from palestra.rollout.types import Sampling
from wilful_engine import WilfulEngine, WilfulPlayer, Will, adapter

FAST = Limits(start_s=2, load_s=0.3, request_s=0.3, close_s=0.3, attempts=3, strikes=3, replacements=3, backoff_s=0.01)
ASK = Sampling(max_tokens=3)


class Stage:
    """Engines by seat, in the order in which they were made, each with the next will of its seat's list."""

    def __init__(self, *wills: Will | list[Will]) -> None:
        self.wills = [will if isinstance(will, list) else [will] for will in wills]
        self.made: list[list[WilfulEngine]] = [[] for _ in wills]

    def make(self, index: int) -> WilfulEngine:
        life = len(self.made[index])
        wills = self.wills[index]
        self.made[index].append(WilfulEngine(wills[life] if life < len(wills) else Will()))
        return self.made[index][-1]


def play(
    stage: Stage, body: Callable[[EnginePool], Awaitable[None]], limits: Limits = FAST, *, started: bool = True
) -> None:
    async def run() -> None:
        pool = EnginePool(Replicas("engine", len(stage.wills), stage.make, limits))
        if started:
            await pool.start()
        try:
            async with asyncio.timeout(20):
                await body(pool)
        finally:
            await pool.close()
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}, "the pool left tasks behind"

    asyncio.run(run())


def test_a_session_stays_on_its_replica_and_a_new_one_goes_to_the_emptiest() -> None:
    stage = Stage(Will(), Will(), Will())

    async def body(pool: EnginePool) -> None:
        for _ in range(4):
            for session in "abcdef":
                await pool.generate([1, 2], ASK, session=session)
        assert [len(set(seat[0].served)) for seat in stage.made] == [2, 2, 2]
        assert pool.counters().sessions == (2, 2, 2)
        await pool.end_session("a")
        await pool.end_session("a")
        assert stage.made[0][0].ended == ["a"]
        await pool.generate([1], ASK, session="g")
        assert stage.made[0][0].served[-1] == "g"

    play(stage, body)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 7), st.booleans()), max_size=60))
def test_no_order_of_turns_and_endings_moves_a_living_session_or_unbalances_the_seats(
    events: list[tuple[int, bool]],
) -> None:
    stage = Stage(Will(), Will(), Will())

    async def body(pool: EnginePool) -> None:
        live: set[str] = set()
        for number, ends in events:
            session = f"s{number}"
            if ends:
                live.discard(session)
                await pool.end_session(session)
            else:
                if session not in live:
                    emptiest = min(pool.counters().sessions)
                    await pool.generate([1], ASK, session=session)
                    assert sum(pool.counters().sessions) == len(live) + 1
                    assert emptiest + 1 in pool.counters().sessions
                    live.add(session)
                else:
                    before = pool.counters().sessions
                    await pool.generate([1], ASK, session=session)
                    assert pool.counters().sessions == before
        assert sum(pool.counters().sessions) == len(live)

    play(stage, body)


def test_a_publish_returns_one_right_receipt_for_each_seat() -> None:
    stage = Stage(Will(), Will())

    async def body(pool: EnginePool) -> None:
        assert pool.version is None
        receipts = await pool.publish(adapter(1.0), 1)
        assert [(r.version, r.digest, r.matched_modules) for r in receipts] == [(1, adapter(1.0).digest(), 7)] * 2
        assert pool.version == 1
        assert (await pool.load(adapter(2.0), 2)).version == 2
        scores = await pool.score_each([5, 6, 7])
        assert [list(s) for s in scores] == [[2.0, 2.0], [2.0, 2.0]]

    play(stage, body)


def test_an_engine_that_refuses_once_is_asked_again_and_kept() -> None:
    stage = Stage(Will(), Will(refuses_loads=1))

    async def body(pool: EnginePool) -> None:
        await pool.publish(adapter(1.0), 1)
        assert pool.counters().replacements == 0
        assert stage.made[1][0].loads == [1]

    play(stage, body)


def test_an_update_that_every_engine_refuses_leaves_the_old_version_in_force() -> None:
    stage = Stage(Will(), Will())

    async def body(pool: EnginePool) -> None:
        await pool.publish(adapter(2.0), 2)
        for seat in stage.made:
            seat[0].will.refuses_loads = 2
        with pytest.raises(EngineError, match=r"no replica took version 3, version 2 is still in force.*no room"):
            await pool.publish(adapter(3.0), 3)
        assert pool.version == 2
        completion = await pool.generate([1, 2], ASK, session="a")
        assert list(completion.versions) == [2, 2]
        assert pool.counters().replacements == 0
        await pool.publish(adapter(3.0), 3)  # and the pool goes on
        assert pool.version == 3

    play(stage, body)


def test_an_engine_that_stays_behind_serves_nothing_until_a_fresh_one_has_proved_the_version_in_force() -> None:
    stage = Stage(Will(), Will())

    async def body(pool: EnginePool) -> None:
        await pool.publish(adapter(2.0), 2)
        for session in "ab":
            await pool.generate([1], ASK, session=session)
        stage.made[1][0].will.refuses_loads = 2
        served_before = len(stage.made[1][0].served)
        receipts = await pool.publish(adapter(3.0), 3)
        assert [r.version for r in receipts] == [3, 3]
        assert pool.counters().replacements == 1
        for session in "abcdef":
            assert list((await pool.generate([1], ASK, session=session)).versions) == [3]
        assert len(stage.made[1][0].served) == served_before
        assert stage.made[1][0].closed
        assert stage.made[1][1].loads == [3]

    play(stage, body)


@pytest.mark.parametrize("lie", [{"wrong_digest": True}, {"modules": 0}])
def test_a_wrong_proof_from_every_engine_stops_the_run_and_the_liars_serve_nothing(lie: dict[str, int]) -> None:
    stage = Stage(Will(), Will())

    async def body(pool: EnginePool) -> None:
        await pool.publish(adapter(2.0), 2)
        for seat in stage.made:
            for name, value in lie.items():
                setattr(seat[0].will, name, value)
        with pytest.raises(IntegrityError, match="published was version 3 with digest"):
            await pool.publish(adapter(3.0), 3)
        assert pool.version == 2
        assert list((await pool.generate([1], ASK, session="a")).versions) == [2]
        assert {seat[0].closed for seat in stage.made} == {True}

    play(stage, body)


def test_an_engine_that_bound_fewer_modules_than_the_others_is_replaced() -> None:
    stage = Stage(Will(), Will(modules=6))

    async def body(pool: EnginePool) -> None:
        receipts = await pool.publish(adapter(1.0), 1)
        assert [r.matched_modules for r in receipts] == [7, 7]
        assert pool.counters().replacements == 1

    play(stage, body)


def test_requests_on_a_dying_engine_are_answered_by_another_and_the_seat_is_filled() -> None:
    stage = Stage(Will(), Will())

    async def body(pool: EnginePool) -> None:
        await pool.publish(adapter(1.0), 1)
        stage.made[0][0].will.dies = True
        answers = await asyncio.gather(*(pool.generate([n], ASK, session=f"s{n}") for n in range(8)))
        assert [int(a.ids[0]) for a in answers] == list(range(8))
        await pool.score_each([1, 2])
        counters = pool.counters()
        assert counters.replacements == 1
        assert counters.retries == 4
        assert counters.in_flight == 0
        fresh = stage.made[0][1]
        assert fresh.loads == [1]
        await pool.generate([1], ASK, session="new")
        assert fresh.will.versions_at_first_service in ([1], [])

    play(stage, body)


def test_an_engine_that_does_not_answer_in_time_counts_as_dead_and_all_its_requests_move_at_once() -> None:
    stage = Stage(Will(), Will(stalls=True))

    async def body(pool: EnginePool) -> None:
        started = asyncio.get_running_loop().time()
        await asyncio.gather(*(pool.generate([n], ASK, session=f"s{n}") for n in range(6)))
        assert asyncio.get_running_loop().time() - started < 3 * FAST.request_s
        assert stage.made[1][0].running == 0
        assert pool.counters().replacements == 1

    play(stage, body)


def test_one_bad_moment_costs_a_retry_and_three_in_a_row_cost_the_engine_its_seat() -> None:
    stage = Stage(Will(fails=1), Will())

    async def body(pool: EnginePool) -> None:
        await pool.generate([1], ASK, session="a")
        assert pool.counters().replacements == 0
        stage.made[0][0].will.fails = 3
        for session in "bcdefgh":
            await pool.generate([1], ASK, session=session)
        assert stage.made[0][0].closed is (pool.counters().replacements == 1)

    play(stage, body)


def test_a_request_that_fails_everywhere_says_where_and_why_each_time() -> None:
    stage = Stage(Will(fails=9), Will(fails=9))

    async def body(pool: EnginePool) -> None:
        with pytest.raises(EngineError, match="3 tries; replica 0: a bad moment; replica 1: a bad"):
            await pool.generate([1], ASK, session="a")

    play(stage, body)


def test_when_the_replacements_are_used_up_the_last_cause_is_told_and_nobody_waits() -> None:
    async def body() -> None:
        limits = Limits(start_s=5, load_s=5, request_s=1, attempts=9, replacements=2, backoff_s=0.01)
        pool = EnginePool(Replicas("engine", 1, lambda index: WilfulEngine(Will(dies=True)), limits))
        await pool.start()
        with pytest.raises(EngineError, match=r"(?s)all 2 replacements of this pool are used up.*process is dead"):
            await pool.generate([1], ASK, session="a")
        with pytest.raises(EngineError, match="used up"):
            await pool.publish(adapter(1.0), 1)
        await pool.close()

    asyncio.run(body())


def test_a_replacement_that_fails_to_start_is_tried_again() -> None:
    stage = Stage([Will(), Will(fails_to_start=1)], [Will()])

    async def body(pool: EnginePool) -> None:
        stage.made[0][0].will.dies = True
        await pool.generate([1], ASK, session="a")
        await pool.score_each([1, 2])
        assert pool.counters().replacements == 2

    play(stage, body)


def test_a_failed_start_closes_the_engines_that_had_started() -> None:
    stage = Stage(Will(), Will(fails_to_start=1))

    async def body(pool: EnginePool) -> None:
        with pytest.raises(EngineError, match="no memory for the weights"):
            await pool.start()
        assert stage.made[0][0].closed

    play(stage, body, started=False)


def test_engines_that_are_not_alike_make_no_pool() -> None:
    stage = Stage(Will(), Will(context_tokens=64))

    async def body(pool: EnginePool) -> None:
        with pytest.raises(EngineError, match="must be alike"):
            await pool.start()

    play(stage, body, started=False)


def test_a_cancelled_request_is_cancelled_in_the_engine_and_costs_nobody_a_seat() -> None:
    stage = Stage(Will(stalls=True))

    async def body(pool: EnginePool) -> None:
        tasks = [asyncio.create_task(pool.generate([1], ASK, session=f"s{n}")) for n in range(8)]
        await asyncio.sleep(0.05)
        assert stage.made[0][0].running == 8
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)
        assert stage.made[0][0].running == 0
        assert pool.counters().in_flight == 0
        assert pool.counters().replacements == 0

    play(stage, body)


def test_a_replica_that_is_being_replaced_during_a_publish_comes_back_with_the_new_version() -> None:
    stage = Stage(Will(), Will())

    async def body(pool: EnginePool) -> None:
        await pool.publish(adapter(1.0), 1)
        stage.made[1][0].will.dies = True
        _, receipts = await asyncio.gather(pool.generate([1], ASK, session="x"), pool.publish(adapter(2.0), 2))
        assert [r.version for r in receipts] == [2, 2]
        assert [list(s) for s in await pool.score_each([1, 2])] == [[2.0], [2.0]]

    play(stage, body)


def test_a_value_error_of_an_engine_reaches_the_caller_untouched() -> None:
    stage = Stage(Will(context_tokens=4), Will(context_tokens=4))

    async def body(pool: EnginePool) -> None:
        with pytest.raises(ValueError, match="5 tokens and 3 more do not fit into 4"):
            await pool.generate([1] * 5, ASK, session="a")
        assert pool.counters().retries == 0
        assert pool.counters().in_flight == 0

    play(stage, body)


def test_players_share_the_work_and_a_stalled_one_is_told_to_its_caller_and_replaced() -> None:
    made: list[WilfulPlayer] = []

    def make(index: int) -> WilfulPlayer:
        made.append(WilfulPlayer())
        return made[-1]

    async def body() -> None:
        replicas = Replicas("player", 2, make, FAST)
        engines, players = EnginePool(replicas), PlayerPool(replicas, run_s=0.2)
        await engines.start()
        await players.start()
        await engines.publish(adapter(4.0), 4)
        assert await asyncio.gather(*(players.run("0.01") for _ in range(6))) == ["played for 0.01 s"] * 6
        with pytest.raises(ValueError, match="no such task"):
            await players.run("complain")
        with pytest.raises(EngineError, match=r"no answer within 0.2 s"):
            await players.run("5")
        await replicas.whole()
        assert [player.version for player in made] == [4, 4, 4]
        assert engines.counters().replacements == 1
        assert await players.close() == 0

    asyncio.run(body())


def test_a_pool_of_one_answers_as_its_engine_does() -> None:
    stage = Stage(Will())

    async def body(pool: EnginePool) -> None:
        plain = await WilfulEngine().generate([4, 5, 6, 7], ASK, session="a")
        pooled = await pool.generate([4, 5, 6, 7], ASK, session="a")
        assert np.array_equal(plain.ids, pooled.ids)
        assert np.array_equal(plain.versions, pooled.versions)

    play(stage, body)
