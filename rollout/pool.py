"""Many engines that look like one: sticky sessions, proved publishes, and a dead replica costs nobody an answer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from palestra.envs.errors import EngineError, IntegrityError
from palestra.rollout.adapters import Adapter
from palestra.rollout.engines.protocol import EngineFacts
from palestra.rollout.replicas import Replica, ReplicaDied, Replicas
from palestra.rollout.types import Completion, Float32, Receipt, Sampling

log = logging.getLogger(__name__)
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class PoolCounters:
    """What happened so far, and what is going on."""

    replacements: int
    retries: int  # requests that were tried again, on another replica
    in_flight: int
    sessions: tuple[int, ...]  # by seat; an empty seat has none


@dataclass(frozen=True, slots=True)
class InForce:
    """What every serving replica has proved to serve."""

    adapter: Adapter
    version: int
    digest: str
    matched_modules: int


class Serves(Protocol):
    """What the pool asks of a replica: all of Engine, except that `close` may return something (a player counts)."""

    async def start(self) -> EngineFacts: ...

    async def generate(self, prompt: Sequence[int], sampling: Sampling, *, session: str) -> Completion: ...

    async def end_session(self, session: str) -> None: ...

    async def score(self, ids: Sequence[int]) -> Float32: ...

    async def load(self, adapter: Adapter, version: int) -> Receipt: ...

    async def close(self) -> object: ...


class EnginePool:
    """An Engine over replicas.

    A session stays on its replica while that lives; a new one goes to the replica with the fewest. A request in
    flight on a replica that dies is tried on another; its caller notices only the time.

    A publish is in force as soon as one replica has proved it (digest, modules, version), and `publish` returns when
    every seat has. A replica that is behind serves nothing: one that refused twice, answered with a wrong proof or
    died is replaced, and the fresh one proves the version in force before it serves. When no replica proves the new
    version, the publish fails, the old version stays in force, and `version` says so.
    """

    def __init__(self, replicas: Replicas[Serves]) -> None:
        """The pool starts and closes `replicas`."""
        self._replicas = replicas
        self._limits = replicas.limits
        self._facts: EngineFacts | None = None
        self._homes: dict[str, Replica[Serves]] = {}
        self._in_force: InForce | None = None
        self._receipts: dict[int, Receipt] = {}  # by seat: of the version that its replica serves
        self._publishing = asyncio.Lock()
        self._retries = 0
        replicas.before_service(self._catch_up)

    @property
    def version(self) -> int | None:
        """The version in force; None before the first publish, when the base weights are."""
        return None if self._in_force is None else self._in_force.version

    def counters(self) -> PoolCounters:
        """For metrics."""
        by_seat = {replica.index: replica for replica in self._replicas.serving}
        return PoolCounters(
            replacements=self._replicas.replacements,
            retries=self._retries,
            in_flight=sum(replica.in_flight for replica in by_seat.values()),
            sessions=tuple(len(by_seat[i].sessions) if i in by_seat else 0 for i in range(self._replicas.count)),
        )

    async def start(self) -> EngineFacts:
        """Start every replica; the facts of one, all others are alike. Raises EngineError."""
        await self._replicas.start()
        if self._facts is None:
            raise EngineError(f"a pool needs one replica at least, not {self._replicas.count}")
        return self._facts

    async def generate(self, prompt: Sequence[int], sampling: Sampling, *, session: str) -> Completion:
        """As the protocol says; tried on up to `attempts` replicas before EngineError, which names each cause."""
        return await self._try_replicas(lambda engine: engine.generate(prompt, sampling, session=session), session)

    async def score(self, ids: Sequence[int]) -> Float32:
        """As the protocol says, on the replica that is least busy."""
        return await self._try_replicas(lambda engine: engine.score(ids), None)

    async def score_each(self, ids: Sequence[int]) -> tuple[Float32, ...]:
        """`score` on every replica, by seat: the probe after a publish. Raises EngineError."""
        await self._replicas.whole()
        seats = sorted(self._replicas.serving, key=lambda replica: replica.index)
        limit = self._limits.request_s
        return tuple(await asyncio.gather(*(self._replicas.call(s, s.item.score(ids), limit) for s in seats)))

    async def end_session(self, session: str) -> None:
        """As the protocol says. What a dying replica fails to forget dies with it."""
        replica = self._homes.pop(session, None)
        if replica is None:
            return
        replica.sessions.discard(session)
        try:
            await self._replicas.call(replica, replica.item.end_session(session), self._limits.close_s)
        except EngineError as error:
            log.warning("%s: session %s could not be ended: %s", replica, session, error)

    async def load(self, adapter: Adapter, version: int) -> Receipt:
        """`publish`, with one receipt for all."""
        receipts = await self.publish(adapter, version)
        first = receipts[0]
        return Receipt(
            engine=f"{len(receipts)} x {first.engine}",
            version=version,
            digest=first.digest,
            matched_modules=first.matched_modules,
            mode=first.mode,
            seconds=max(receipt.seconds for receipt in receipts),
        )

    async def publish(self, adapter: Adapter, version: int) -> tuple[Receipt, ...]:
        """Have every replica serve base + adapter as `version`: one receipt per seat.

        Raises IntegrityError when no replica's proof is right, EngineError when no replica takes the adapter (the old
        version is in force in both cases) or when a seat that is behind cannot be filled again (`version` is in
        force, on the others).
        """
        async with self._publishing:
            digest = await asyncio.to_thread(adapter.digest)
            proved, refused = await self._offer_to_all(adapter, version, digest)
            matched = max((receipt.matched_modules for receipt in proved.values()), default=0)
            for replica, receipt in list(proved.items()):
                if receipt.matched_modules < matched:
                    refused[replica] = IntegrityError(
                        f"{replica} bound version {version} to {receipt.matched_modules} modules, others to {matched}"
                    )
                    del proved[replica]
            # no await from here to the end of the loop: nobody is served by a replica that is behind
            if proved:
                self._in_force = InForce(adapter, version, digest, matched)
                self._receipts = {replica.index: receipt for replica, receipt in proved.items()}
            for replica, error in refused.items():
                if proved or isinstance(error, IntegrityError):
                    self._replicas.condemn(replica, ReplicaDied(f"{replica} does not serve version {version}: {error}"))
            if not proved:
                raise _failed_publish(version, self.version, list(refused.values()))
            await self._replicas.whole()
            return tuple(self._receipts[index] for index in range(self._replicas.count))

    async def close(self) -> None:
        """Close every replica."""
        self._homes.clear()
        await self._replicas.close()

    async def _try_replicas(self, ask: Callable[[Serves], Coroutine[Any, Any, R]], session: str | None) -> R:
        causes: list[str] = []
        avoid: set[int] = set()
        for _ in range(self._limits.attempts):
            replica = await self._home(session, avoid)
            try:
                return await self._replicas.call(replica, ask(replica.item), self._limits.request_s)
            except EngineError as error:
                self._replicas.strike(replica, error)
                causes.append(f"replica {replica.index}: {error}")
                avoid.add(replica.index)
                self._retries += 1
        raise EngineError(f"gave up after {len(causes)} tries; " + "; ".join(causes))

    async def _home(self, session: str | None, avoid: set[int]) -> Replica[Serves]:
        """Where a session lives, or moves in now: its replica died, or failed this request."""
        home = self._homes.get(session) if session else None
        if home is not None and not home.gone.done() and home.index not in avoid:
            return home
        replica = await self._replicas.pick(lambda r: (len(r.sessions), r.in_flight, r.index), avoid)
        if session:
            if home is not None:
                home.sessions.discard(session)
            replica.sessions.add(session)
            self._homes[session] = replica
        return replica

    async def _catch_up(self, replica: Replica[Serves]) -> None:
        """Bring a fresh replica to the version in force; again, when that changed meanwhile. No await after the
        check, so it still holds when the replica begins to serve."""
        self._compare(replica)
        done: InForce | None = None
        while (target := self._in_force) is not None and target is not done:
            try:
                receipt = await self._offer(replica, target.adapter, target.version, target.digest)
            except IntegrityError as error:
                raise EngineError(str(error)) from error  # a failed replacement, not a failed publish
            if receipt.matched_modules != target.matched_modules:
                raise EngineError(
                    f"{replica} bound version {target.version} to {receipt.matched_modules} modules; "
                    f"the others bound it to {target.matched_modules}"
                )
            self._receipts[replica.index] = receipt
            done = target

    def _compare(self, replica: Replica[Serves]) -> None:
        facts = replica.facts
        if not isinstance(facts, EngineFacts):
            raise TypeError(f"{replica}: start() of an engine returns EngineFacts, not {type(facts).__name__}")
        first = self._facts = self._facts or facts
        if _kind(facts) != _kind(first):
            raise EngineError(f"the replicas of one pool must be alike; {replica} is {facts}, another is {first}")

    async def _offer_to_all(
        self, adapter: Adapter, version: int, digest: str
    ) -> tuple[dict[Replica[Serves], Receipt], dict[Replica[Serves], EngineError | IntegrityError]]:
        """Offer to all that serve, also to those that begin to while others load. Who refuses is asked once more."""
        proved: dict[Replica[Serves], Receipt] = {}
        refused: dict[Replica[Serves], EngineError | IntegrityError] = {}
        await self._replicas.pick(lambda r: r.index, set())
        while asked := [r for r in self._replicas.serving if r not in proved and r not in refused]:
            outcomes = await asyncio.gather(
                *(self._offer_twice(replica, adapter, version, digest) for replica in asked)
            )
            for replica, outcome in zip(asked, outcomes, strict=True):
                if isinstance(outcome, Receipt):
                    proved[replica] = outcome
                else:
                    refused[replica] = outcome
        return {r: receipt for r, receipt in proved.items() if not r.gone.done()}, refused

    async def _offer_twice(
        self, replica: Replica[Serves], adapter: Adapter, version: int, digest: str
    ) -> Receipt | EngineError | IntegrityError:
        try:
            return await self._offer(replica, adapter, version, digest)
        except ReplicaDied as error:
            return error
        except (EngineError, IntegrityError) as error:
            log.warning("%s refused version %d, asking once more: %s", replica, version, error)
        try:
            return await self._offer(replica, adapter, version, digest)
        except (EngineError, IntegrityError) as error:
            return error

    async def _offer(self, replica: Replica[Serves], adapter: Adapter, version: int, digest: str) -> Receipt:
        """One try of one replica, and the check of its proof. Raises EngineError, IntegrityError."""
        receipt = await self._replicas.call(replica, replica.item.load(adapter, version), self._limits.load_s)
        found = (receipt.version, receipt.digest)
        if found != (version, digest) or receipt.matched_modules < 1:
            raise IntegrityError(
                f"{replica} proves version {receipt.version} with digest {receipt.digest[:12]} bound to "
                f"{receipt.matched_modules} modules; published was version {version} with digest {digest[:12]}"
            )
        return receipt


def _kind(facts: EngineFacts) -> tuple[str, str, int, str]:
    return facts.name, facts.dtype, facts.context_tokens, facts.sync_mode


def _failed_publish(
    version: int, old: int | None, errors: Sequence[EngineError | IntegrityError]
) -> EngineError | IntegrityError:
    """The error of a publish that no replica proved: IntegrityError when one claimed to and was wrong."""
    worst = next((error for error in errors if isinstance(error, IntegrityError)), None)
    causes = "; ".join(dict.fromkeys(str(error) for error in errors)) or "every replica died meanwhile"
    in_force = "the base weights are" if old is None else f"version {old} is"
    message = f"no replica took version {version}, {in_force} still in force: {causes}"
    return IntegrityError(message) if worst else EngineError(message)
