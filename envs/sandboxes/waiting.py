"""Waiting: for what must be finished once it has begun, for a turn among many, and how long it took."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")
RECENT = 4096  # waits that the quantiles are taken over


async def to_the_end(work: Coroutine[object, object, T]) -> T:
    """The result of `work`, which runs to its end even when the caller is cancelled; the cancellation comes after it.

    For what would otherwise leave something behind. `work` must be bounded in time by itself.
    """
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not task.cancelled():
            task.exception()  # seen, so that it is not reported as forgotten
        raise cancelled
    return task.result()


class TokenBucket:
    """At most `burst` starts at once and `per_s` a second after that, in the order of asking."""

    def __init__(self, per_s: float, burst: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_s = per_s
        self._burst = burst
        self._clock = clock
        self._next = -math.inf  # when the bucket would be full again, were nobody to ask

    def reserve(self) -> float:
        """Take the next free turn; seconds until it comes."""
        now = self._clock()
        self._next = max(self._next, now) + 1 / self._per_s
        return max(0.0, self._next - now - self._burst / self._per_s)

    async def turn(self) -> None:
        """Wait for a turn. One that is cancelled is lost, which errs on the slow side."""
        await asyncio.sleep(self.reserve())


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Seconds that recent waits took. Quantiles(count=200, p50=0.01, p95=1.2, longest=3.0)"""

    count: int = 0
    p50: float = 0.0
    p95: float = 0.0
    longest: float = 0.0  # of all, not only of the recent ones


class Waits:
    """How long things waited, in bounded memory."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._count = 0
        self._longest = 0.0

    def add(self, seconds: float) -> None:
        """One more."""
        self._recent.append(seconds)
        self._count += 1
        self._longest = max(self._longest, seconds)

    def quantiles(self) -> Quantiles:
        """What they were so far."""
        if not self._recent:
            return Quantiles()
        ordered = sorted(self._recent)
        p50, p95 = (ordered[math.ceil(share * len(ordered)) - 1] for share in (0.5, 0.95))
        return Quantiles(self._count, p50, p95, self._longest)
