"""Processes that do the same work together: each call goes to all of them, and succeeds on all of them or on none.

They wait for each other inside a call, so one that is gone leaves the others waiting. Every call has a deadline; after
a failure the others get a moment to say what they saw, and whoever is still busy then is ended with the whole crew.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from palestra.envs.errors import InfrastructureError, PalestraError
from palestra.rollout.replicas import ReplicaDied

log = logging.getLogger(__name__)
Request = TypeVar("Request", contravariant=True)
Result = TypeVar("Result", covariant=True)
Ask = TypeVar("Ask")
Answer = TypeVar("Answer")
Said = TypeVar("Said")


class Member(Protocol[Request, Result]):
    """One of the processes."""

    @property
    def where(self) -> str:
        """The role, the node and the process."""
        ...

    @property
    def address(self) -> str:
        """Where the others reach its machine; known once it has started."""
        ...

    async def start(self) -> object:
        """Begin the process."""
        ...

    async def run(self, request: Request) -> Result:
        """Do one thing there. Raises ReplicaDied when the process is gone."""
        ...

    async def close(self) -> object:
        """End the process, whatever it is doing."""
        ...

    async def last_words(self) -> str:
        """What is known of a dead process. Bounded in time; never raises."""
        ...


@dataclass(frozen=True, slots=True)
class CrewLimits:
    """Seconds."""

    start_s: float = 300.0  # until the processes are there
    call_s: float = 3600.0  # of one call
    grace_s: float = 10.0  # for the others to say what they saw, once one has failed
    close_s: float = 10.0


class Crew(Generic[Ask, Answer]):
    """Its members, in the order of their numbers. One caller at a time."""

    def __init__(self, members: Sequence[Member[Ask, Answer]], limits: CrewLimits) -> None:
        self.members = members
        self._limits = limits
        self._lost: str | None = None

    async def start(self) -> list[object]:
        """Begin all processes; what each said first. Raises InfrastructureError when one cannot, with none left."""
        begun = [asyncio.ensure_future(member.start()) for member in self.members]
        said = await self._settle(begun, "start", self._limits.start_s)
        for member in self.members:
            log.info("%s is up", member.where)
        return said

    async def all(self, request: Ask) -> list[Answer]:
        """Every member's answer. Raises what all of them raise, when they agree and can go on; InfrastructureError when
        one died, broke or did not answer in time, with all of them ended."""
        return await self.each([request] * len(self.members))

    async def each(self, requests: Sequence[Ask]) -> list[Answer]:
        """The same, with a request for each member."""
        if self._lost is not None:
            raise InfrastructureError(self._lost)
        calls = [
            asyncio.ensure_future(member.run(request)) for member, request in zip(self.members, requests, strict=True)
        ]
        return await self._settle(calls, "call", self._limits.call_s)

    async def close(self) -> None:
        """End all processes, each within its limit."""
        closing = [asyncio.wait_for(member.close(), self._limits.close_s) for member in self.members]
        for member, outcome in zip(self.members, await asyncio.gather(*closing, return_exceptions=True), strict=True):
            if isinstance(outcome, BaseException):
                log.warning("%s: ended without an answer (%s)", member.where, type(outcome).__name__)

    async def _settle(self, calls: Sequence[asyncio.Future[Said]], what: str, limit_s: float) -> list[Said]:
        try:
            done, pending = await asyncio.wait(calls, timeout=limit_s, return_when=asyncio.FIRST_EXCEPTION)
            if not pending and all(call.exception() is None for call in done):
                return [call.result() for call in calls]
            if any(call.exception() is not None for call in done):
                await asyncio.wait(calls, timeout=self._limits.grace_s)
            raise await self._failure(calls, what, limit_s)
        finally:
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)

    async def _failure(self, calls: Sequence[asyncio.Future[Said]], what: str, limit_s: float) -> BaseException:
        """What to raise, by what the members said: a death explains the others' complaints of a broken connection."""
        said = {
            member: error
            for member, call in zip(self.members, calls, strict=True)
            if call.done() and (error := call.exception()) is not None
        }
        ours = next((error for error in said.values() if isinstance(error, PalestraError)), None)
        dead = next((member for member, error in said.items() if isinstance(error, ReplicaDied)), None)
        if dead is None and ours is not None and len(said) == len(calls) and what == "call":
            return ours  # all of them refused the same and are as they were
        words = ""
        if dead is not None:
            story, words = _told(said[dead]), f". {await dead.last_words()}"
        elif said:
            first, error = next(iter(said.items()))
            story = f"{first.where}: {type(error).__name__}: {_told(error)}"
        else:
            busy = [member.where for member, call in zip(self.members, calls, strict=True) if not call.done()]
            story = f"{', '.join(busy)}: no answer to a {what} within {limit_s:g} s"
        ended = "All of them were ended; the same command goes on from the last checkpoint"
        self._lost = f"{story.rstrip('.')}. {ended}{words}"
        await self.close()
        if dead is None and ours is not None:
            return ours
        lost = InfrastructureError(self._lost)
        lost.__cause__ = next(iter(said.values()), None)
        return lost


def _told(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else "no word"
