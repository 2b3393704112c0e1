"""The two ways of bringing an adapter into vLLM, behind one shape: as factors beside the weights, or merged."""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from palestra.envs.errors import EngineError
from palestra.rollout.adapters import Adapter
from palestra.rollout.engines.checkpoint import Checkpoint
from palestra.rollout.engines.checks import UNPUBLISHED, check_adapter
from palestra.rollout.engines.handover import hand_over, withdraw
from palestra.rollout.engines.served import ServedVersions
from palestra.rollout.engines.vllm_settings import VLLMSettings

RPC = Callable[..., Awaitable[Any]]
"""`await rpc("method", argument, ...)`: the first worker's result; EngineError when workers fail or differ."""


class Spans(Protocol):
    """What the sync needs of one of vLLM's completion outputs."""

    @property
    def token_ids(self) -> Sequence[int]: ...

    @property
    def weight_versions(self) -> Sequence[Any] | None: ...


@dataclass(frozen=True, slots=True)
class InForce:
    """What one request runs under: the adapter to name (None: none), and the version unless spans tell it."""

    lora: Any | None
    version: int


class Sync(Protocol):
    """How versions come and go. `epoch` changes when weights under a running request may have changed."""

    epoch: int

    async def prepare(self) -> None:
        """Ask the workers what can be updated."""
        ...

    async def load(self, adapter: Adapter, version: int) -> int:
        """Put a folded adapter in force; the number of modules proved. EngineError: the old version is in force."""
        ...

    def request(self) -> Any:
        """Async context of one request: InForce."""
        ...

    def versions(self, output: Spans, in_force: InForce) -> list[int]:
        """The weights that sampled each token."""
        ...

    def close(self) -> None:
        """Remove what lies on disk or in memory file systems."""
        ...


class AdapterSync:
    """Factors beside the base weights. Every load gets a name and an id that no load before it had, in this life or
    an earlier one, so no cache of another version can answer. A request keeps its adapter to its end."""

    def __init__(self, engine: Any, rpc: RPC, settings: VLLMSettings, make_lora: Callable[..., Any], cpu: bool) -> None:
        self._engine = engine
        self._rpc = rpc
        self._settings = settings
        self._make_lora = make_lora
        self._cpu = cpu
        self._life = secrets.token_hex(4)
        self._ids = itertools.count(secrets.randbelow(2**20) * 1024 + 1)
        self._served: ServedVersions[Any] = ServedVersions(settings.max_loras)
        self._shapes: dict[str, tuple[int, int] | None] = {}
        self.epoch = 0

    async def prepare(self) -> None:
        """As Sync.prepare; on CPUs also replaces vLLM's slow products."""
        with Checkpoint(self._settings.model_folder) as checkpoint:
            sizes = checkpoint.shapes()
        self._shapes = {name: sizes.get(name) for name in await self._rpc("palestra_lora_modules")}
        if self._cpu:
            await self._rpc("palestra_use_plain_products")

    async def load(self, adapter: Adapter, version: int) -> int:
        """As Sync.load. Waits while `max_loras` versions have requests in flight."""
        check_adapter(adapter, self._shapes)
        await self._served.room(self._settings.load_timeout_s)
        await self._retire()
        folder = await asyncio.to_thread(hand_over, adapter)
        number = next(self._ids)
        lora = self._make_lora(f"v{version}-{self._life}-{number}", number, str(folder))
        try:
            async with asyncio.timeout(self._settings.load_timeout_s):
                await self._engine.add_lora(lora)
            digest, matched = await self._rpc("palestra_bound", number, str(folder))
            _prove(adapter, digest, matched)
        except Exception:
            await self._undo(number, folder)
            raise
        self._served.put_in_force(version, lora)
        await self._retire()
        return int(matched)

    @asynccontextmanager
    async def request(self) -> AsyncIterator[InForce]:
        """As Sync.request."""
        async with self._served.use() as served:
            yield InForce(None, UNPUBLISHED) if served is None else InForce(served.handle, served.version)

    def versions(self, output: Spans, in_force: InForce) -> list[int]:
        """As Sync.versions: the request's, from first to last."""
        return [in_force.version] * len(output.token_ids)

    def close(self) -> None:
        """As Sync.close."""
        for lora in self._served.handles():
            withdraw(Path(lora.lora_path))

    async def _retire(self) -> None:
        for served in self._served.idle():
            await self._undo(served.handle.lora_int_id, Path(served.handle.lora_path))
            self._served.forget(served)

    async def _undo(self, number: int, folder: Path) -> None:
        try:
            async with asyncio.timeout(self._settings.load_timeout_s):
                await self._engine.remove_lora(number)
        finally:
            withdraw(folder)


class MergedSync:
    """Base + update, or whole weights, written into the engine's, from the base's files each time. Requests in flight
    stop between two tokens, their cached keys and values are dropped and computed again, and they go on under the new
    version."""

    def __init__(self, engine: Any, rpc: RPC, settings: VLLMSettings) -> None:
        self._engine = engine
        self._rpc = rpc
        self._settings = settings
        self._labels: dict[str, int] = {}
        self._shapes: dict[str, tuple[int, int] | None] = {}
        self._sizes: dict[str, tuple[int, ...]] = {}
        self._version = UNPUBLISHED
        self.epoch = 0

    async def prepare(self) -> None:
        """As Sync.prepare."""
        with Checkpoint(self._settings.model_folder) as checkpoint:
            sizes, self._sizes = checkpoint.shapes(), checkpoint.sizes()
        names = await self._rpc("palestra_mergeable", list(sizes))
        self._shapes = {name: sizes[name] for name in names}

    async def load(self, adapter: Adapter, version: int) -> int:
        """As Sync.load. Everything that can be refused is refused before the first weight is written; a failure after
        that leaves the engine unusable (`HalfWritten`), never serving a mixture."""
        check_adapter(adapter, self._shapes, self._sizes)
        folder = await asyncio.to_thread(hand_over, adapter)
        label = f"{len(self._labels)}-v{version}"
        self.epoch += 1
        try:
            async with asyncio.timeout(self._settings.load_timeout_s):
                await self._engine.pause_generation(mode="keep", clear_cache=True)
                digest, matched = await self._rpc("palestra_merge", str(folder), str(self._settings.model_folder))
                _prove(adapter, digest, matched)
                await self._engine.update_weight_version(label)
        except Exception as error:
            raise HalfWritten(f"merging version {version} failed half-way: {error}") from error
        finally:
            withdraw(folder)
            self.epoch += 1
        self._labels[label], self._version = version, version
        await self._engine.resume_generation()
        return int(matched)

    @asynccontextmanager
    async def request(self) -> AsyncIterator[InForce]:
        """As Sync.request."""
        yield InForce(None, self._version)

    def versions(self, output: Spans, in_force: InForce) -> list[int]:
        """As Sync.versions: from the spans that vLLM reports."""
        versions = [
            self._labels.get(span.version, UNPUBLISHED)
            for span in output.weight_versions or ()
            for _ in range(span.start, span.end)
        ]
        if len(versions) != len(output.token_ids):
            raise EngineError(f"vLLM reports weight versions for {len(versions)} of {len(output.token_ids)} tokens")
        return versions

    def close(self) -> None:
        """As Sync.close."""


class HalfWritten(EngineError):
    """Weights may be of two versions: the engine must not serve again."""


def _prove(adapter: Adapter, digest: str, matched: int) -> None:
    if matched != adapter.num_parts:
        raise EngineError(f"the engine's workers bound {matched} of {adapter.num_parts} modules")
    if digest != adapter.digest():
        raise EngineError(f"the engine's workers received factors {digest[:12]}, not {adapter.digest()[:12]} as sent")
