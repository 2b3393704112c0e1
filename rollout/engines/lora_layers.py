"""Versions on a transformers model without touching its base: each linear layer's output gets its update added, and
whole weights of full training stand in for the base's while they are used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from palestra.rollout.adapters import Adapter


@dataclass(frozen=True, slots=True)
class Bound:
    """One layer's factors on the model's device, float32: a [rank, in], b [out, rank], scale folded into b."""

    a: Tensor
    b: Tensor


@dataclass(frozen=True, slots=True)
class Bindings:
    """What one version adds to the base: factors by layer, and whole weights by parameter."""

    factors: Mapping[str, Bound] = field(default_factory=dict)
    weights: Mapping[str, Tensor] = field(default_factory=dict)


class LoraLayers:
    """Hooks on every linear layer of a model. Which version's factors they add is chosen before each forward pass."""

    def __init__(self, model: nn.Module) -> None:
        self._layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear | Conv1D)}
        self._parameters = dict(model.named_parameters())
        self._base = {name: parameter.data for name, parameter in self._parameters.items()}
        self._hooked: set[str] = set()
        self._active = Bindings()

    @property
    def shapes(self) -> dict[str, tuple[int, int] | None]:
        """[out, in] of each linear layer, by module name."""
        return {
            name: (layer.nf, layer.nx) if isinstance(layer, Conv1D) else (layer.out_features, layer.in_features)
            for name, layer in self._layers.items()
        }

    @property
    def sizes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each parameter, by name."""
        return {name: tuple(tensor.shape) for name, tensor in self._base.items()}

    def bind(self, adapter: Adapter) -> Bindings:
        """The factors and weights on the layers' devices; KeyError for a name that the model lacks (check first)."""
        factors = {}
        for name, sent in adapter.factors.items():
            device = next(self._layers[name].parameters()).device
            a = torch.tensor(sent.a, device=device)  # a copy: factors may be read-only views
            b = torch.tensor(sent.b, device=device) * sent.scale
            factors[name] = Bound(a, b)
            self._hook(name)
        return Bindings(factors, {name: torch.tensor(w).to(self._base[name]) for name, w in adapter.weights.items()})

    def use(self, bound: Bindings) -> None:
        """What the next forward passes are of; Bindings() is the base model."""
        if bound.weights is not self._active.weights:
            for name in self._active.weights.keys() | bound.weights.keys():
                self._parameters[name].data = bound.weights.get(name, self._base[name])
        self._active = bound

    def _hook(self, name: str) -> None:
        if name in self._hooked:
            return

        def add_update(_layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            factors = self._active.factors.get(name)
            if factors is None:
                return output
            update = (inputs[0].float() @ factors.a.T) @ factors.b.T
            return output + update.to(output.dtype)

        self._layers[name].register_forward_hook(add_update)
        self._hooked.add(name)
