"""From the settings to an engine, in whatever process it is to run. The plan is plain data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from palestra.envs.errors import ConfigError
from palestra.rl.config import Config, EngineSettings
from palestra.rollout.engines.protocol import Engine
from palestra.rollout.seeds import derive_seed


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """All that an engine is made from."""

    kind: Literal["vllm", "transformers"]
    model_folder: str
    dtype: Literal["float32", "bfloat16", "float16"]
    context_tokens: int
    sync_mode: Literal["adapter", "merged"]
    max_lora_rank: int
    settings: EngineSettings
    seed: int
    max_lag: int
    trust_remote_code: bool

    @classmethod
    def of(cls, config: Config, model_folder: Path) -> EnginePlan:
        """The plan of a configuration."""
        return cls(
            kind=config.rollout.engine.kind,
            model_folder=str(model_folder),
            dtype=config.model.dtype,
            context_tokens=config.environment.budgets.context_tokens,
            sync_mode=sync_mode(config),
            max_lora_rank=config.model.lora.rank,
            settings=config.rollout.engine,
            seed=config.run.seed,
            max_lag=config.run.max_lag,
            trust_remote_code=config.model.trust_remote_code,
        )


def sync_mode(config: Config) -> Literal["adapter", "merged"]:
    """ "auto" is what was measured faster: merged weights on CPUs, LoRA factors on GPUs (see ARCHITECTURE.md); whole
    weights can only be merged."""
    asked = config.rollout.engine.sync_mode
    if config.rollout.engine.kind == "transformers":
        if asked == "merged":
            raise ConfigError(
                'rollout.engine.sync_mode is "merged", but the transformers engine serves factors; use "auto"'
            )
        return "adapter"
    if asked != "auto":
        return asked
    return "adapter" if config.rollout.engine.gpus and config.model.train == "lora" else "merged"


def make_engine(plan: EnginePlan, index: int) -> Engine:
    """The engine of a plan; nothing is loaded before its `start`. `index` is the replica's number."""
    # here, so that a driver that plays nothing needs neither package
    if plan.kind == "vllm":
        return _vllm(plan, index)
    from palestra.rollout.engines.transformers import TransformersEngine, TransformersSettings

    settings = plan.settings
    return TransformersEngine(
        TransformersSettings(
            model_folder=Path(plan.model_folder),
            context_tokens=plan.context_tokens,
            dtype=plan.dtype,
            device="cuda" if settings.gpus else "cpu",
            max_num_seqs=settings.max_num_seqs,
            threads=None if settings.gpus else settings.threads,
            seed=derive_seed(plan.seed, "engine", index),
            start_timeout_s=settings.start_s,
            request_timeout_s=settings.generate_s,
            name=f"transformers {index}",
        )
    )


def _vllm(plan: EnginePlan, index: int) -> Engine:
    from palestra.rollout.engines.vllm import VLLMEngine
    from palestra.rollout.engines.vllm_settings import VLLMSettings

    settings = plan.settings
    return VLLMEngine(
        VLLMSettings(
            model_folder=Path(plan.model_folder),
            context_tokens=plan.context_tokens,
            dtype=plan.dtype,
            sync_mode=plan.sync_mode,
            max_lora_rank=plan.max_lora_rank,
            max_loras=2 + plan.max_lag,
            max_num_seqs=settings.max_num_seqs,
            tensor_parallel=max(1, settings.gpus),
            gpu_memory_utilization=settings.gpu_memory_utilization,
            kv_cache_gib=settings.kv_cache_gib,
            threads=settings.threads,
            seed=derive_seed(plan.seed, "engine", index),
            start_timeout_s=settings.start_s,
            request_timeout_s=settings.generate_s,
            name=f"vllm {index}",
        )
    )
