"""A learner's state: all that changes, whole, by parameter names. The same whatever the number of ranks was."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from palestra.envs.errors import ConfigError
from palestra.rl.optimizer import load_moments, moments
from palestra.rl.spread import Spread
from palestra.rollout.types import Float32


@dataclass(frozen=True, slots=True)
class LearnerState:
    """Everything a learner needs to go on as if it had never stopped: trained weights, moments, RNG, steps."""

    step: int
    train: str
    tensors: Mapping[str, Tensor] = field(repr=False)
    start: str | None = None
    """Digest of the adapter that training began with, the reference of a KL; None when it began without one."""


def capture(
    named: Mapping[str, nn.Parameter], optimizer: torch.optim.AdamW, spread: Spread, *, keep: bool
) -> dict[str, Tensor]:
    """Copies of weights, as "weight/NAME", and moments on the host; nothing where `keep` is false.

    All ranks call it, since parts are gathered, one tensor at a time; one of them keeps.
    """
    tensors: dict[str, Tensor] = {}
    for name, parameter in named.items():
        whole = spread.whole(parameter)
        if keep:
            tensors[f"weight/{name}"] = whole.detach().to("cpu", copy=True)
    kept = moments(optimizer, named, spread.whole, keep=keep)
    return tensors | kept


def whole_weights(named: Mapping[str, nn.Parameter], spread: Spread, *, keep: bool) -> dict[str, Float32]:
    """Copies of the weights on the host; nothing where `keep` is false. All ranks call it, as `capture`."""
    found: dict[str, Float32] = {}
    for name, parameter in named.items():
        whole = spread.whole(parameter)
        if keep:
            found[name] = whole.detach().to("cpu", torch.float32, copy=True).numpy()
    return found


def restore(
    state: LearnerState, train: str, named: Mapping[str, nn.Parameter], optimizer: torch.optim.AdamW, spread: Spread
) -> None:
    """Overwrite weights and moments. Raises ConfigError, with nothing written, when the state is of others."""
    _check(state, train, named)
    for name, parameter in named.items():
        spread.fill(parameter, state.tensors[f"weight/{name}"])
    load_moments(optimizer, named, state.tensors, spread.fill)


def check_start(state: LearnerState, start: str | None) -> None:
    """Raise ConfigError unless the state's training began with the adapter of that digest (None: without one)."""
    if state.start != start:
        told, here = (f"the adapter {digest[:12]}" if digest else "no adapter" for digest in (state.start, start))
        raise ConfigError(
            f"the state is of training that began with {told}, this learner begins with {here}; the reference of a KL "
            "would be another one. Resume with the model.lora.initial that the run was started with"
        )


def _check(state: LearnerState, train: str, named: Mapping[str, nn.Parameter]) -> None:
    names = {key.removeprefix("weight/") for key in state.tensors if key.startswith("weight/")}
    if state.train != train or names != named.keys():
        odd = sorted(names ^ named.keys())
        raise ConfigError(
            f"the state is of a learner that trains {state.train} with {len(names)} parameters, this one trains "
            f"{train} with {len(named)}{f' (such as {odd[0]})' if odd else ''}; resume with "
            "the model and lora settings that the run was started with"
        )
    for name, parameter in named.items():
        found = tuple(state.tensors[f"weight/{name}"].shape)
        if found != tuple(parameter.shape):
            raise ConfigError(
                f"the state has {name} of shape {found}, this learner {tuple(parameter.shape)}; resume with the "
                "model and lora settings that the run was started with"
            )
