"""A rollout worker: an engine and the player that plays beside it, in one process. What a Ray actor hosts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from palestra.rollout.adapters import Adapter
from palestra.rollout.engines.protocol import Engine, EngineFacts
from palestra.rollout.player import EpisodeRequest, Player
from palestra.rollout.types import Completion, Float32, Receipt, Sampling, Trajectory


class Worker:
    """An Engine that also plays episodes against itself: no network lies between a turn and the next."""

    def __init__(self, engine: Engine, make_player: Callable[[Engine], Player]) -> None:
        self._engine = engine
        self._player = make_player(engine)
        self._started = False

    async def start(self) -> EngineFacts:
        """Start the engine, then the player. Raises EngineError, SandboxError, ConfigError."""
        facts = await self._engine.start()
        await self._player.start()
        self._started = True
        return facts

    async def run(self, request: EpisodeRequest) -> Trajectory:
        """Play one episode."""
        return await self._player.run(request)

    async def generate(self, prompt: Sequence[int], sampling: Sampling, *, session: str) -> Completion:
        """As the engine does."""
        return await self._engine.generate(prompt, sampling, session=session)

    async def end_session(self, session: str) -> None:
        """As the engine does."""
        await self._engine.end_session(session)

    async def score(self, ids: Sequence[int]) -> Float32:
        """As the engine does."""
        return await self._engine.score(ids)

    async def load(self, adapter: Adapter, version: int) -> Receipt:
        """As the engine does."""
        return await self._engine.load(adapter, version)

    async def close(self) -> int:
        """Close both. Returns the boxes that could not be removed."""
        leaked = await self._player.close() if self._started else 0
        await self._engine.close()
        return leaked
