"""Gradient checkpointing without training mode: layers are computed again, dropout stays off."""

from __future__ import annotations

from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from palestra.envs.errors import ConfigError


def checkpoint_layers(model: PreTrainedModel) -> None:
    """Have each decoder layer recompute its activations in the backward. Raises ConfigError where layers cannot.

    transformers recomputes only layers in training mode, so exactly the layers are set to it and nothing inside them.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers or not model.supports_gradient_checkpointing:
        raise ConfigError(f"{type(model).__name__} cannot recompute its layers; set gradient_checkpointing to false")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for layer in layers:
        for name in ("dropout", "activation_dropout", "attention_dropout"):
            if isinstance(getattr(layer, name, None), float):
                setattr(layer, name, 0.0)  # some layers call dropout as a function of their own mode
        layer.training = True
