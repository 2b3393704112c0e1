"""Waiting for what must be finished once it has begun."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TypeVar

T = TypeVar("T")


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
