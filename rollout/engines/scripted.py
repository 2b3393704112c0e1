"""An engine that says what it is told, with the versions, receipts and refusals of a real one. No model, no torch."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from palestra.envs.errors import EngineError
from palestra.rollout.adapters import Adapter
from palestra.rollout.engines.checks import UNPUBLISHED, check_adapter, check_ids, check_request
from palestra.rollout.engines.protocol import EngineFacts
from palestra.rollout.types import Completion, Finish, Float32, Receipt, Sampling

Encode = Callable[[str], Sequence[int]]
"""Text to ids, without special tokens: `renderer.encode` or `lambda text: tokenizer(text).input_ids`."""

LogProbs = Callable[[Sequence[int], int, float], Sequence[float]]
"""(ids [L], version, temperature) -> log-probabilities [L - 1] of ids[1:]."""


@dataclass(frozen=True, slots=True)
class Reply:
    """One scripted turn. Reply("add 2 3") or Reply((5, 7, 2), logprobs=(-0.1, -0.2, -0.3), delay_s=0.5)"""

    turn: str | Sequence[int]
    logprobs: Sequence[float] | None = None
    delay_s: float = 0.0  # math.inf: never answers, until the request's deadline
    error: str | None = None  # the request fails with EngineError(error)


Turn = str | Sequence[int] | Reply
Script = Sequence[Turn] | Mapping[str, Sequence[Turn]] | Callable[[Sequence[int], str, int], Turn]
"""The turns of every session, or by session name, or a function of (prompt, session, index of the turn)."""


@dataclass(frozen=True, slots=True)
class Request:
    """What was asked for, for tests that look."""

    prompt: tuple[int, ...]
    sampling: Sampling
    session: str
    version: int


class ScriptedEngine:
    """Plays a script per session. A turn that ends with no stop id gets the request's first one, as if sampled.

    Turns longer than max_tokens are cut and finish by length. A request keeps the version it was made under. Every
    token gets `logprobs`: one constant, or a function, or the reply's own. `modules` are the names that an adapter may
    use (None: any). A version in `rejected` fails to load. After `die()` every call raises EngineError.
    """

    def __init__(
        self,
        script: Script,
        *,
        encode: Encode | None = None,
        logprobs: float | LogProbs = -0.6931472,  # log(0.5)
        vocab: int = 2**31 - 1,
        context_tokens: int = 32768,
        modules: Collection[str] | None = None,
        rejected: Collection[int] = (),
        request_timeout_s: float = 60.0,
        name: str = "scripted",
    ) -> None:
        self._script = script
        self._encode = encode
        self._logprobs = logprobs
        self._vocab = vocab
        self._modules = None if modules is None else dict.fromkeys(modules)
        self._rejected = rejected
        self._timeout_s = request_timeout_s
        self._facts = EngineFacts(name, "none", "float32", context_tokens, "adapter")
        self._version = UNPUBLISHED
        self._turns: Counter[str] = Counter()
        self._dead: str | None = None
        self.calls: Counter[str] = Counter()  # by method name
        self.requests: list[Request] = []

    async def start(self) -> EngineFacts:
        """As Engine.start."""
        self._count("start")
        return self._facts

    async def generate(self, prompt: Sequence[int], sampling: Sampling, *, session: str) -> Completion:
        """As Engine.generate; the next turn of the session's script. ValueError when the script has no more."""
        check_request(prompt, sampling, context_tokens=self._facts.context_tokens, vocab=self._vocab)
        self._count("generate")
        version, index = self._version, self._turns[session]
        self.requests.append(Request(tuple(prompt), sampling, session, version))
        reply = self._next(prompt, session, index)
        self._turns[session] += 1
        await self._wait(reply, session)
        ids, finish = self._cut(reply, sampling)
        logprobs = np.asarray(self._of(reply, prompt, ids, version, sampling.temperature), dtype=np.float32)
        if logprobs.shape != (len(ids),):
            raise ValueError(f"the script gives {logprobs.shape} log-probabilities for {len(ids)} tokens")
        return Completion(np.asarray(ids, dtype=np.int32), logprobs, finish, np.full(len(ids), version, dtype=np.int32))

    async def end_session(self, session: str) -> None:
        """As Engine.end_session; a later request of the same name starts its script again."""
        self._count("end_session")
        self._turns.pop(session, None)

    async def score(self, ids: Sequence[int]) -> Float32:
        """As Engine.score, by the constant or the function."""
        check_ids(ids, vocab=self._vocab, at_least=2, at_most=self._facts.context_tokens)
        self._count("score")
        return np.asarray(self._all(ids, self._version, 1.0), dtype=np.float32)

    async def load(self, adapter: Adapter, version: int) -> Receipt:
        """As Engine.load; nothing is applied, everything is checked."""
        self._count("load")
        started = time.perf_counter()
        modules = dict.fromkeys(adapter.factors) if self._modules is None else self._modules
        check_adapter(adapter, modules, {name: weight.shape for name, weight in adapter.weights.items()})
        if version in self._rejected:
            raise EngineError(f"version {version} is rejected by the script; version {self._version} stays in force")
        digest = adapter.digest()
        self._version = version
        return Receipt(self._facts.name, version, digest, adapter.num_parts, "adapter", time.perf_counter() - started)

    async def close(self) -> None:
        """As Engine.close."""
        self.calls["close"] += 1
        self._dead = "the engine is closed"

    def die(self, cause: str = "the engine process is gone") -> None:
        """Fail this and every later call, those in flight included."""
        self._dead = cause

    def _count(self, method: str) -> None:
        self._alive()
        self.calls[method] += 1

    def _alive(self) -> None:
        if self._dead is not None:
            raise EngineError(self._dead)

    def _next(self, prompt: Sequence[int], session: str, index: int) -> Reply:
        if callable(self._script):
            turn = self._script(prompt, session, index)
        else:
            turns = self._script[session] if isinstance(self._script, Mapping) else self._script
            if index >= len(turns):
                raise ValueError(f"session {session!r} asks for turn {index + 1}, but its script has {len(turns)}")
            turn = turns[index]
        return turn if isinstance(turn, Reply) else Reply(turn)

    async def _wait(self, reply: Reply, session: str) -> None:
        if reply.delay_s > self._timeout_s:
            await asyncio.sleep(self._timeout_s)
            raise EngineError(f"session {session!r}: no answer within {self._timeout_s} s")
        await asyncio.sleep(reply.delay_s)  # 0 too: others get their turn, as they would with a real engine
        self._alive()
        if reply.error is not None:
            raise EngineError(reply.error)

    def _cut(self, reply: Reply, sampling: Sampling) -> tuple[list[int], Finish]:
        ids = list(self._ids(reply))
        stops = [i for i, token in enumerate(ids) if token in sampling.stop_ids]
        if stops:
            ids = ids[: stops[0] + 1]
        elif len(ids) < sampling.max_tokens:
            if not sampling.stop_ids:
                raise ValueError(f"the scripted turn ends after {len(ids)} tokens, but the request has no stop ids")
            ids.append(sampling.stop_ids[0])
        if len(ids) > sampling.max_tokens:
            ids = ids[: sampling.max_tokens]
        return ids, Finish.STOP if ids[-1] in sampling.stop_ids else Finish.LENGTH

    def _ids(self, reply: Reply) -> Sequence[int]:
        if not isinstance(reply.turn, str):
            return reply.turn
        if self._encode is None:
            raise ValueError(f"the script holds text ({reply.turn[:30]!r}), so the engine needs `encode`")
        return self._encode(reply.turn)

    def _of(
        self, reply: Reply, prompt: Sequence[int], ids: list[int], version: int, temperature: float
    ) -> Sequence[float]:
        if reply.logprobs is not None:
            return list(reply.logprobs)[: len(ids)]
        if not callable(self._logprobs):
            return [self._logprobs] * len(ids)
        return self._all([*prompt, *ids], version, temperature or 1.0)[len(prompt) - 1 :]

    def _all(self, ids: Sequence[int], version: int, temperature: float) -> Sequence[float]:
        if callable(self._logprobs):
            return self._logprobs(ids, version, temperature)
        return [self._logprobs] * (len(ids) - 1)
