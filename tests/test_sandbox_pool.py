"""The pool: bounded, fair, clean, and empty at the end; with scripted boxes, and with real ones for the whole way."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter

import pytest

from palestra.envs.errors import SandboxError
from palestra.envs.sandboxes.contract import BoxClosed, BoxSpec, Exec, Limits, Sandbox
from palestra.envs.sandboxes.pool import PoolSettings, SandboxPool
from palestra.envs.sandboxes.scripted import ScriptedSandbox, Trouble
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
            assert second is first
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
        async with SandboxPool(settings(1, acquire_s=0.05), ScriptedBackend()) as pool:
            await pool.acquire(BoxSpec(), {}, episode="e1")
            with pytest.raises(SandboxError, match=r"no box for e2 within 0\.05 s: 1 of 1 are lent"):
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
        made = ScriptedBackend(making_s=0.01)
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
            assert first is not second

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
