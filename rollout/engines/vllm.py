"""The engine for real work: vLLM's asynchronous engine, token ids in and out. The only importer of vLLM."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from vllm import SamplingParams
from vllm import __version__ as vllm_version
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from palestra.envs.errors import EngineError
from palestra.rollout.adapters import Adapter
from palestra.rollout.engines.checks import check_ids, check_request
from palestra.rollout.engines.handover import folded, sweep
from palestra.rollout.engines.probe import check_tempered
from palestra.rollout.engines.protocol import EngineFacts
from palestra.rollout.engines.vllm_settings import VLLMSettings, cpu_environment
from palestra.rollout.engines.vllm_sync import AdapterSync, HalfWritten, InForce, MergedSync, Sync
from palestra.rollout.types import Completion, Finish, Float32, Receipt, Sampling

_LOG = logging.getLogger("vllm.v1.engine.async_llm")
PROBE_TEMPERATURE = 0.5
CPU_BLOCK_TOKENS = 32  # vLLM's own 128 on CPUs would share no prefix of a short conversation
CPU_BATCH_TOKENS = 2048  # prefilled in one step; longer contexts raise it
EXTENSION = "palestra.rollout.engines.vllm_worker.WorkerExtension"


class VLLMEngine:
    """Base weights and one adapter in force, by factors or merged (`VLLMSettings.sync_mode`).

    Start and use it in one event loop. Sessions share vLLM's prefix cache, so they need no state here. After a merge
    that failed half-way, or a death of vLLM, every call raises EngineError.
    """

    def __init__(self, settings: VLLMSettings) -> None:
        self._settings = settings
        self._requests = itertools.count()
        self._loading = asyncio.Lock()
        self._engine: AsyncLLM | None = None
        self._refusal: str | None = "the engine is not started"
        self._closed = False
        self._sync: Sync
        self._vocab = 0

    async def start(self) -> EngineFacts:
        """As Engine.start. Proves on a few tokens that log-probabilities are of the tempered distribution."""
        settings = self._settings
        try:
            async with asyncio.timeout(settings.start_timeout_s):
                await asyncio.to_thread(sweep)
                engine = await asyncio.to_thread(self._open)
                self._vocab, self._sync = engine.model_config.get_vocab_size(), self._make_sync(engine)
                self._engine, self._refusal = engine, None
                await self._sync.prepare()
                await self._probe()
        except TimeoutError as error:
            await self.close()
            raise EngineError(f"vLLM did not start within start_timeout_s = {settings.start_timeout_s} s") from error
        except Exception as error:  # the border to vLLM, which raises anything: the cause is kept
            await self.close()
            raise EngineError(f"{settings.model_folder}: vLLM cannot serve this model: {error}") from error
        return EngineFacts(
            name=f"vllm {vllm_version}",
            device=current_platform.device_type,
            dtype=settings.dtype,
            context_tokens=settings.context_tokens,
            sync_mode=settings.sync_mode,
        )

    async def generate(self, prompt: Sequence[int], sampling: Sampling, *, session: str) -> Completion:
        """As Engine.generate. ValueError before anything is sent when the request cannot be served."""
        check_request(prompt, sampling, context_tokens=self._settings.context_tokens, vocab=self._vocab)
        parameters = SamplingParams(
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            seed=None if sampling.seed is None else sampling.seed % 2**63,
            stop_token_ids=list(sampling.stop_ids),
            logprobs=0,  # of the sampled token
            **_QUIET,
        )
        self._alive()
        async with self._sync.request() as in_force:
            output = await self._ask(prompt, parameters, session, in_force)
        sampled = output.outputs[0]
        if sampled.finish_reason not in ("stop", "length"):
            raise EngineError(f"session {session!r}: vLLM ended the request with {sampled.finish_reason!r}")
        rows = zip(sampled.logprobs or (), sampled.token_ids, strict=True)
        return Completion(
            ids=np.asarray(sampled.token_ids, dtype=np.int32),
            logprobs=np.asarray([_of(row, token) for row, token in rows], dtype=np.float32),
            finish=Finish(sampled.finish_reason),
            versions=np.asarray(self._sync.versions(sampled, in_force), dtype=np.int32),
        )

    async def end_session(self, session: str) -> None:
        """As Engine.end_session: nothing is kept by session, the prefix cache forgets by itself."""

    async def score(self, ids: Sequence[int]) -> Float32:
        """As Engine.score. ValueError for rows as long as the model allows: vLLM needs one position more."""
        longest = min(self._settings.context_tokens, self._settings.model_positions - 1)
        check_ids(ids, vocab=self._vocab, at_least=2, at_most=longest)
        self._alive()
        parameters = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, **_QUIET)
        while True:
            epoch = self._sync.epoch
            async with self._sync.request() as in_force:
                output = await self._ask(ids, parameters, "score", in_force)
            if epoch == self._sync.epoch:  # else weights changed while the row was scored: again, under the new ones
                break
        rows = output.prompt_logprobs or []
        if len(rows) != len(ids):
            raise EngineError(f"vLLM scored {len(rows)} of {len(ids)} tokens")
        return np.asarray([_of(row, token) for row, token in zip(rows[1:], ids[1:], strict=True)], dtype=np.float32)

    async def load(self, adapter: Adapter, version: int) -> Receipt:
        """As Engine.load. One at a time, and to its end even when the caller is cancelled. In adapter mode it waits
        while `max_loras` versions have requests in flight."""
        started = time.perf_counter()
        self._alive()
        loading = asyncio.create_task(self._load(folded(adapter), version))
        matched = await asyncio.shield(loading)
        seconds = time.perf_counter() - started
        return Receipt(self._settings.name, version, adapter.digest(), matched, self._settings.sync_mode, seconds)

    async def close(self) -> None:
        """As Engine.close."""
        engine, self._engine = self._engine, None
        self._refusal, self._closed = self._refusal or "the engine is closed", True
        if engine is not None:
            _LOG.setLevel(logging.CRITICAL)  # it tells requests in flight of the end, and logs that as a failure
            await asyncio.to_thread(engine.shutdown)
            self._sync.close()

    async def _load(self, adapter: Adapter, version: int) -> int:
        async with self._loading:
            try:
                matched: int = await self._sync.load(adapter, version)
                return matched
            except HalfWritten as error:
                self._refusal = str(error)
                await self.close()
                raise
            except EngineError:
                raise
            except Exception as error:  # the border to vLLM, which raises anything: the cause is kept
                raise EngineError(f"vLLM refused version {version}; the old one stays in force: {error}") from error

    def _alive(self) -> AsyncLLM:
        if self._refusal is not None or self._engine is None:
            raise EngineError(self._refusal or "the engine is closed")
        return self._engine

    def _make_sync(self, engine: AsyncLLM) -> Sync:
        if self._settings.sync_mode == "merged":
            return MergedSync(engine, self._rpc, self._settings)
        return AdapterSync(engine, self._rpc, self._settings, LoRARequest, current_platform.is_cpu())

    def _open(self) -> AsyncLLM:
        environment = {
            "VLLM_ENGINE_READY_TIMEOUT_S": str(int(self._settings.start_timeout_s)),
            "VLLM_NO_USAGE_STATS": "1",
        }
        if "VLLM_LOGGING_LEVEL" not in os.environ:
            environment["VLLM_LOGGING_LEVEL"] = "ERROR"
            logging.getLogger("vllm").setLevel(logging.ERROR)
        if current_platform.is_cpu():
            environment |= cpu_environment(self._settings)
        with _environment(environment):
            engine = AsyncLLM.from_engine_args(_engine_args(self._settings))
        if self._closed:  # the deadline passed meanwhile, and nobody waits for it any more
            engine.shutdown()
        return engine

    async def _ask(
        self, ids: Sequence[int], parameters: SamplingParams, session: str, in_force: InForce
    ) -> RequestOutput:
        engine = self._alive()
        prompt: Any = {"type": "token", "prompt_token_ids": list(ids)}
        name = f"{session}-{next(self._requests)}"
        try:
            async with asyncio.timeout(self._settings.request_timeout_s):
                answers = engine.generate(prompt, parameters, name, lora_request=in_force.lora)
                outputs = [output async for output in answers]
        except TimeoutError as error:
            raise EngineError(f"session {session!r}: no answer in {self._settings.request_timeout_s} s") from error
        except Exception as error:  # the border to vLLM, which raises anything: the cause is kept
            if engine.errored:
                self._refusal = f"vLLM died: {error}"
            raise EngineError(f"session {session!r}: vLLM failed: {type(error).__name__}: {error}") from error
        if not outputs:
            raise EngineError(f"session {session!r}: vLLM gave no answer")
        return outputs[-1]

    async def _rpc(self, method: str, *args: object) -> Any:
        try:
            async with asyncio.timeout(self._settings.load_timeout_s):
                results = await self._alive().collective_rpc(method, args=args)
        except TimeoutError as error:
            raise EngineError(f"vLLM's workers did not answer within {self._settings.load_timeout_s} s") from error
        except Exception as error:  # workers' errors arrive as bare exceptions
            raise EngineError(f"vLLM's workers failed: {error}") from error
        if any(result != results[0] for result in results):
            raise EngineError(f"vLLM's workers disagree: {results}")
        return results[0]

    async def _probe(self) -> None:
        prompt = [token % self._vocab for token in range(3, 11)]
        whole = SamplingParams(max_tokens=1, temperature=1.0, logprobs=self._vocab, **_QUIET)
        tempered = SamplingParams(max_tokens=1, temperature=PROBE_TEMPERATURE, logprobs=0, seed=0, **_QUIET)
        async with self._sync.request() as in_force:
            first = (await self._ask(prompt, whole, "probe", in_force)).outputs[0]
            second = (await self._ask(prompt, tempered, "probe", in_force)).outputs[0]
        token = second.token_ids[0]
        table = {key: entry.logprob for key, entry in (first.logprobs or [{}])[0].items()}
        scored = float((await self.score([*prompt, token]))[-1])
        reported = _of((second.logprobs or [{}])[0], token)
        check_tempered(table, token, reported, PROBE_TEMPERATURE, scored, self._settings.dtype)


_QUIET: dict[str, Any] = {
    "ignore_eos": True,  # only the request's own stop ids end a turn
    "detokenize": False,
    "output_kind": RequestOutputKind.FINAL_ONLY,
}


def _of(row: Mapping[int, Any] | None, token: int) -> float:
    """The entry of this very token: a row may hold others, and the first is not always the sampled one."""
    if row is None or token not in row:
        raise EngineError(f"vLLM reports no log-probability for token {token}")
    return float(row[token].logprob)


def _engine_args(settings: VLLMSettings) -> AsyncEngineArgs:
    longest = min(settings.context_tokens + 1, settings.model_positions)  # + 1: `score` samples a token
    arguments: dict[str, Any] = {
        "model": str(settings.model_folder),
        "dtype": settings.dtype,
        "max_model_len": longest,
        "max_num_seqs": settings.max_num_seqs,
        "tensor_parallel_size": settings.tensor_parallel,
        "seed": settings.seed % 2**32,
        "enforce_eager": settings.eager or current_platform.is_cpu(),
        "enable_prefix_caching": True,
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": -1,  # the start-up proof reads the whole vocabulary once
        "generation_config": "vllm",  # no sampling defaults from the model's folder
        "skip_tokenizer_init": True,
        "disable_log_stats": True,
        "worker_extension_cls": EXTENSION,
    }
    if current_platform.is_cpu():
        arguments |= {
            "kv_cache_memory_bytes": int(settings.kv_cache_gib * 2**30),
            "block_size": CPU_BLOCK_TOKENS,
            # a prompt prefilled in pieces rewinds its request's random stream, which kills vLLM on CPUs
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(longest, CPU_BATCH_TOKENS),
        }
    else:
        arguments |= {"gpu_memory_utilization": settings.gpu_memory_utilization}
    if settings.sync_mode == "adapter":
        arguments |= {"enable_lora": True, "max_loras": settings.max_loras, "max_lora_rank": settings.rank_limit}
    return AsyncEngineArgs(**arguments)


@contextmanager
def _environment(changes: Mapping[str, str]) -> Iterator[None]:
    """Set variables for the processes started inside; everything is as before afterwards (vLLM sets LD_PRELOAD too)."""
    before = dict(os.environ)
    os.environ.update(changes)
    try:
        yield
    finally:
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ.update(before)
