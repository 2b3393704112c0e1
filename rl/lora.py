"""Low-rank adapters through peft: made on all linear layers, read out as factors, put back, switched off.

The head and the embeddings stay frozen: engines serve no adapter there for every architecture, and a frozen head needs
no weight gradient. Dropout is 0, since the policy that is trained must be the policy that samples.
"""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from safetensors.numpy import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from palestra.envs.errors import ConfigError
from palestra.rl.fused import Adapted
from palestra.rl.fused_layers import fuse
from palestra.rollout.adapters import Adapter, Factors

AdaptedModel = PeftModel
"""A model with an adapter on it, as the rest of the project calls it."""

_NAME = "default"
_PREFIX = "base_model.model."

_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
"""peft's ways to initialise an adapter that leave the base as it is."""
_HONOURED = {
    # what the factors and their names say as well, or what is read
    *("init_lora_weights", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "fan_in_fan_out"),
    # where it comes from, and how it was made
    *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode"),
    *("lora_dropout", "loftq_config", "eva_config", "corda_config", "lora_ga_config", "megatron_core"),
    *("runtime_config", "qalora_group_size", "ensure_weight_tying"),
}
"""Settings of peft's that are read, or that mean nothing without another one. Any other must be off."""


@dataclass(frozen=True, slots=True)
class LoraSettings:
    """W + scale * B @ A with scale = alpha / rank, or alpha / sqrt(rank) with rank-stabilised scaling."""

    rank: int = 32
    alpha: float = 32.0
    rank_stabilised: bool = False

    def __post_init__(self) -> None:
        if self.rank < 1 or not self.alpha > 0:
            raise ConfigError(
                f"model.lora: rank is {self.rank} and alpha {self.alpha}; rank is 1 or more and alpha above 0"
            )

    @property
    def scale(self) -> float:
        """The factor that B @ A is multiplied with."""
        return self.alpha / (math.sqrt(self.rank) if self.rank_stabilised else self.rank)


def attach(model: PreTrainedModel, settings: LoraSettings) -> AdaptedModel:
    """Add a fresh adapter (B = 0) to every linear layer but the head; only it requires gradients. Uses torch's RNG."""
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=settings.rank,
        lora_alpha=settings.alpha,  # type: ignore[arg-type]
        lora_dropout=0.0,
        use_rslora=settings.rank_stabilised,
        target_modules="all-linear",
        bias="none",
    )
    adapted = get_peft_model(model, config)
    assert isinstance(adapted, PeftModel)  # not a mixed model: that was not asked for
    fuse(adapted, _in_force)
    return adapted


def _in_force(module: nn.Module) -> Adapted | None:
    """What a layer multiplies with, when it is a plain linear layer with a plain adapter that is switched on."""
    if not isinstance(module, LoraLayer) or module.disable_adapters or module.merged:
        return None
    base = module.get_base_layer()
    if type(base) is not nn.Linear or module.active_adapters != [_NAME] or module.lora_variant:
        return None
    a, b = _tensors(module)
    if a.dtype not in (torch.float32, base.weight.dtype) or not base.weight.is_floating_point():
        return None
    return Adapted(base.weight, base.bias, a, b, float(module.scaling[_NAME]))


def extract(model: AdaptedModel, whole: Callable[[Tensor], Tensor] = torch.detach) -> Adapter:
    """A copy of the adapter in force, by the names of the base model's modules. `whole` makes sharded tensors whole."""
    return Adapter({name: _factors(layer, whole) for name, layer in _layers(model)})


def insert(model: AdaptedModel, adapter: Adapter) -> None:
    """Overwrite the adapter in place, so that an optimizer goes on with the same parameters. All or nothing.

    Raises ConfigError when names, shapes or scale are not those of the model's adapter.
    """
    layers = dict(_layers(model))
    if layers.keys() != adapter.factors.keys():
        odd = sorted(layers.keys() ^ adapter.factors.keys())
        raise ConfigError(
            f"the adapter and the model differ in {len(odd)} modules, such as {odd[0]!r}; start from an adapter that "
            "was made for this model on all linear layers but the head"
        )
    for name, layer in layers.items():
        _refuse_other_shape(name, layer, adapter.factors[name])
    with torch.no_grad():
        for name, layer in layers.items():
            a, b = _tensors(layer)
            a.copy_(torch.from_numpy(np.array(adapter.factors[name].a)))
            b.copy_(torch.from_numpy(np.array(adapter.factors[name].b)))


def adapter_of_state(tensors: Mapping[str, Tensor], settings: LoraSettings) -> Adapter:
    """The adapter in a learner's state, whose trained weights are named "weight/" and the model's own name.

    Raises ConfigError when there is none.
    """
    end, other = f".lora_A.{_NAME}.weight", f".lora_B.{_NAME}.weight"
    factors: dict[str, Factors] = {}
    for key in tensors:
        if key.startswith("weight/") and key.endswith(end):
            name = key.removesuffix(end)
            a, b = (tensor.float().numpy() for tensor in (tensors[key], tensors[name + other]))
            factors[name.removeprefix("weight/").removeprefix(_PREFIX)] = Factors(a, b, settings.scale)
    if not factors:
        raise ConfigError("the state holds no adapter; it is of a learner that trains other weights")
    return Adapter(factors)


def read_peft_folder(folder: Path) -> Adapter:
    """The adapter of a folder that peft saved. Raises ConfigError when it is none, or none that can be trained here."""
    try:
        config = json.loads((folder / "adapter_config.json").read_text())
        tensors = load_file(folder / "adapter_model.safetensors")
    except OSError as error:
        raise ConfigError(
            f"{folder}: no adapter there; expected adapter_config.json and adapter_model.safetensors as peft saves them"
        ) from error
    _refuse_other_kind(folder, config)
    factors: dict[str, Factors] = {}
    for key in tensors:
        if key.endswith(".lora_A.weight"):
            name = key.removesuffix(".lora_A.weight")
            a, b = tensors[key], tensors[f"{name}.lora_B.weight"]
            module = name.removeprefix(_PREFIX)
            scale = _saved_scale(config, module, rank=a.shape[0])
            factors[module] = Factors(a.astype(np.float32), b.astype(np.float32), scale)
    if 2 * len(factors) != len(tensors):
        raise ConfigError(f"{folder}: holds more than LoRA factors of linear layers; use a plain LoRA adapter")
    return Adapter(factors)


def _refuse_other_kind(folder: Path, config: dict[str, Any]) -> None:
    """Raise ConfigError unless the adapter is W + scale * B @ A on the base as it is, by peft's own settings."""
    start = config.get("init_lora_weights", True)
    if start not in _STARTS:
        raise ConfigError(
            f"{folder}: made with init_lora_weights = {start!r}, which changes the base's weights as well, so that its "
            "factors alone say something else; save it again as a plain adapter (peft's save_pretrained with "
            "path_initial_model_for_weight_conversion), or merge it and start from the merged model"
        )
    plain = {"bias": "none", "peft_type": "LORA"}
    odd = [f"{key} = {config[key]!r}" for key, value in plain.items() if config.get(key, value) != value]
    odd += [f"{key} = {value!r}" for key, value in config.items() if value and key not in _HONOURED | plain.keys()]
    if odd:
        raise ConfigError(f"{folder}: {', '.join(odd)} is not known here; use a plain LoRA adapter of linear layers")


def _saved_scale(config: dict[str, Any], module: str, rank: int) -> float:
    """The scale of one module: ranks and alphas may be set by patterns of names, as peft matches them."""
    patterns: dict[str, float] = config.get("alpha_pattern") or {}
    alphas = [alpha for key, alpha in patterns.items() if re.match(rf"(.*\.)?({key})$", module)]
    alpha = alphas[0] if alphas else config["lora_alpha"]
    return float(alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))


def save_peft_folder(adapter: Adapter, folder: Path, settings: LoraSettings, base: str) -> None:
    """Write an adapter as peft does, so that `read_peft_folder`, peft and engines read it. `base` names its model."""
    folder.mkdir(parents=True)
    config = LoraConfig(
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
        r=settings.rank,
        lora_alpha=settings.alpha,  # type: ignore[arg-type]
        use_rslora=settings.rank_stabilised,
        target_modules=sorted(adapter.factors),
        inference_mode=True,
    )
    config.save_pretrained(str(folder))
    tensors = {}
    for name, factors in adapter.factors.items():
        tensors[f"{_PREFIX}{name}.lora_A.weight"] = np.ascontiguousarray(factors.a)
        tensors[f"{_PREFIX}{name}.lora_B.weight"] = np.ascontiguousarray(factors.b)
    save_file(tensors, folder / "adapter_model.safetensors")


def save_merged(model: AdaptedModel, folder: str) -> None:
    """Write base plus adapter as one Hugging Face folder, merged in a float32 copy. The live base is never touched.

    Needs memory for a second model.
    """
    merged = copy.deepcopy(model).float().merge_and_unload()
    merged.save_pretrained(folder)


@contextmanager
def reference(model: AdaptedModel, start: Adapter | None = None) -> Iterator[None]:
    """Inside, the model is the reference policy: adapter off, or `start` where training went on from an adapter."""
    if start is None:
        with model.disable_adapter():
            yield
        return
    current = extract(model)
    insert(model, start)
    try:
        yield
    finally:
        insert(model, current)


def _layers(model: AdaptedModel) -> list[tuple[str, LoraLayer]]:
    return [
        (name.removeprefix(_PREFIX), module) for name, module in model.named_modules() if isinstance(module, LoraLayer)
    ]


def _tensors(layer: LoraLayer) -> tuple[Tensor, Tensor]:
    a, b = layer.lora_A[_NAME].weight, layer.lora_B[_NAME].weight
    assert isinstance(a, Tensor), a  # for the type checker: attributes of modules have no type
    assert isinstance(b, Tensor), b
    return a, b


def _factors(layer: LoraLayer, whole: Callable[[Tensor], Tensor]) -> Factors:
    # copy: the learner goes on writing into the tensors
    a, b = (whole(tensor).detach().to("cpu", torch.float32, copy=True).numpy() for tensor in _tensors(layer))
    return Factors(a, b, float(layer.scaling[_NAME]))


def _refuse_other_shape(name: str, layer: LoraLayer, factors: Factors) -> None:
    a, b = _tensors(layer)
    found = (factors.a.shape, factors.b.shape, round(factors.scale, 9))
    wanted = (tuple(a.shape), tuple(b.shape), round(float(layer.scaling[_NAME]), 9))
    if found != wanted:
        raise ConfigError(
            f"{name}: the adapter has shapes and scale {found}, the model expects {wanted}; set model.lora.rank and "
            "model.lora.alpha to the adapter's own"
        )
