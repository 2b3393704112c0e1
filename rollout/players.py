"""Many players that look like one: an episode goes to the one that is least busy, and a dead one is replaced."""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

from palestra.rollout.replicas import Replicas

Request = TypeVar("Request", contravariant=True)
Result = TypeVar("Result", covariant=True)
Asked = TypeVar("Asked")
Answer = TypeVar("Answer")


class Player(Protocol[Request, Result]):
    """Plays what it is asked to, many requests at once."""

    async def start(self) -> object:
        """Be ready for requests. Raises EngineError."""
        ...

    async def run(self, request: Request) -> Result:
        """Play one request to its end."""
        ...

    async def close(self) -> int:
        """Give everything back. Returns how many things could not be (0 is right). Idempotent."""
        ...


class PlayerPool(Generic[Asked, Answer]):
    """A player over replicas. An episode has effects outside (boxes, records), so it is never played again in
    silence: when its player dies, its caller is told, and decides. The player itself is replaced.

    Replicas that are engines too are shared with an EnginePool, which then sees to it that a fresh one has the
    version in force before it plays.
    """

    def __init__(self, replicas: Replicas[Player[Asked, Answer]], run_s: float) -> None:
        """`run_s` is the longest that one request may take; later, its player counts as dead."""
        self._replicas = replicas
        self._run_s = run_s

    async def start(self) -> None:
        """Start every player. Raises EngineError when one fails."""
        await self._replicas.start()

    async def run(self, request: Asked) -> Answer:
        """Play on the player with the fewest requests. Raises what `run` raises, and ReplicaDied (an EngineError that
        names the player, its place and the cause) when the player dies meanwhile."""
        replica = await self._replicas.pick(lambda r: (r.in_flight, r.index), set())
        return await self._replicas.call(replica, replica.item.run(request), self._run_s)

    async def close(self) -> int:
        """Close every player; the sum of what they could not give back. What dead players left is not in it."""
        return sum(count for count in await self._replicas.close() if isinstance(count, int))
