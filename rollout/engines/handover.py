"""Factors from an engine to its workers: a PEFT folder on the machine's memory file system, read back and proved there.

Workers load adapters from paths only, so "in memory" means /dev/shm where it is there, a private temporary folder else.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from palestra.rollout.adapters import Adapter, Factors

MEMORY = Path("/dev/shm")
FOLDER = "palestra-adapter-"
WEIGHTS = "weights.safetensors"
PEFT_PREFIX = "base_model.model."
STALE_S = 600.0
"""Folders of dead processes older than this are swept. Handing one over takes well under a second."""


def folded(adapter: Adapter) -> Adapter:
    """The same update with every scale 1: b carries it, so that no receiver works out a scale of its own."""
    return Adapter(
        {
            name: Factors(f.a, f.b if f.scale == 1.0 else f.b * np.float32(f.scale), 1.0)
            for name, f in adapter.factors.items()
        },
        adapter.weights,
    )


def hand_over(adapter: Adapter) -> Path:
    """Write a folded adapter as a PEFT folder, whole weights beside it, readable by this user alone; `withdraw` it when
    it is not needed."""
    size = 2 * adapter.num_bytes
    memory = MEMORY if MEMORY.is_dir() and os.access(MEMORY, os.W_OK) and _free(MEMORY) > size else None
    folder = Path(tempfile.mkdtemp(prefix=f"{FOLDER}{os.getpid()}-", dir=memory))
    tensors = {}
    for name, factors in adapter.factors.items():
        tensors[f"{PEFT_PREFIX}{name}.lora_A.weight"] = np.ascontiguousarray(factors.a)
        tensors[f"{PEFT_PREFIX}{name}.lora_B.weight"] = np.ascontiguousarray(factors.b)
    save_file(tensors, folder / "adapter_model.safetensors")
    save_file({name: np.ascontiguousarray(weight) for name, weight in adapter.weights.items()}, folder / WEIGHTS)
    if adapter.factors:
        (folder / "adapter_config.json").write_text(json.dumps(_peft_config(adapter)))
    return folder


def received(folder: Path) -> Adapter:
    """What `hand_over` wrote, read back by a worker."""
    tensors: Mapping[str, np.ndarray] = load_file(folder / "adapter_model.safetensors")
    names = [key.removeprefix(PEFT_PREFIX).removesuffix(".lora_A.weight") for key in tensors if "lora_A" in key]
    return Adapter(
        {
            name: Factors(
                tensors[f"{PEFT_PREFIX}{name}.lora_A.weight"], tensors[f"{PEFT_PREFIX}{name}.lora_B.weight"], 1.0
            )
            for name in names
        },
        load_file(folder / WEIGHTS),
    )


def withdraw(folder: Path) -> None:
    """Remove a folder. Idempotent."""
    shutil.rmtree(folder, ignore_errors=True)


def sweep() -> int:
    """Remove what killed processes left behind; how many folders that were."""
    stale = [folder for root in (MEMORY, Path(tempfile.gettempdir())) for folder in root.glob(f"{FOLDER}*")]
    stale = [folder for folder in stale if _abandoned(folder)]
    for folder in stale:
        withdraw(folder)
    return len(stale)


def _peft_config(adapter: Adapter) -> dict[str, object]:
    rank = max(factors.a.shape[0] for factors in adapter.factors.values())
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": rank,  # alpha / r = 1: the scale is in b
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted({name.rpartition(".")[2] for name in adapter.factors}),
    }


def _free(folder: Path) -> int:
    return shutil.disk_usage(folder).free


def _abandoned(folder: Path) -> bool:
    try:
        young = time.time() - folder.stat().st_mtime < STALE_S
        pid = int(folder.name.removeprefix(FOLDER).partition("-")[0])
        if young or folder.stat().st_uid != os.getuid():
            return False
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except (OSError, ValueError):
        return False
    return False
