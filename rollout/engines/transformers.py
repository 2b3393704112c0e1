"""The engine for a laptop: a transformers model on the CPU or one GPU, batched, its cache kept across turns."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

from palestra.envs.errors import EngineError
from palestra.rollout.adapters import Adapter
from palestra.rollout.engines.checks import check_adapter, check_ids, check_request
from palestra.rollout.engines.decoding import score
from palestra.rollout.engines.kept import KeptSessions
from palestra.rollout.engines.lora_layers import LoraLayers
from palestra.rollout.engines.protocol import EngineFacts
from palestra.rollout.engines.step_loop import Row, StepLoop, Weights
from palestra.rollout.types import Completion, Float32, Receipt, Sampling

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TransformersSettings:
    """How to run the engine."""

    model_folder: Path
    context_tokens: int  # longest row served
    dtype: str = "float32"
    device: str = "cpu"  # or "cuda", "cuda:1"
    max_num_seqs: int = 32  # rows decoded at once; more wait
    kept_mib: int = 512  # keys and values of finished turns, for the next turn of their session
    threads: int | None = None  # of the whole process; None leaves them
    seed: int = 0  # for requests without a seed of their own
    start_timeout_s: float = 300.0
    request_timeout_s: float = 600.0
    load_timeout_s: float = 120.0
    name: str = "transformers"


class TransformersEngine:
    """Serves base + adapter, or whole weights. Requests in flight at a load keep what they began with to their end."""

    def __init__(self, settings: TransformersSettings) -> None:
        self._settings = settings
        self._rng = random.Random(settings.seed)
        self._loop: StepLoop | None = None
        self._kept = KeptSessions(settings.kept_mib << 20)
        self._vocab = 0

    async def start(self) -> EngineFacts:
        """As Engine.start. EngineError when the folder holds no such model or its context is shorter."""
        try:
            await asyncio.wait_for(asyncio.to_thread(self._open), self._settings.start_timeout_s)
        except TimeoutError as error:
            raise EngineError(f"no model within start_timeout_s = {self._settings.start_timeout_s} s") from error
        except (OSError, ValueError, RuntimeError) as error:
            raise EngineError(f"{self._settings.model_folder}: cannot serve this model: {error}") from error
        return EngineFacts(
            name=f"transformers {transformers.__version__}",
            device=self._settings.device,
            dtype=self._settings.dtype,
            context_tokens=self._settings.context_tokens,
            sync_mode="adapter",
        )

    async def generate(self, prompt: Sequence[int], sampling: Sampling, *, session: str) -> Completion:
        """As Engine.generate. The same seed gives the same tokens whatever shares the batch, up to float32 rounding."""
        check_request(prompt, sampling, context_tokens=self._settings.context_tokens, vocab=self._vocab)
        seed = self._rng.getrandbits(63) if sampling.seed is None else sampling.seed % 2**63
        row = Row(list(prompt), sampling, session, torch.Generator().manual_seed(seed))
        self._running().add(row)
        return await self._within(row.answer, self._settings.request_timeout_s, "the request")

    async def end_session(self, session: str) -> None:
        """As Engine.end_session."""
        loop = self._running()
        await self._within(loop.call(lambda: self._kept.drop(session)), self._settings.request_timeout_s, "the release")

    async def score(self, ids: Sequence[int]) -> Float32:
        """As Engine.score."""
        check_ids(ids, vocab=self._vocab, at_least=2, at_most=self._settings.context_tokens)
        loop = self._running()

        def run() -> Float32:
            self._layers.use(loop.weights.bound)
            return np.asarray(score(self._model, list(ids)).cpu().numpy(), dtype=np.float32)

        return await self._within(loop.call(run), self._settings.request_timeout_s, "the score")

    async def load(self, adapter: Adapter, version: int) -> Receipt:
        """As Engine.load. Takes effect between two steps; sessions' kept states of older loads are never used again."""
        started = time.perf_counter()
        loop = self._running()

        def run() -> str:
            check_adapter(adapter, self._layers.shapes, self._layers.sizes)
            digest: str = adapter.digest()
            loop.weights = Weights(loop.weights.load + 1, version, self._layers.bind(adapter))
            return digest

        digest = await self._within(loop.call(run), self._settings.load_timeout_s, f"the load of version {version}")
        mode: Literal["adapter", "merged"] = "merged" if adapter.weights else "adapter"
        return Receipt(self._settings.name, version, digest, adapter.num_parts, mode, time.perf_counter() - started)

    async def close(self) -> None:
        """As Engine.close."""
        if self._loop is not None:
            await asyncio.to_thread(self._loop.close, self._settings.request_timeout_s)

    def _open(self) -> None:
        if self._settings.threads is not None:
            torch.set_num_threads(self._settings.threads)
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            self._settings.model_folder, dtype=getattr(torch, self._settings.dtype)
        )
        longest = getattr(model.config, "max_position_embeddings", self._settings.context_tokens)
        if self._settings.context_tokens > longest:
            raise ValueError(f"context_tokens is {self._settings.context_tokens}, the model has {longest} positions")
        self._model = model.eval().requires_grad_(False)
        self._model.to(torch.device(self._settings.device))
        self._vocab = int(model.config.vocab_size)
        self._layers = LoraLayers(self._model)
        self._loop = StepLoop(self._model, self._layers, self._kept, self._settings.max_num_seqs)

    def _running(self) -> StepLoop:
        if self._loop is None:
            raise EngineError("the engine is not started")
        return self._loop

    async def _within(self, answer: Future[T], seconds: float, what: str) -> T:
        try:
            return await asyncio.wait_for(asyncio.wrap_future(answer), seconds)
        except TimeoutError as error:
            raise EngineError(f"{what} was not answered within {seconds} s") from error
