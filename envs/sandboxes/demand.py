"""How many boxes of each kind were wanted at once lately: so many are kept, and no more."""

from __future__ import annotations

from collections.abc import Callable

from palestra.envs.sandboxes.contract import BoxSpec


class Demand:
    """The most boxes of each spec that were lent or waited for at once, over the last one to two windows."""

    def __init__(self, window_s: float, clock: Callable[[], float]) -> None:
        self._window_s = window_s
        self._clock = clock
        self._began = clock()
        self._now: dict[BoxSpec, int] = {}
        self._before: dict[BoxSpec, int] = {}

    def note(self, spec: BoxSpec, wanted: int) -> None:
        """So many are lent or waited for just now."""
        self._turn()
        self._now[spec] = max(wanted, self._now.get(spec, 0))

    def peak(self, spec: BoxSpec) -> int:
        """The most of late; 0 for a kind that nobody wanted."""
        self._turn()
        return max(self._now.get(spec, 0), self._before.get(spec, 0))

    def _turn(self) -> None:
        passed = self._clock() - self._began
        if passed < self._window_s:
            return
        self._before = self._now if passed < 2 * self._window_s else {}
        self._now = {}
        self._began = self._clock()
