"""The pool: bounded, fair, clean, and empty at the end; with scripted boxes, and with real ones for the whole way."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from palestra.envs.errors import SandboxError
from palestra.envs.sandboxes.contract import BoxClosed, BoxSpec, EngineAway, Exec, Limits, Sandbox
from palestra.envs.sandboxes.pool import PoolSettings, SandboxPool
from palestra.envs.sandboxes.scripted import ScriptedSandbox, Trouble
from palestra.envs.sandboxes.waiting import Quantiles, TokenBucket, Waits
from sandbox_support import DOCKER, NAMESPACE, SPEC, backend

OTHER = BoxSpec(limits=Limits(processes=5))


class ScriptedBackend:
    """Makes boxes in memory, counts what it has going on, and fails when it is told to."""

    name = "scripted"
    unenforced: tuple[str, ...] = ()

    def __init__(self, making_s: float = 0.001) -> None:
        self.making_s = making_s
        self.boxes: list[ScriptedSandbox] = []
        self.closed: list[str] = []
        self.making = self.most_making = self.made = 0
        self.failures = 0  # how many of the next ones fail

    async def open(self, spec: BoxSpec, *, episode: str) -> Sandbox:
        self.making += 1
        self.most_making = max(self.making, self.most_making)
        try:
            await asyncio.sleep(self.making_s)
            if self.failures:
                self.failures -= 1
                raise SandboxError("the engine has the hiccups")
        finally:
            self.making -= 1
        self.made += 1
        box = _Counted(self, f"box-{self.made}")
        self.boxes.append(box)
        return box

    async def owned(self) -> list[str]:
        return [box.id for box in self.boxes if box.id not in self.closed]

    async def sweep(self) -> None:
        self.closed += await self.owned()


class _Counted(ScriptedSandbox):
    def __init__(self, home: ScriptedBackend, id: str) -> None:
        super().__init__(lambda command, files: Exec(exit_code=0), id=id)
        self.home = home

    async def close(self) -> None:
        await asyncio.sleep(0)
        self.home.closed.append(self.id)
        await super().close()


def settings(max_boxes: int, creating: int = 4, acquire_s: float = 5.0) -> PoolSettings:
    return PoolSettings(run="t", max_boxes=max_boxes, creating=creating, acquire_s=acquire_s)


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0.001)


async def until(done: Callable[[], bool]) -> None:
    for _ in range(2000):
        if done():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it did not come to be")


def test_a_box_comes_with_its_files_and_comes_back_clean() -> None:
    async def body() -> None:
        made = ScriptedBackend()
        async with SandboxPool(settings(2), made) as pool:
            first = await pool.acquire(BoxSpec(), {"a": b"1"}, episode="e1")
            assert await first.read("a", 10) == b"1"
            await first.write("left", b"x")
            await pool.release(first)
            await settled()
            second = await pool.acquire(BoxSpec(), {}, episode="e2")
            assert second.id == first.id
            with pytest.raises(BoxClosed, match="given back"):
                await first.run(["true"], timeout_s=1)
            with pytest.raises(FileNotFoundError):
                await second.read("left", 10)
            assert (pool.counts.created, pool.counts.reused, pool.counts.acquired) == (1, 1, 2)
        assert pool.leaked() == 0
        assert await made.owned() == []

    asyncio.run(body())


def test_never_more_boxes_than_the_maximum_and_never_more_in_the_making_than_allowed() -> None:
    async def body() -> None:
        made = ScriptedBackend(making_s=0.005)
        async with SandboxPool(settings(8, creating=3), made) as pool:

            async def episode(n: int) -> None:
                box = await pool.acquire(BoxSpec(), {"n": b"%d" % n}, episode=str(n))
                await asyncio.sleep(0.002)
                assert await box.read("n", 10) == b"%d" % n
                await pool.release(box)

            await asyncio.gather(*(episode(n) for n in range(100)))
            assert made.made == 8
            assert made.most_making == 3
            assert pool.counts.acquired == 100
            assert pool.counts.longest_wait_s > 0

    asyncio.run(body())


def test_who_waits_longest_is_served_first_also_across_kinds_of_boxes() -> None:
    async def body() -> None:
        order: list[str] = []
        async with SandboxPool(settings(1), ScriptedBackend()) as pool:

            async def episode(spec: BoxSpec, name: str) -> None:
                box = await pool.acquire(spec, {}, episode=name)
                order.append(name)
                await asyncio.sleep(0.002)
                await pool.release(box)

            wanted = [(BoxSpec(), "a"), (OTHER, "b"), (BoxSpec(), "c"), (OTHER, "d"), (BoxSpec(), "e")]
            tasks = []
            for spec, name in wanted:
                tasks.append(asyncio.ensure_future(episode(spec, name)))
                await asyncio.sleep(0)
            await asyncio.gather(*tasks)
        assert order == ["a", "b", "c", "d", "e"]

    asyncio.run(body())


def test_a_box_that_cannot_be_reset_is_replaced_and_counted() -> None:
    async def body() -> None:
        made = ScriptedBackend()
        async with SandboxPool(settings(2), made) as pool:
            box = await pool.acquire(BoxSpec(), {}, episode="e1")
            made.boxes[0].trouble = Trouble.FAIL
            await pool.release(box)
            await settled()
            assert pool.counts.replaced == 1
            assert made.closed == ["box-1"]
            assert made.made == 2  # a new one was made before anyone asked
            other = await pool.acquire(BoxSpec(), {}, episode="e2")
            assert other.id == "box-2"

    asyncio.run(body())


def test_a_box_that_breaks_under_an_acquire_is_replaced_without_the_caller_seeing_it() -> None:
    async def body() -> None:
        made = ScriptedBackend()
        async with SandboxPool(settings(2), made) as pool:
            await pool.release(await pool.acquire(BoxSpec(), {}, episode="e1"))
            await settled()
            made.boxes[0].trouble = Trouble.DIE
            box = await pool.acquire(BoxSpec(), {"a": b"1"}, episode="e2")
            assert box.id == "box-2"
            assert pool.counts.replaced == 1

    asyncio.run(body())


def test_a_box_that_cannot_be_made_fails_one_and_serves_the_others() -> None:
    async def body() -> None:
        made = ScriptedBackend()
        made.failures = 2
        async with SandboxPool(settings(2), made) as pool:
            asked = [pool.acquire(BoxSpec(), {}, episode=str(n)) for n in range(4)]
            got = await asyncio.gather(*asked, return_exceptions=True)
            assert Counter(isinstance(one, SandboxError) for one in got) == {True: 2, False: 2}

    asyncio.run(body())


def test_waiting_has_a_deadline_that_says_what_it_waited_for() -> None:
    async def body() -> None:
        async with SandboxPool(settings(1, acquire_s=0.5), ScriptedBackend()) as pool:
            await pool.acquire(BoxSpec(), {}, episode="e1")
            with pytest.raises(SandboxError, match=r"no box for e2 within 0\.5 s: 1 of 1 are lent"):
                await pool.acquire(BoxSpec(), {}, episode="e2")

    asyncio.run(body())


@pytest.mark.parametrize("steps", range(12))
def test_a_cancelled_acquire_gives_its_box_back_wherever_it_was(steps: int) -> None:
    async def body() -> None:
        made = ScriptedBackend(making_s=0)
        async with SandboxPool(settings(1), made) as pool:
            asking = asyncio.ensure_future(pool.acquire(BoxSpec(), {"a": b"1"}, episode="e1"))
            for _ in range(steps):
                await asyncio.sleep(0)
            asking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await pool.release(await asking)
            box = await pool.acquire(BoxSpec(), {}, episode="e2")
            await pool.release(box)
        assert await made.owned() == []

    asyncio.run(body())


def test_boxes_are_made_ahead_when_asked_for() -> None:
    async def body() -> None:
        made = ScriptedBackend()
        async with SandboxPool(settings(3), made) as pool:
            pool.warm(BoxSpec(), 2)
            pool.warm(BoxSpec(), 2)
            await settled()
            assert made.made == 2
            pool.warm(BoxSpec(), 10)
            await settled()
            assert made.made == 3

    asyncio.run(body())


def test_an_old_box_is_replaced_when_it_comes_back() -> None:
    async def body() -> None:
        now = [0.0]
        made = ScriptedBackend()
        async with SandboxPool(settings(1), made, clock=lambda: now[0]) as pool:
            await pool.release(await pool.acquire(BoxSpec(), {}, episode="e1"))
            await settled()
            box = await pool.acquire(BoxSpec(), {}, episode="e2")
            assert box.id == "box-1"
            now[0] = 100_000.0
            await pool.release(box)
            assert (await pool.acquire(BoxSpec(), {}, episode="e3")).id == "box-2"
            assert pool.counts.replaced == 0

    asyncio.run(body())


def test_closing_removes_idle_lent_and_half_made_boxes_and_refuses_who_waits() -> None:
    async def body() -> None:
        made = ScriptedBackend(making_s=0.3)
        pool = SandboxPool(settings(2), made)
        await pool.start()
        await pool.acquire(BoxSpec(), {}, episode="e1")
        asking = [asyncio.ensure_future(pool.acquire(BoxSpec(), {}, episode=str(n))) for n in range(3)]
        await asyncio.sleep(0.001)
        await pool.close()
        await pool.close()
        for one in asking:
            with pytest.raises(BoxClosed):
                await one
        with pytest.raises(BoxClosed):
            await pool.acquire(BoxSpec(), {}, episode="late")
        assert await made.owned() == []
        assert pool.leaked() == 0

    asyncio.run(body())


def test_a_box_given_back_twice_or_unknown_is_left_alone() -> None:
    async def body() -> None:
        async with SandboxPool(settings(2), ScriptedBackend()) as pool:
            box = await pool.acquire(BoxSpec(), {}, episode="e1")
            await pool.release(box)
            await pool.release(box)
            await pool.release(ScriptedSandbox())
            await settled()
            first = await pool.acquire(BoxSpec(), {}, episode="e2")
            second = await pool.acquire(BoxSpec(), {}, episode="e3")
            assert first.id != second.id

    asyncio.run(body())


def test_the_settings_fill_in_what_a_spec_leaves_open() -> None:
    async def body() -> None:
        seen: list[BoxSpec] = []

        class Noting(ScriptedBackend):
            async def open(self, spec: BoxSpec, *, episode: str) -> Sandbox:
                seen.append(spec)
                return await super().open(spec, episode=episode)

        own = PoolSettings(run="t", limits=Limits(processes=7))
        async with SandboxPool(own, Noting()) as pool:
            await pool.acquire(BoxSpec(), {}, episode="e1")
            await pool.acquire(OTHER, {}, episode="e2")
        assert [spec.limits.processes for spec in seen] == [7, 5]

    asyncio.run(body())


class Slow(ScriptedBackend):
    """Boxes whose commands take a moment, and a count of how many run at once."""

    def __init__(self) -> None:
        super().__init__()
        self.running = self.most_running = 0
        self.order: list[str] = []

    async def open(self, spec: BoxSpec, *, episode: str) -> Sandbox:
        box = await super().open(spec, episode=episode)
        run = box.run

        async def slowly(argv: Sequence[str], **settings: Any) -> Exec:
            self.running += 1
            self.most_running = max(self.most_running, self.running)
            self.order.append(box.id)
            await asyncio.sleep(0.002)
            self.running -= 1
            return await run(argv, **settings)

        box.run = slowly  # type: ignore[method-assign]
        return box


def test_commands_take_turns_and_a_box_with_many_holds_up_no_other() -> None:
    async def body() -> None:
        made = Slow()
        async with SandboxPool(replace(settings(4), executing=2), made) as pool:
            greedy, *others = [await pool.acquire(BoxSpec(), {}, episode=str(n)) for n in range(4)]
            many = [asyncio.ensure_future(greedy.run(["true"], timeout_s=1)) for _ in range(40)]
            await asyncio.sleep(0)
            await asyncio.gather(*(other.run(["true"], timeout_s=1) for other in others))
            assert made.order.count(greedy.id) <= 4  # though its forty were asked for first
            await asyncio.gather(*many)
            assert made.most_running == 2
            waits = pool.waits()["command"]
            assert waits.count == 43
            assert 0 <= waits.p50 <= waits.p95 <= waits.longest
            assert pool.waits()["box"].count == 4

    asyncio.run(body())


def test_a_command_waits_for_its_turn_no_longer_than_the_deadline() -> None:
    async def body() -> None:
        async with SandboxPool(replace(settings(2, acquire_s=0.5), executing=1), Slow()) as pool:
            boxes = [await pool.acquire(BoxSpec(), {}, episode=str(n)) for n in range(2)]
            made = pool.backend.boxes  # type: ignore[attr-defined]
            made[0].trouble = Trouble.STALL
            stalled = asyncio.ensure_future(boxes[0].run(["true"], timeout_s=1.5))
            await asyncio.sleep(0.001)
            with pytest.raises(SandboxError, match=r"no turn for a command within 0\.5 s; 1 run at once"):
                await boxes[1].run(["true"], timeout_s=1)
            with pytest.raises(SandboxError, match="no answer"):
                await stalled
            assert (await boxes[1].run(["true"], timeout_s=1)).ok  # the turn was given back

    asyncio.run(body())


def test_a_box_that_is_given_back_under_a_command_is_replaced() -> None:
    """Row I13: nobody waits for the command, and nobody who kept the box reaches it again."""

    async def body() -> None:
        made = Slow()
        async with SandboxPool(settings(2), made) as pool:
            box = await pool.acquire(BoxSpec(), {}, episode="e1")
            running = asyncio.ensure_future(box.run(["true"], timeout_s=1))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            await pool.release(box)
            await settled()
            assert made.closed == ["box-1"]
            assert pool.counts.replaced == 1
            with pytest.raises(BoxClosed):
                await running
            for call in (box.read("a", 1), box.write("a", b""), box.reset(), box.digest()):
                with pytest.raises(BoxClosed, match="given back"):
                    await call
            await box.close()
            assert (await pool.acquire(BoxSpec(), {}, episode="e2")).id == "box-2"

    asyncio.run(body())


def test_a_handle_of_an_earlier_loan_gives_nothing_back() -> None:
    async def body() -> None:
        async with SandboxPool(settings(1), ScriptedBackend()) as pool:
            first = await pool.acquire(BoxSpec(), {}, episode="e1")
            await pool.release(first)
            second = await pool.acquire(BoxSpec(), {}, episode="e2")
            assert second.id == first.id
            await pool.release(first)
            assert (await second.run(["true"], timeout_s=1)).ok

    asyncio.run(body())


def test_a_box_that_served_a_policy_is_never_a_verifiers() -> None:
    async def body() -> None:
        async with SandboxPool(settings(1), ScriptedBackend()) as pool:
            used = set()
            for n in range(6):
                spec = BoxSpec(role="verifier" if n % 2 else "policy")
                box = await pool.acquire(spec, {}, episode=str(n))
                assert (box.id, spec.role == "policy") not in {(name, not mine) for name, mine in used}
                used.add((box.id, spec.role == "policy"))
                await pool.release(box)
            assert len({name for name, _ in used}) == 6

    asyncio.run(body())


def test_idle_boxes_follow_what_was_wanted_of_late() -> None:
    async def body() -> None:
        now = [0.0]
        made = ScriptedBackend()
        own = replace(settings(8), upkeep_s=0.01, demand_s=100.0)
        async with SandboxPool(own, made, clock=lambda: now[0]) as pool:
            boxes = [await pool.acquire(BoxSpec(), {}, episode=str(n)) for n in range(6)]
            for box in boxes:
                await pool.release(box)
            await asyncio.sleep(0.05)
            assert len(await made.owned()) == 6  # kept for the next ones
            now[0] = 150.0
            for _ in range(2):
                await pool.release(await pool.acquire(BoxSpec(), {}, episode="few"))
            await asyncio.sleep(0.05)
            assert len(await made.owned()) == 6  # the peak is not long ago
            now[0] = 260.0
            await until(lambda: len(made.closed) == 5)
            assert pool.counts.trimmed == 5
            now[0] = 1000.0
            await until(lambda: len(made.closed) == 6)

    asyncio.run(body())


def test_an_engine_that_is_away_is_asked_again_and_one_that_refuses_is_not() -> None:
    """Rows I10 and I11."""

    async def body() -> None:
        class Away(ScriptedBackend):
            error: SandboxError | None = EngineAway("no answer")
            tries = 0

            async def open(self, spec: BoxSpec, *, episode: str) -> Sandbox:
                self.tries += 1
                if self.error is not None:
                    raise self.error
                return await super().open(spec, episode=episode)

        made = Away()
        async with SandboxPool(settings(4), made) as pool:
            asked = [asyncio.ensure_future(pool.acquire(BoxSpec(), {}, episode=str(n))) for n in range(4)]
            await asyncio.sleep(0.2)
            assert 4 <= made.tries <= 16  # there are pauses, and they grow
            made.error = None
            assert len({box.id for box in await asyncio.gather(*asked)}) == 4
        made.error, made.tries = SandboxError("no image palestra/none:1"), 0
        async with SandboxPool(settings(4), made) as pool:
            with pytest.raises(SandboxError, match="no image"):
                await pool.acquire(BoxSpec(), {}, episode="e")
            assert made.tries == 1

    asyncio.run(body())


def test_boxes_are_begun_at_a_bounded_rate_in_order() -> None:
    now = [0.0]
    bucket = TokenBucket(10.0, 3, clock=lambda: now[0])
    assert [round(bucket.reserve(), 3) for _ in range(6)] == [0.0, 0.0, 0.0, 0.1, 0.2, 0.3]
    now[0] = 10.0
    assert [round(bucket.reserve(), 3) for _ in range(4)] == [0.0, 0.0, 0.0, 0.1]


def test_quantiles_of_waits_are_of_waits_that_were() -> None:
    waits = Waits()
    assert waits.quantiles().count == 0
    for n in range(1, 101):
        waits.add(float(n))
    assert waits.quantiles() == Quantiles(100, 50.0, 95.0, 100.0)


@pytest.mark.parametrize("at", range(1, 30))
def test_an_episode_cancelled_at_any_moment_leaves_a_whole_pool(at: int) -> None:
    """Row I04: the box is back or replaced, and the counts are exact."""

    async def body() -> None:
        made = ScriptedBackend(making_s=0)
        async with SandboxPool(settings(2), made) as pool:

            async def episode() -> None:
                box = await pool.acquire(BoxSpec(), {"a": b"1"}, episode="doomed")
                try:
                    await box.run(["true"], timeout_s=1)
                    await box.write("b", b"2")
                finally:
                    await pool.release(box)

            doomed = asyncio.ensure_future(episode())
            for _ in range(at):
                await asyncio.sleep(0)
            doomed.cancel()
            await asyncio.wait({doomed})
            await settled()
            boxes = [await pool.acquire(BoxSpec(), {}, episode=str(n)) for n in range(2)]
            for box in boxes:
                with pytest.raises(FileNotFoundError):
                    await box.read("b", 9)
            assert pool.counts.created - pool.counts.replaced == len(await made.owned())
        assert pool.leaked() == 0
        assert await made.owned() == []

    asyncio.run(body())


@pytest.mark.parametrize("kind", ["scripted", NAMESPACE, DOCKER])
def test_a_fork_has_the_state_of_its_box_and_goes_its_own_way(kind: str) -> None:
    async def body() -> None:
        made = ScriptedBackend() if kind == "scripted" else backend(kind)
        async with SandboxPool(settings(3, acquire_s=60.0), made) as pool:
            box = await pool.acquire(SPEC, {"a": b"1"}, episode="e1")
            await box.write("folder/b", b"2", mode=0o755)
            other = await pool.fork(box, episode="e1-fork")
            assert other.id != box.id
            assert await other.digest() == await box.digest()
            await other.write("a", b"changed")
            assert await box.read("a", 9) == b"1"
            assert await other.read("folder/b", 9) == b"2"
            assert pool.counts.forked == 1
            await pool.release(box)
            assert await other.read("a", 9) == b"changed"
            with pytest.raises(BoxClosed, match="not lent"):
                await pool.fork(box, episode="late")
        assert pool.leaked() == 0

    asyncio.run(body())


@pytest.mark.parametrize("trouble", [Trouble.FAIL, Trouble.DIE])
def test_a_fork_that_fails_gives_its_box_back(trouble: Trouble) -> None:
    async def body() -> None:
        made = ScriptedBackend()
        async with SandboxPool(settings(2), made) as pool:
            pool.warm(BoxSpec(), 2)
            await settled()
            box = await pool.acquire(BoxSpec(), {}, episode="e1")
            spare = next(one for one in made.boxes if one.id != box.id)
            spare.trouble = trouble
            with pytest.raises(SandboxError):
                await pool.fork(box, episode="e2")
            await settled()
            assert (await pool.acquire(BoxSpec(), {}, episode="e3")).id != box.id
            assert pool.counts.forked == 0

    asyncio.run(body())


@pytest.mark.parametrize("kind", [NAMESPACE, DOCKER])
def test_many_episodes_at_once_see_only_themselves_and_leave_nothing(kind: str) -> None:
    async def body() -> None:
        made = backend(kind)
        async with SandboxPool(settings(8, acquire_s=60.0), made) as pool:

            async def episode(n: int) -> None:
                box = await pool.acquire(SPEC, {"mine": b"%d" % n}, episode=str(n))
                ended = await box.run(["/bin/sh", "-c", "ls -A; cat mine; echo x >> mine; sleep 100 &"], timeout_s=20)
                assert ended.stdout == b"mine\n%d" % n
                assert ended.survivors == 1
                await pool.release(box)

            await asyncio.gather(*(episode(n) for n in range(32)))
            assert pool.counts.created <= 8
            assert pool.counts.replaced == 0
        assert pool.leaked() == 0
        assert await made.owned() == []

    asyncio.run(body())
