"""What a run learned, as folders that others load: the adapter as peft has it, or whole weights.

Whole weights are made from a float32 copy of the base, with the adapter added once, and cast once at the end. The files
of the base are only read.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from palestra.envs.errors import ConfigError
from palestra.rl.checkpoints import Checkpoints, base_digest, broken
from palestra.rl.config import Config
from palestra.rl.gguf import no_progress_bars
from palestra.rl.learner import LearnerState
from palestra.rl.load_config import load_config
from palestra.rl.lora import LoraSettings, adapter_of_state, read_peft_folder, save_peft_folder
from palestra.rl.model import load_model, resolve_model
from palestra.rl.policy import ADAPTER, BASE
from palestra.rollout.adapters import Adapter

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_TOKENIZER = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "chat_template*", "vocab.*", "merges.txt")


@dataclass(frozen=True, slots=True)
class Learned:
    """What there is to export: an adapter, all weights, or neither when the base itself is what was learned."""

    config: Config
    base: Path
    adapter: Adapter | None = None
    weights: Mapping[str, Tensor] | None = None  # of the whole model, by parameter names
    where: str = ""  # in words: which checkpoint


def find_learned(place: Path) -> Learned:
    """What a run, or one checkpoint of it, holds: the newest complete checkpoint, else what imitation made.

    Raises ConfigError when `place` is neither, or holds nothing.
    """
    is_checkpoint = (place / "manifest.json").is_file()
    run = place.absolute().parents[1] if is_checkpoint else place
    if not (run / "config.toml").is_file():
        raise ConfigError(
            f"{place}: expected a run's folder with config.toml, or runs/NAME/checkpoints/step_000010 within one"
        )
    config = load_config(run / "config.toml")
    made = run / "model"
    base = made / BASE if (made / BASE).is_dir() else None
    if is_checkpoint:
        if (problem := broken(place)) is not None:
            raise ConfigError(f"{place}: no complete checkpoint: {problem}")
        return _of_checkpoint(config, base or resolve_model(config.model.path), place)
    found = Checkpoints(run / "checkpoints", base="").newest()
    if found is not None:
        return _of_checkpoint(config, base or resolve_model(config.model.path), found.folder)
    if (made / ADAPTER).is_dir():
        adapter = read_peft_folder(made / ADAPTER)
        return Learned(config, base or resolve_model(config.model.path), adapter, where=str(made / ADAPTER))
    if base is not None:
        return Learned(config, base, where=str(base))
    raise ConfigError(f"{place}: this run has learned nothing yet: no checkpoint, and no model of its own")


def _of_checkpoint(config: Config, base: Path, folder: Path) -> Learned:
    state, _ = Checkpoints(folder.parent, base_digest(base)).load(folder)
    if state.train == "lora":
        return Learned(config, base, adapter_of_state(state.tensors, _lora(config)), where=str(folder))
    return Learned(config, base, weights=_weights(state), where=str(folder))


def export_adapter(learned: Learned, to: Path) -> None:
    """The adapter and the tokenizer in a new folder that peft and engines load. Raises ConfigError when it has none."""
    adapter = learned.adapter
    if adapter is None:
        raise ConfigError(f"{learned.where}: all weights were trained, so there is no adapter; add --merged")
    path = learned.config.model.path
    base = path if _is_hub_name(path, learned.base) else str(learned.base.absolute())

    def fill(draft: Path) -> None:
        save_peft_folder(adapter, draft, _lora(learned.config), base)
        _copy_tokenizer(learned.base, draft)

    _whole_or_not_at_all(to, fill)


def export_merged(learned: Learned, to: Path, dtype: str) -> float:
    """Whole weights and the tokenizer in a new model folder. Returns what `add_adapter` does; 0 without an adapter."""
    trust = learned.config.model.trust_remote_code
    if learned.weights is None:
        return write_merged(learned.base, learned.adapter or Adapter({}), to, dtype, trust)
    model = load_model(str(learned.base), dtype="float32", trust_remote_code=trust).model
    _overwrite(model, learned.weights, learned.where)
    _write_model(model, learned.base, to, dtype)
    return 0.0


def write_merged(base: Path, adapter: Adapter, to: Path, dtype: str, trust_remote_code: bool = False) -> float:
    """`base` plus `adapter` as a new model folder with the base's tokenizer: complete or absent.

    Needs memory for the model in float32. Returns what `add_adapter` does. Raises ConfigError when the adapter is of
    another model.
    """
    model = load_model(str(base), dtype="float32", trust_remote_code=trust_remote_code).model
    lost = add_adapter(model, adapter, DTYPES[dtype])
    _write_model(model, base, to, dtype)
    return lost


@torch.no_grad()
def add_adapter(model: nn.Module, adapter: Adapter, dtype: torch.dtype = torch.float32) -> float:
    """W + scale * B @ A in place, for a copy that nobody else uses.

    Returns the size of what a cast to `dtype` is going to round away, as a share of the update's (by their norms).
    Raises ConfigError with nothing changed.
    """
    places = {name: _weight(model, name) for name in adapter.factors}
    for name, (weight, transposed) in places.items():
        change = (adapter.factors[name].b.shape[0], adapter.factors[name].a.shape[1])
        if (change[::-1] if transposed else change) != tuple(weight.shape):
            raise ConfigError(
                f"{name}: the adapter changes a weight of {change}, the base has {tuple(weight.shape)}; export with "
                "the base that the adapter was trained on"
            )
    rounded, learned = 0.0, 0.0
    for name, (weight, transposed) in places.items():
        factors = adapter.factors[name]
        delta = factors.scale * (torch.from_numpy(factors.b.copy()) @ torch.from_numpy(factors.a.copy()))
        weight += (delta.T if transposed else delta).to(weight.dtype)
        rounded += float((weight.to(dtype).double() - weight.double()).square().sum())
        learned += float(delta.double().square().sum())
    return math.sqrt(rounded / learned) if learned else 0.0


def _weight(model: nn.Module, name: str) -> tuple[Tensor, bool]:
    """A module's weight, and whether it is kept as [in, out]."""
    try:
        module = model.get_submodule(name)
    except AttributeError:
        module = None
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor):
        raise ConfigError(f"{name}: the adapter changes it, but the base has no such layer; export with its own base")
    return weight, isinstance(module, Conv1D)


@torch.no_grad()
def _overwrite(model: PreTrainedModel, weights: Mapping[str, Tensor], where: str) -> None:
    own = dict(model.named_parameters())
    odd = sorted(weights.keys() ^ own.keys())
    if odd:
        raise ConfigError(f"{where}: its weights and the base's differ in {len(odd)} names, such as {odd[0]}")
    for name, parameter in own.items():
        parameter.copy_(weights[name])


def _write_model(model: PreTrainedModel, base: Path, to: Path, dtype: str) -> None:
    nn.Module.to(model, DTYPES[dtype])

    @no_progress_bars()
    def fill(draft: Path) -> None:
        draft.mkdir()
        model.save_pretrained(draft)
        _copy_tokenizer(base, draft)

    _whole_or_not_at_all(to, fill)


def _whole_or_not_at_all(to: Path, fill: Callable[[Path], None]) -> None:
    """Make the folder `to` by one rename of what `fill` writes into a folder that it makes. Raises ConfigError."""
    refuse_existing(to)
    to.parent.mkdir(parents=True, exist_ok=True)
    draft = to.with_name(f".{to.name}.{os.getpid()}")
    shutil.rmtree(draft, ignore_errors=True)
    try:
        fill(draft)
        draft.rename(to)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def refuse_existing(to: Path) -> None:
    """Raise ConfigError when something is there: an export overwrites nothing."""
    if to.exists():
        raise ConfigError(f"--to {to}: it exists, and an export overwrites nothing; give a new folder")


def _copy_tokenizer(base: Path, folder: Path) -> None:
    for pattern in _TOKENIZER:
        for path in base.glob(pattern):
            if path.is_file() and not (folder / path.name).exists():
                shutil.copy(path, folder / path.name)


def _weights(state: LearnerState) -> dict[str, Tensor]:
    prefix = "weight/"
    return {key.removeprefix(prefix): value for key, value in state.tensors.items() if key.startswith(prefix)}


def _lora(config: Config) -> LoraSettings:
    lora = config.model.lora
    return LoraSettings(lora.rank, lora.alpha, lora.rank_stabilised)


def _is_hub_name(path: str, base: Path) -> bool:
    return path != "new" and ":" not in path and not Path(path).expanduser().is_dir() and base.name != BASE
