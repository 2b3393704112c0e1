"""Copies of one thing that may die: the fresh one that takes a dead one's seat, and who is served meanwhile.

A seat has an index for life; who sits in it changes. Only replicas in `serving` are given work. A replica leaves
`serving` the moment that its death is known, and nothing comes into it before it has been made ready.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from palestra.envs.errors import EngineError, InfrastructureError

log = logging.getLogger(__name__)
R = TypeVar("R")


class ReplicaDied(EngineError):
    """A replica is gone, or did not answer within its deadline and counts as gone."""


class Startable(Protocol):
    """What a replica is at least."""

    async def start(self) -> object:
        """Be ready for work. Raises InfrastructureError."""
        ...

    async def close(self) -> object:
        """Give everything back. Idempotent."""
        ...


@runtime_checkable
class Mortal(Protocol):
    """A replica in another process: it says where it is, and its death can be awaited."""

    @property
    def where(self) -> str:
        """The node and the process."""
        ...

    async def death(self) -> str:
        """Returns once the process is dead: the cause. Never returns before."""
        ...

    async def last_words(self) -> str:
        """What is known of a dead process: its memory and the end of its log. Bounded in time; never raises."""
        ...


T = TypeVar("T", bound=Startable, covariant=True)  # replicas that can do more serve where fewer is asked


@dataclass(frozen=True, slots=True)
class Limits:
    """How long a pool waits, and how often it tries again."""

    start_s: float = 300.0  # a replica's start
    load_s: float = 120.0  # one try of one replica to take a new version
    request_s: float = 900.0  # one request on one replica; later, the replica counts as dead
    close_s: float = 20.0
    attempts: int = 3  # replicas that one request is tried on
    strikes: int = 3  # EngineErrors in a row, of any request, after which a replica counts as dead
    replacements: int = 8  # in the life of the pool
    backoff_s: float = 1.0  # before a replacement; doubled for each one in a row that failed to start, to 30 s


@dataclass(eq=False, slots=True)
class Replica(Generic[T]):
    """Who sits in a seat, and what it is doing."""

    index: int
    item: T
    gone: asyncio.Future[ReplicaDied]  # done once the replica counts as dead
    facts: object = None  # what its `start` returned
    in_flight: int = 0
    sessions: set[str] = field(default_factory=set)
    strikes: int = 0
    watch: asyncio.Task[None] | None = None

    def __str__(self) -> str:
        place = self.item.where if isinstance(self.item, Mortal) else "in this process"
        return f"replica {self.index} ({place})"


class Replicas(Generic[T]):
    """`count` replicas made by `make(index)`; a dead one is replaced, a bounded number of times."""

    def __init__(self, name: str, count: int, make: Callable[[int], T], limits: Limits | None = None) -> None:
        """`name` stands in messages ("engine"). Nothing is made before `start`."""
        self.name, self.count, self.limits = name, count, limits or Limits()
        self.serving: list[Replica[T]] = []
        self.replacements = 0
        self._make = make
        self._prepare: list[Callable[[Replica[T]], Awaitable[None]]] = []
        self._repairs: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._lost: str | None = None  # why a seat stays empty for good
        self._started = self._closed = False

    def before_service(self, prepare: Callable[[Replica[T]], Awaitable[None]]) -> None:
        """Await `prepare` with each started replica before it serves. What it checks last holds when service begins:
        nothing else runs between its return and the first request."""
        self._prepare.append(prepare)

    async def start(self) -> None:
        """Start all, at the same time. When one fails, all are closed and its error is raised. Idempotent."""
        if self._started:
            return
        self._started = True
        outcomes = await asyncio.gather(*(self._seat(i) for i in range(self.count)), return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                await self.close()
                raise outcome
        for replica in sorted(self.serving, key=lambda replica: replica.index):
            if isinstance(replica.item, Mortal):
                log.info("%s %s is up", self.name, replica)

    async def close(self) -> list[object]:
        """Close every replica; what their `close` returned. Idempotent."""
        self._closed = True
        repairs, self._repairs = list(self._repairs), set()
        for repair in repairs:
            repair.cancel()
        await asyncio.gather(*repairs, return_exceptions=True)
        replicas, self.serving = self.serving, []
        self._notify()
        return [r for r in await asyncio.gather(*(self._close(replica) for replica in replicas)) if r is not None]

    async def pick(self, key: Callable[[Replica[T]], Any], avoid: set[int]) -> Replica[T]:
        """The serving replica with the smallest key, outside the seats in `avoid` when there is one. Waits for a
        replacement when none serves. Raises EngineError when none will."""
        limit = self.limits.start_s + self.limits.load_s
        await self._until(lambda: bool(self.serving), limit, f"no {self.name} serves")
        fresh = [replica for replica in self.serving if replica.index not in avoid]
        return min(fresh or self.serving, key=key)

    async def whole(self) -> None:
        """Returns when every seat serves. Raises EngineError when one stays empty."""
        limit = (self.limits.start_s + self.limits.load_s) * 2
        await self._until(self._is_whole, limit, f"not every {self.name} serves")

    def _is_whole(self) -> bool:
        if self._lost:
            raise EngineError(self._lost)
        return len(self.serving) == self.count

    async def call(self, replica: Replica[T], work: Coroutine[Any, Any, R], limit_s: float) -> R:
        """The result of `work` on `replica`. Raises ReplicaDied as soon as the replica is known to be dead, or after
        `limit_s`, which counts as its death."""
        task = asyncio.ensure_future(work)
        task.add_done_callback(_retrieve)
        replica.in_flight += 1
        try:
            events: set[asyncio.Future[Any]] = {task, replica.gone}
            await asyncio.wait(events, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                if replica.gone.done():
                    raise ReplicaDied(str(replica.gone.result())) from replica.gone.result()
                raise ReplicaDied(f"{replica}: no answer within {limit_s:g} s")
            result = task.result()
        except ReplicaDied as error:
            self.condemn(replica, error)
            raise
        finally:
            replica.in_flight -= 1
            task.cancel()
        replica.strikes = 0
        return result

    def condemn(self, replica: Replica[T], cause: ReplicaDied) -> None:
        """Serve nothing more from `replica`, fail what is in flight on it, and put a fresh one in its seat."""
        if replica.gone.done():
            return
        replica.gone.set_result(cause)
        if replica not in self.serving or self._closed:
            return  # still being made ready: whoever does that tries again
        self.serving.remove(replica)
        repair = asyncio.create_task(self._repair(replica, cause))
        self._repairs.add(repair)
        repair.add_done_callback(self._repaired)

    def strike(self, replica: Replica[T], error: EngineError) -> None:
        """Note a failed request; too many in a row, and the replica counts as dead. A success wipes them out."""
        replica.strikes += 1
        if replica.strikes >= self.limits.strikes:
            self.condemn(replica, ReplicaDied(f"{replica} failed {replica.strikes} times in a row: {error}"))

    def _repaired(self, repair: asyncio.Task[None]) -> None:
        self._repairs.discard(repair)
        error = None if repair.cancelled() else repair.exception()
        if error is not None:  # no InfrastructureError: a fault of the program, not of a replica
            self._lost = f"{self.name}: a replacement failed: {type(error).__name__}: {error}"
        self._notify()

    async def _repair(self, dead: Replica[T], cause: ReplicaDied) -> None:
        """Fill the seat of `dead`, or say that it stays empty."""
        words = await dead.item.last_words() if isinstance(dead.item, Mortal) else ""
        told = f"{self.name} replica {dead.index} is lost: {cause}" + (f"\n{words}" if words else "")
        await self._close(dead)
        wait_s = self.limits.backoff_s
        while self.replacements < self.limits.replacements:
            self.replacements += 1
            log.error("%s\nreplacing it (%d of %d)", told, self.replacements, self.limits.replacements)
            await asyncio.sleep(wait_s)
            wait_s = min(wait_s * 2, 30.0)
            try:
                fresh = await self._seat(dead.index)
                log.warning("%s %s takes the place of the lost one", self.name, fresh)
                return
            except InfrastructureError as error:
                told = f"{self.name} replica {dead.index}: its replacement failed: {error}"
        self._lost = (
            f"seat {dead.index} stays empty: all {self.limits.replacements} replacements of this pool are used up; "
            f"the last cause: {told}"
        )

    async def _seat(self, index: int) -> Replica[T]:
        """Make, start and prepare a replica, then let it serve. Raises InfrastructureError; nothing is left then."""
        replica = Replica(index, self._make(index), asyncio.get_running_loop().create_future())
        limit = self.limits.start_s
        try:
            async with asyncio.timeout(limit):
                replica.facts = await replica.item.start()
            for prepare in self._prepare:
                await prepare(replica)
        except BaseException as error:
            await self._close(replica)
            if isinstance(error, TimeoutError):
                raise EngineError(f"{self.name} {replica} did not start within {limit:g} s") from error
            raise
        self.serving.append(replica)
        if isinstance(replica.item, Mortal):
            replica.watch = asyncio.create_task(self._watch(replica, replica.item))
        self._notify()
        return replica

    async def _watch(self, replica: Replica[T], item: Mortal) -> None:
        self.condemn(replica, ReplicaDied(await item.death()))

    async def _close(self, replica: Replica[T]) -> object:
        """Close, within the limit. A replica that cannot even be closed is left to its owner's death."""
        if replica.watch:
            replica.watch.cancel()
        try:
            async with asyncio.timeout(self.limits.close_s):
                return await replica.item.close()
        except (InfrastructureError, TimeoutError) as error:
            log.warning("%s %s could not be closed: %r", self.name, replica, error)
        return None

    async def _until(self, ready: Callable[[], bool], limit_s: float, problem: str) -> None:
        try:
            async with asyncio.timeout(limit_s):
                while not ready():
                    if self._closed or (not self.serving and not self._repairs):
                        raise EngineError(f"{problem}: {self._lost or 'the pool is closed, or was never started'}")
                    changed = self._changed
                    await changed.wait()
        except TimeoutError as error:
            raise EngineError(f"{problem}, and none came within {limit_s:g} s") from error

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _retrieve(task: asyncio.Task[Any]) -> None:
    """Look at the outcome of a task that nobody waits for any more, so that asyncio does not report it as lost."""
    if not task.cancelled():
        task.exception()
