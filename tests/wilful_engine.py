"""An engine that does as it is told: serves, refuses, lies, stalls or dies. Cheap, and picklable by its factory."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from palestra.envs.errors import EngineError
from palestra.rollout.adapters import Adapter, Factors
from palestra.rollout.engines.protocol import EngineFacts
from palestra.rollout.replicas import ReplicaDied
from palestra.rollout.types import Completion, Finish, Float32, Receipt, Sampling


@dataclass
class Will:
    """What an engine is told to do; a test changes it while the engine runs."""

    dies: bool = False  # as an actor does: every call says so
    fails: int = 0  # of the next requests, each with EngineError
    stalls: bool = False
    refuses_loads: int = 0
    wrong_digest: bool = False
    modules: int = 7
    context_tokens: int = 4096
    fails_to_start: int = 0
    versions_at_first_service: list[int] = field(default_factory=list)


class WilfulEngine:
    """Echoes the prompt, stamped with its version."""

    def __init__(self, will: Will | None = None, name: str = "wilful") -> None:
        self.will, self.name = will or Will(), name
        self.version = -1
        self.loads: list[int] = []
        self.ended: list[str] = []
        self.served: list[str] = []
        self.running = 0
        self.closed = False

    async def start(self) -> EngineFacts:
        if self.will.fails_to_start > 0:
            self.will.fails_to_start -= 1
            raise EngineError("no memory for the weights")
        return EngineFacts(self.name, "cpu", "float32", self.will.context_tokens, "adapter")

    async def generate(self, prompt: Sequence[int], sampling: Sampling, *, session: str) -> Completion:
        if len(prompt) > self.will.context_tokens:
            raise ValueError(
                f"{len(prompt)} tokens and {sampling.max_tokens} more do not fit into {self.will.context_tokens}"
            )
        self.running += 1
        try:
            await self._behave()
        finally:
            self.running -= 1
        if not self.served:
            self.will.versions_at_first_service.append(self.version)
        self.served.append(session)
        ids = np.asarray(prompt[: sampling.max_tokens], np.int32)
        zeros = np.zeros(len(ids), np.float32)
        return Completion(ids, zeros, Finish.STOP, np.full(len(ids), self.version, np.int32))

    async def end_session(self, session: str) -> None:
        self.ended.append(session)

    async def score(self, ids: Sequence[int]) -> Float32:
        await self._behave()
        return np.full(len(ids) - 1, self.version, np.float32)

    async def load(self, adapter: Adapter, version: int) -> Receipt:
        await self._behave()
        if self.will.refuses_loads > 0:
            self.will.refuses_loads -= 1
            raise EngineError(f"no room for version {version}")
        self.version = version
        self.loads.append(version)
        digest = "0" * 64 if self.will.wrong_digest else adapter.digest()
        return Receipt(self.name, version, digest, self.will.modules, "adapter", 0.001)

    async def close(self) -> None:
        self.closed = True

    async def _behave(self) -> None:
        await asyncio.sleep(0)
        if self.will.dies:
            raise ReplicaDied("its process is dead")
        if self.will.fails > 0:
            self.will.fails -= 1
            raise EngineError("a bad moment")
        if self.will.stalls:
            await asyncio.sleep(3600)


class WilfulPlayer(WilfulEngine):
    """Plays too: a request says what is to be done or told, or how many seconds it takes."""

    def __init__(self, will: Will | None = None, name: str = "wilful") -> None:
        super().__init__(will, name)
        self.cancelled = 0
        self.last: Adapter | None = None

    async def load(self, adapter: Adapter, version: int) -> Receipt:
        self.last = adapter
        return await super().load(adapter, version)

    async def run(self, request: str) -> str:
        match request.split():
            case ["complain"]:
                raise ValueError("no such task: complain")
            case ["where"]:
                return str(os.getpid())
            case ["die"]:
                os.kill(os.getpid(), signal.SIGKILL)
            case ["devices"]:
                return os.environ.get("CUDA_VISIBLE_DEVICES", "unset")
            case ["variable", name]:
                return os.environ.get(name, "unset")
            case ["child"]:
                return str((await asyncio.create_subprocess_exec("sleep", "600")).pid)
            case ["cancelled?"]:
                return str(self.cancelled)
            case ["factors", *_]:  # an array that is mapped from the object store owns no memory, and is read-only
                assert self.last is not None
                factors = self.last.factors["layers.0"]
                return str(not factors.a.flags.owndata and not factors.a.flags.writeable)
            case ["cancellable"]:
                try:
                    await asyncio.sleep(3600)
                except asyncio.CancelledError:
                    self.cancelled += 1
                    raise
        await asyncio.sleep(float(request))
        return f"played for {request} s"

    async def close(self) -> int:  # type: ignore[override]
        self.closed = True
        return 0


def adapter(value: float, modules: int = 2, width: int = 4) -> Adapter:
    """Factors filled with `value`."""
    full = {
        f"layers.{i}": Factors(np.full((1, width), value, np.float32), np.full((width, 1), value, np.float32), 1.0)
        for i in range(modules)
    }
    return Adapter(full)
