"""What every engine promises, whatever it is made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from palestra.rollout.adapters import Adapter
from palestra.rollout.types import Completion, Float32, Receipt, Sampling


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What an engine says of itself once it is up."""

    name: str  # "vllm 0.32.0", "transformers 5.19.0", "scripted"
    device: str
    dtype: str
    context_tokens: int  # longest row it serves
    sync_mode: str  # "adapter" or "merged"


class Engine(Protocol):
    """Samples tokens from one set of weights at a time. Ids in, ids out; many requests at once."""

    async def start(self) -> EngineFacts:
        """Load the base weights and prove the settings that the trainer relies on (processed log-probabilities).
        Raises EngineError."""
        ...

    async def generate(self, prompt: Sequence[int], sampling: Sampling, *, session: str) -> Completion:
        """Sample one turn after `prompt`. Requests of one `session` (an episode) extend each other's prompt, so that
        an engine can keep what it computed. Raises EngineError; ValueError when prompt and max_tokens do not fit."""
        ...

    async def end_session(self, session: str) -> None:
        """The episode is over: whatever was kept for it may go. Idempotent."""
        ...

    async def score(self, ids: Sequence[int]) -> Float32:
        """log p(ids[t] | ids[:t]) at temperature 1 under the weights in force, [L - 1] float32, for t = 1 to L - 1."""
        ...

    async def load(self, adapter: Adapter, version: int) -> Receipt:
        """Serve base + adapter as `version` from now on. All or nothing: on EngineError the old version is in force.
        Nothing cached under an older version can answer a request made after the return. A request in flight is
        neither lost nor mixed: `Completion.versions` says which weights sampled each token."""
        ...

    async def close(self) -> object:
        """Free everything. Idempotent."""
        ...
