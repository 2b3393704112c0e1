"""What runs inside vLLM's workers, beside the weights. vLLM mixes `WorkerExtension` into its worker class by name.

Nothing here imports vLLM: everything is reached from the worker's own `model_runner`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from palestra.rollout.adapters import Adapter, Factors
from palestra.rollout.engines.checkpoint import Checkpoint
from palestra.rollout.engines.handover import received
from palestra.rollout.engines.plain_products import install
from palestra.rollout.merge import merged, share_lost

log = logging.getLogger(__name__)

LOST_SHARE_WARNING = 0.1

Fused = Mapping[str, tuple[str, tuple[str, ...]]]
"""Part -> (fused layer, all of its parts): {"q_proj": ("qkv_proj", ("q_proj", "k_proj", "v_proj")), ...}"""


class WorkerExtension:
    """Methods for `collective_rpc`. Results are plain lists, dicts, strings and numbers: they cross processes."""

    model_runner: Any
    palestra_changed: frozenset[str] = frozenset()  # parameters that are not the base's since the last merge

    def palestra_use_plain_products(self) -> None:
        """Replace the CPU's per-token copies of A and B by plain matrix products."""
        for wrapper in _manager(self).punica_wrapper_mapping.values():
            install(wrapper)

    def palestra_lora_modules(self) -> list[str]:
        """Names that an adapter may use, as the base model says them: fused layers under the names of their parts."""
        return list(_places(_manager(self)))

    def palestra_bound(self, lora_id: int, folder: str) -> tuple[str, int]:
        """Digest of what lies in `folder`, and how many of its modules vLLM serves bit for bit under `lora_id`."""
        manager, adapter = _manager(self), received(Path(folder))
        held = manager.get_adapter(lora_id) if lora_id in manager.lora_index_to_id else None
        places = {name: place for name, place in _places(manager).items() if name in adapter.factors}
        bound = [name for name, place in places.items() if _holds(held, *place, adapter.factors[name])]
        return adapter.digest(), len(bound)

    def palestra_mergeable(self, names: list[str]) -> list[str]:
        """Which of the checkpoint's modules this model holds, by themselves or as parts of fused layers."""
        model = self.model_runner.get_model()
        own, fused = {name for name, _ in model.named_modules()}, _fused(model)
        return [name for name in names if name in own or _whole(name, fused) in own]

    def palestra_merge(self, folder: str, base: str) -> tuple[str, int]:
        """Write base + update of every module in `folder` into the model, and whole weights as they are; digest and
        number of both written."""
        adapter, dtype = received(Path(folder)), self.model_runner.model_config.dtype
        changed = [*(f"{module}.weight" for module in adapter.factors), *adapter.weights]
        written: list[str] = []
        with Checkpoint(Path(base)) as checkpoint:
            # what was changed before and is not any more goes back to the base
            names = _with_siblings([*changed, *self.palestra_changed], _fused(self.model_runner.get_model()))
            weights = _merged_weights(checkpoint, adapter, names, dtype, written)
            tied = _tied_heads(self.model_runner.get_model(), names)
            self.model_runner.reload_weights(weights_iterator=weights)
            for head, embeddings in tied:  # on CPUs a head keeps a packed copy, which no reload of embeddings refreshes
                head.tie_weights(embeddings)
                head.quant_method.process_weights_after_loading(head)
        self.palestra_changed = frozenset(changed)
        return adapter.digest(), len(written)


def _merged_weights(
    checkpoint: Checkpoint, adapter: Adapter, names: Sequence[str], dtype: torch.dtype, written: list[str]
) -> Iterator[tuple[str, Tensor]]:
    lost = 0.0
    for name in names:
        whole, factors = adapter.weights.get(name), adapter.factors.get(name.removesuffix(".weight"))
        if whole is not None:
            yield name, torch.tensor(whole)
            written.append(name)
            continue
        weight = checkpoint.tensor(name).float()
        if factors is None:  # also the parts beside a changed one: a fused layer is loaded whole or not at all
            yield name, weight
            continue
        result = merged(weight, factors)  # float32: the loader casts it, once
        if dtype != torch.float32:
            lost = max(lost, share_lost(weight, result.to(dtype), factors))
        yield name, result
        written.append(name)  # resumed: the loader took it
    if lost > LOST_SHARE_WARNING:
        log.warning("merging in %s lost %.0f %% of an update to rounding; use sync_mode = adapter", dtype, 100 * lost)


def _tied_heads(model: torch.nn.Module, names: Sequence[str]) -> list[tuple[Any, Any]]:
    """Heads that share the weight of embeddings that are about to be written, with those embeddings."""
    modules: dict[str, Any] = dict(model.named_modules())
    written = [module for name, module in modules.items() if f"{name}.weight" in names]
    heads = [module for module in modules.values() if hasattr(module, "tie_weights")]
    return [
        (head, other)
        for head in heads
        for other in written
        if other is not head and getattr(other, "weight", None) is head.weight
    ]


def _fused(model: torch.nn.Module) -> Fused:
    mapping: Mapping[str, Sequence[str]] = getattr(model, "packed_modules_mapping", {})
    return {part: (whole, tuple(parts)) for whole, parts in mapping.items() for part in parts}


def _whole(name: str, fused: Fused) -> str:
    parent, _, leaf = name.rpartition(".")
    return f"{parent}.{fused[leaf][0]}" if leaf in fused else name


def _with_siblings(wanted: Sequence[str], fused: Fused) -> list[str]:
    """The wanted parameters and those of the other parts of each fused layer, part beside part."""
    names: dict[str, None] = {}
    for name in wanted:
        module, _, kind = name.rpartition(".")
        parent, dot, leaf = module.rpartition(".")
        parts = fused[leaf][1] if leaf in fused else (leaf,)
        names.update(dict.fromkeys(f"{parent}{dot}{part}.{kind}" for part in parts))
    return list(names)


def _manager(worker: WorkerExtension) -> Any:
    return worker.model_runner.lora_manager._adapter_manager


def _places(manager: Any) -> dict[str, tuple[str, int]]:
    """Name in the base model -> (wrapped layer, its place there) for every layer that can carry an adapter."""
    return {
        part: (whole, index)
        for whole in manager.modules
        for index, part in enumerate(manager.packed_modules.get(whole, [whole]))
    }


def _holds(held: Any, whole: str, index: int, factors: Factors) -> bool:
    """Whether vLLM's copy of one layer's factors is what was sent, cast to the engine's own dtype."""
    weights = None if held is None else held.get_lora(whole)
    if weights is None:
        return False
    packed = isinstance(weights.lora_a, list)
    a, b = (weights.lora_a[index], weights.lora_b[index]) if packed else (weights.lora_a, weights.lora_b)
    return a is not None and all(
        torch.equal(have.cpu(), torch.tensor(sent).to(have.dtype)) for have, sent in ((a, factors.a), (b, factors.b))
    )
