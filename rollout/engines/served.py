"""Which versions an engine holds and how many requests each still serves, so that none is dropped too early."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

from palestra.envs.errors import EngineError

Handle = TypeVar("Handle")


@dataclass(slots=True, eq=False)
class Served(Generic[Handle]):
    """One published version and what names it to the engine."""

    version: int
    handle: Handle
    in_flight: int = 0


class ServedVersions(Generic[Handle]):
    """At most `limit` versions at once, the newest in force. Older ones stay until their last request is answered."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held: list[Served[Handle]] = []
        self._answered = asyncio.Condition()

    @property
    def current(self) -> Served[Handle] | None:
        """The version in force; None before the first."""
        return self._held[-1] if self._held else None

    def __len__(self) -> int:
        return len(self._held)

    def put_in_force(self, version: int, handle: Handle) -> None:
        """From now on new requests get this one."""
        self._held.append(Served(version, handle))

    def idle(self) -> list[Served[Handle]]:
        """Old versions that no request uses any more."""
        return [served for served in self._held[:-1] if served.in_flight == 0]

    def forget(self, served: Served[Handle]) -> None:
        """It is gone from the engine."""
        self._held.remove(served)

    async def room(self, timeout_s: float) -> None:
        """Return once another version fits beside those that cannot be dropped; EngineError after the deadline."""
        try:
            async with asyncio.timeout(timeout_s), self._answered:
                await self._answered.wait_for(lambda: len(self._held) - len(self.idle()) < self._limit)
        except TimeoutError as error:
            held = {served.version: served.in_flight for served in self._held}
            raise EngineError(
                f"no room for another version within {timeout_s} s: requests in flight by version are {held}, and "
                f"max_loras is {self._limit}; allow more versions or shorter turns"
            ) from error

    @asynccontextmanager
    async def use(self) -> AsyncIterator[Served[Handle] | None]:
        """Hold the version in force for one request, to its end."""
        served = self.current
        if served is None:
            yield None
            return
        served.in_flight += 1
        try:
            yield served
        finally:
            served.in_flight -= 1
            async with self._answered:
                self._answered.notify_all()

    def handles(self) -> list[Handle]:
        """Every version's handle, oldest first."""
        return [served.handle for served in self._held]
