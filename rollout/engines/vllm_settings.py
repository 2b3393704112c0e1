"""How to run vLLM, as data: readable without importing it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""The rank limits that vLLM accepts."""


@dataclass(frozen=True, slots=True)
class VLLMSettings:
    """One engine. `sync_mode` says how a load applies an adapter.

    adapter: factors beside the base weights; a request in flight keeps the version it began with to its end.
    merged: base + update written into the engine's weights; requests in flight pause, their cache is computed again,
    and they go on under the new version.
    """

    model_folder: Path
    context_tokens: int  # longest row served
    dtype: str = "float32"  # "bfloat16" on GPUs; on CPUs it is many times slower than float32
    sync_mode: Literal["adapter", "merged"] = "adapter"
    max_lora_rank: int = 16
    max_loras: int = 2  # versions that may be in flight at once; a load waits while there are as many
    max_num_seqs: int = 32
    tensor_parallel: int = 1
    gpu_memory_utilization: float = 0.85  # of the GPU; not used on CPUs
    kv_cache_gib: float = 1.0  # on CPUs
    threads: int = 1  # on CPUs
    eager: bool = False  # no compilation, no CUDA graphs; always so on CPUs
    seed: int = 0
    start_timeout_s: float = 600.0
    load_timeout_s: float = 300.0
    request_timeout_s: float = 600.0
    name: str = "vllm"

    @property
    def model_positions(self) -> int:
        """How long a row the model allows; context_tokens + 1 when its config does not say."""
        config = json.loads((self.model_folder / "config.json").read_text())
        text = config.get("text_config", config)
        return int(text.get("max_position_embeddings", self.context_tokens + 1))

    @property
    def rank_limit(self) -> int:
        """The smallest limit that vLLM accepts for max_lora_rank; ValueError when there is none."""
        for limit in LORA_RANKS:
            if limit >= self.max_lora_rank:
                return limit
        raise ValueError(f"max_lora_rank is {self.max_lora_rank}, vLLM takes at most {LORA_RANKS[-1]}")


def cpu_environment(settings: VLLMSettings) -> dict[str, str]:
    """What the engine's process needs to start fast on a CPU and to share its cores.

    The in-process executor saves one interpreter and one import (9 s); without dynamo the two tiny compiled helpers of
    the sampler run eagerly (2 s, and no compiler needed).
    """
    return {
        "OMP_NUM_THREADS": str(settings.threads),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1" if settings.tensor_parallel > 1 else "0",
        "TORCHDYNAMO_DISABLE": "1",
    }
