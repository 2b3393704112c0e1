"""Making boxes at a bounded rate, with patience for an engine that does not answer."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable

from palestra.envs.sandboxes.backends import Backend
from palestra.envs.sandboxes.contract import BoxSpec, EngineAway, Sandbox
from palestra.envs.sandboxes.waiting import TokenBucket

PAUSES_S = (0.5, 1.0, 2.0, 4.0)  # between tries of an engine that does not answer; the last one again and again


class Maker:
    """Opens boxes: `at_once` at the same time, `per_s` begun a second after a first `burst`."""

    def __init__(
        self,
        backend: Backend,
        *,
        at_once: int,
        per_s: float,
        burst: int,
        patience_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.away = 0  # tries that an engine which did not answer has cost
        self._backend = backend
        self._slots = asyncio.Semaphore(at_once)
        self._starts = TokenBucket(per_s, burst)
        self._patience_s = patience_s
        self._clock = clock
        self._stopped = False

    def stop(self) -> None:
        """Begin no more boxes; those in the making become ready."""
        self._stopped = True

    async def make(self, spec: BoxSpec, episode: str) -> Sandbox | None:
        """A new box, or None after `stop`. An engine that does not answer is asked again, ever more rarely.

        Raises EngineAway when patience is at its end, and SandboxError at once for any other failure: a missing image
        does not come by waiting.
        """
        give_up = self._clock() + self._patience_s
        for pause_s in itertools.chain(PAUSES_S, itertools.repeat(PAUSES_S[-1])):
            await self._starts.turn()
            try:
                async with self._slots:
                    return None if self._stopped else await self._backend.open(spec, episode=episode)
            except EngineAway:
                self.away += 1
                if self._stopped or self._clock() + pause_s > give_up:
                    raise
            await asyncio.sleep(pause_s)
        raise AssertionError("there is always another pause")
