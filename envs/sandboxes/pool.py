"""A pool of clean boxes: made ahead of need and in bounded number, reset behind the episode's back, lent in order."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from types import TracebackType

from palestra.envs.errors import SandboxError
from palestra.envs.sandboxes.backends import Backend, choose_backend, engine_socket
from palestra.envs.sandboxes.contract import BoxClosed, BoxSpec, Limits, Sandbox
from palestra.envs.sandboxes.demand import Demand
from palestra.envs.sandboxes.egress_rules import AllowList
from palestra.envs.sandboxes.lent import LentSandbox, Turns
from palestra.envs.sandboxes.making import Maker
from palestra.envs.sandboxes.pool_settings import PoolCounts, PoolSettings
from palestra.envs.sandboxes.reaper import ReapReport, reap
from palestra.envs.sandboxes.waiting import Quantiles, Waits, to_the_end

log = logging.getLogger(__name__)
TRIES = 3  # boxes that may fail under one acquire before it gives up


@dataclass(slots=True, eq=False)
class _Box:
    sandbox: Sandbox
    spec: BoxSpec
    made_at: float
    used: bool = False


@dataclass(slots=True, eq=False)
class _Loan:
    box: _Box
    sandbox: LentSandbox


@dataclass(slots=True, eq=False)
class _Waiter:
    spec: BoxSpec
    episode: str
    box: asyncio.Future[_Box] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class SandboxPool:
    """Lends boxes of one kind, at most `max_boxes` at once, whatever their spec; owns every one of them.

    Whoever waits longest is served first. A box goes back to the pool through a reset in the background, and to nobody
    when that cannot prove it clean.
    """

    backend: Backend
    reason: str  # why boxes are of this kind
    reaped: ReapReport

    def __init__(
        self,
        settings: PoolSettings,
        backend: Backend | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counts = PoolCounts()
        self._settings = settings
        self._given = backend
        self._clock = clock
        self._turns = Turns(settings.executing, settings.acquire_s)
        self._waits = Waits()
        self._demand = Demand(settings.demand_s, clock)
        self._keeper: asyncio.Task[None] | None = None
        self._idle: list[_Box] = []
        self._lent: dict[str, _Loan] = {}
        self._alive = 0  # boxes that exist or are being made, reset or removed
        self._coming: dict[BoxSpec, int] = {}  # of them, those that will be idle soon
        self._leaving = 0  # of them, those that are being removed
        self._waiting: list[_Waiter] = []  # who waits longest first
        self._work: set[asyncio.Task[None]] = set()
        self._closed = True  # until the start
        self._stuck = 0  # boxes whose removal failed
        self._left = 0

    async def start(self) -> None:
        """Choose the kind of box where none was given, and remove what dead owners left of it.

        Raises ConfigError when no kind works here, SandboxError when the engine cannot be listed.
        """
        await asyncio.to_thread(self._start)
        self._maker = Maker(
            self.backend,
            at_once=self._settings.creating,
            per_s=self._settings.creates_per_s,
            burst=self._settings.max_boxes,
            patience_s=self._settings.acquire_s,
            clock=self._clock,
        )
        self._closed = False
        self._keeper = asyncio.create_task(self._keep())

    def _start(self) -> None:
        if self._given is not None:
            self.backend, self.reason = self._given, f"{self._given.name}: given"
        else:
            self.backend, self.reason = choose_backend(
                self._settings.backend,
                run=self._settings.run,
                image=self._settings.image,
                runtime=self._settings.runtime,
            )
        self.reaped = self._reaping()

    async def __aenter__(self) -> SandboxPool:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def warm(self, spec: BoxSpec, count: int) -> None:
        """Start making boxes in the background, until `count` of the spec are idle or coming or the pool is full."""
        spec = self._complete(spec)
        self._demand.note(spec, min(count, self._settings.max_boxes))
        self._fill(spec, count)

    def _fill(self, spec: BoxSpec, count: int) -> None:
        there = sum(box.spec == spec for box in self._idle) + self._coming.get(spec, 0)
        for _ in range(min(count - there, self._settings.max_boxes - self._alive)):
            self._make(spec, "warm")

    async def acquire(self, spec: BoxSpec, files: Mapping[str, bytes], *, episode: str) -> Sandbox:
        """See the contract."""
        spec = self._complete(spec)
        began = self._clock()
        try:
            async with asyncio.timeout(self._settings.acquire_s):
                box = await self._acquire(spec, files, episode)
        except TimeoutError as error:
            facts = f"{len(self._lent)} of {self._settings.max_boxes} are lent, {len(self._waiting)} others wait"
            raise SandboxError(f"no box for {episode} within {self._settings.acquire_s:g} s: {facts}") from error
        waited = self._clock() - began
        self.counts.acquired += 1
        self.counts.reused += box.used
        self.counts.wait_s += waited
        self.counts.longest_wait_s = max(self.counts.longest_wait_s, waited)
        self._waits.add(waited)
        box.used = True
        return self._lent[box.sandbox.id].sandbox

    async def fork(self, box: Sandbox, *, episode: str) -> Sandbox:
        """See the contract. Waits for its box as `acquire` does."""
        loan = self._lent.get(box.id)
        if loan is None:
            raise BoxClosed(f"{box.id}: it is not lent, so it cannot be forked for {episode}")
        try:
            state = await box.snapshot()
        except ValueError as error:
            raise SandboxError(f"{box.id}: cannot be forked for {episode}: {error}") from error
        other = await self.acquire(loan.box.spec, {}, episode=episode)
        restored = False
        try:
            await other.restore(state)
            restored = True
        finally:
            if not restored:
                await self.release(other)
        self.counts.forked += 1
        return other

    async def release(self, box: Sandbox) -> None:
        """See the contract. Returns at once; a box that the pool does not know, or has back already, is left alone."""
        loan = self._lent.get(box.id)
        if loan is None or box not in (loan.sandbox, loan.box.sandbox):
            return  # of an earlier loan, maybe: the box may be another episode's by now
        del self._lent[box.id]
        loan.sandbox.end()
        if loan.sandbox.busy:  # a reset would wait for the command that still runs in it
            self.counts.replaced += 1
            self._drop(loan.box, replace=True)
        else:
            self._begin(self._recycle(loan.box), loan.box.spec)

    def waits(self) -> dict[str, Quantiles]:
        """How long episodes waited for a box ("box"), and commands for their turn ("command")."""
        return {"box": self._waits.quantiles(), "command": self._turns.waits.quantiles()}

    async def close(self) -> None:
        """Remove every box, also the lent ones, even when cancelled; `leaked` says how it went. Idempotent."""
        await to_the_end(self._close())

    def leaked(self) -> int:
        """How many boxes were still there at the end of `close`."""
        return self._left

    def _complete(self, spec: BoxSpec) -> BoxSpec:
        AllowList.of(spec.network)  # refused here, where somebody hears it
        return replace(spec, limits=self._settings.limits) if spec.limits == Limits() else spec

    def _wanted(self, spec: BoxSpec) -> None:
        waiting = sum(waiter.spec == spec and not waiter.box.done() for waiter in self._waiting)
        self._demand.note(spec, min(self._num_lent(spec) + waiting, self._settings.max_boxes))

    # --- upkeep -------------------------------------------------------------------------------------------------

    async def _keep(self) -> None:
        """Until the pool is closed: no more boxes than were wanted of late, and nothing of dead owners."""
        reap_at = self._clock() + self._settings.reap_s
        while True:
            await asyncio.sleep(self._settings.upkeep_s)
            self._fit()
            if self._clock() >= reap_at:
                reap_at = self._clock() + self._settings.reap_s
                await self._reap()

    def _fit(self) -> None:
        """Remove idle boxes beyond what was wanted of late; what is missing is made when it is asked for."""
        for box in tuple(self._idle):
            if self._spare(box.spec) > 0:
                self._idle.remove(box)
                self.counts.trimmed += 1
                self._drop(box)

    def _spare(self, spec: BoxSpec) -> int:
        """How many boxes of the kind there are beyond the most that were wanted at once of late."""
        idle = sum(box.spec == spec for box in self._idle)
        return self._num_lent(spec) + idle - self._demand.peak(spec)

    def _num_lent(self, spec: BoxSpec) -> int:
        return sum(loan.box.spec == spec for loan in self._lent.values())

    async def _reap(self) -> None:
        try:
            report = await asyncio.to_thread(self._reaping)
        except SandboxError as error:
            log.warning("the reaper could not look: %s", error)
            return
        for name in report.removed:
            log.info("removed %s, which a dead owner had left", name)

    def _reaping(self) -> ReapReport:
        return reap(engine_socket() if self.backend.name == "docker" else None)

    # --- one acquire --------------------------------------------------------------------------------------------

    async def _acquire(self, spec: BoxSpec, files: Mapping[str, bytes], episode: str) -> _Box:
        for attempt in range(TRIES):
            box = await self._next(spec, episode)
            ready = False
            try:
                if files:
                    await box.sandbox.reset(files)
                ready = True
                self._lent[box.sandbox.id] = _Loan(box, LentSandbox(box.sandbox, self._turns))
                self._wanted(spec)
                return box
            except SandboxError:
                if attempt == TRIES - 1:
                    raise
            finally:
                if not ready:
                    self.counts.replaced += 1
                    self._drop(box)
        raise AssertionError("the last try returns or raises")

    async def _next(self, spec: BoxSpec, episode: str) -> _Box:
        """A box of our own, in the order of asking."""
        if self._closed:
            raise BoxClosed(f"the pool is not open; no box for {episode}")
        waiter = _Waiter(spec, episode)
        self._waiting.append(waiter)
        self._wanted(spec)
        self._serve()
        try:
            return await waiter.box
        except asyncio.CancelledError:
            if waiter.box.done() and not waiter.box.cancelled() and waiter.box.exception() is None:
                self._shelve(waiter.box.result())  # it came at the same moment
            raise
        finally:
            if waiter in self._waiting:
                self._waiting.remove(waiter)

    def _serve(self) -> None:
        """Give idle boxes to whoever waits, oldest first, and start making what is missing."""
        self._waiting = [waiter for waiter in self._waiting if not waiter.box.done()]
        unserved: dict[BoxSpec, int] = {}
        wanted = 0
        for waiter in self._waiting:
            box = next((box for box in self._idle if box.spec == waiter.spec), None)
            if box is not None:
                self._idle.remove(box)
                waiter.box.set_result(box)
                continue
            unserved[waiter.spec] = unserved.get(waiter.spec, 0) + 1
            if unserved[waiter.spec] <= self._coming.get(waiter.spec, 0):
                continue
            if self._alive < self._settings.max_boxes:
                self._make(waiter.spec, waiter.episode)
            else:
                wanted += 1
        for _ in range(
            min(wanted - self._leaving, len(self._idle))
        ):  # full of boxes of other kinds: idle ones give way
            self._drop(self._idle.pop(0))

    def _shelve(self, box: _Box) -> None:
        """A clean box goes to whoever waits longest, if it fits; else it gives way or waits itself."""
        head = next((waiter for waiter in self._waiting if not waiter.box.done()), None)
        foreign = head is not None and head.spec != box.spec and not self._coming.get(head.spec)
        if self._closed or (foreign and self._alive >= self._settings.max_boxes):
            self._drop(box)
            return
        self._idle.append(box)
        self._serve()

    # --- work in the background ---------------------------------------------------------------------------------

    def _begin(self, work: Coroutine[object, object, None], coming: BoxSpec | None = None) -> None:
        """Start work that nobody waits for; `coming` counts it as a box that will be idle."""
        if coming is not None:
            self._coming[coming] = self._coming.get(coming, 0) + 1
        task = asyncio.ensure_future(work)
        self._work.add(task)
        task.add_done_callback(self._work.discard)

    def _make(self, spec: BoxSpec, episode: str) -> None:
        self._alive += 1
        self._begin(self._create(spec, episode), spec)

    async def _create(self, spec: BoxSpec, episode: str) -> None:
        made = None
        try:
            sandbox = await self._maker.make(spec, episode)
            if sandbox is not None:
                made = _Box(sandbox, spec, self._clock())
                self.counts.created += 1
        except SandboxError as error:
            self._refuse(spec, error)
        finally:
            self._coming[spec] -= 1
            if made is None:
                self._alive -= 1
        if made is not None:
            self._shelve(made)
        elif not self._closed:
            self._serve()

    def _refuse(self, spec: BoxSpec, error: SandboxError) -> None:
        """Tell the one who waits longest for such a box; the others get their own try."""
        for waiter in self._waiting:
            if waiter.spec == spec and not waiter.box.done():
                waiter.box.set_exception(error)
                return

    async def _recycle(self, box: _Box) -> None:
        clean = False
        try:
            if self._clock() - box.made_at < self._settings.box_life_s and not self._closed:
                await box.sandbox.reset()
                clean = True
        except SandboxError:
            self.counts.replaced += 1
        finally:
            self._coming[box.spec] -= 1
        if clean:
            self._shelve(box)
            return
        self._drop(box, replace=True)

    def _drop(self, box: _Box, replace: bool = False) -> None:
        self._leaving += 1
        self._begin(self._discard(box, replace))

    async def _discard(self, box: _Box, replace: bool) -> None:
        try:
            await box.sandbox.close()
        except SandboxError:
            self._stuck += 1  # `close` tries again, and `leaked` tells what stays
        finally:
            self._leaving -= 1
            self._alive -= 1
        if not self._closed:
            self._serve()
            if replace:
                self._fill(box.spec, 1)

    async def _close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._maker.stop()
        for waiter in self._waiting:
            if not waiter.box.done():
                waiter.box.set_exception(BoxClosed(f"the pool was closed before there was a box for {waiter.episode}"))
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait({self._keeper})
        for loan in self._lent.values():
            loan.sandbox.end()
        for box in (*self._idle, *(loan.box for loan in self._lent.values())):
            self._drop(box)
        self._idle.clear()
        self._lent.clear()
        while self._work:
            await asyncio.wait(set(self._work))
        try:
            await self.backend.sweep()
            self._left = len(await self.backend.owned())
        except SandboxError:
            self._left = self._stuck  # the engine does not answer: what it did not confirm as removed may be there
