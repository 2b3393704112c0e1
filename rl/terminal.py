"""What a person sees while a job runs: one line for each thing that happened, with the time since the start."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO


class Terminal:
    """Prints `[ 12.3 s] words` to a stream, unbuffered, so that batch logs can be followed."""

    def __init__(self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream or sys.stdout
        self._clock = clock
        self._start = clock()

    def say(self, words: str) -> None:
        """One line."""
        print(f"[{self._clock() - self._start:7.1f} s] {words}", file=self._stream, flush=True)

    def plain(self, words: str = "") -> None:
        """Words without the clock."""
        print(words, file=self._stream, flush=True)
