"""Puts the fused parts into a model whose base is frozen: where they are known to fit, and proved to on the spot.

Each replaced module keeps its parameters, names and class; only its `forward` is another one, which falls back to the
class's own whenever the adapter is switched off or merged.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from palestra.rl.fused import Adapted, adapted_feed_forward, adapted_linears, rms_norm

InForce = Callable[[nn.Module], Adapted | None]
"""A layer's weight and adapter as they are now; None for another module, or one that has to compute by itself."""


def fuse(model: nn.Module, in_force: InForce) -> None:
    """Replace what can be replaced, in place; what is new must give what was there before, or is not put in."""
    each: list[Any] = list(model.modules())  # attributes of modules have no type
    for module in each:
        if in_force(module) is not None:
            _offer(module, partial(_linear, module, in_force), module.in_features)
        elif _is_gated(module, in_force):
            _offer(module, partial(_feed_forward, module, in_force), module.gate_proj.in_features)
        elif _is_plain_norm(module):
            _offer(module, partial(_norm, module), module.weight.shape[0])


def unfuse(model: nn.Module) -> None:
    """Let every module compute by its class's own `forward` again."""
    for module in model.modules():
        module.__dict__.pop("forward", None)


@torch.no_grad()
def _offer(module: Any, forward: Callable[[Tensor], Tensor], width: int) -> None:
    """Set a module's `forward`, unless the values differ on random input [1, 4, width]."""
    some = next(module.parameters())
    x = torch.randn(1, 4, width, generator=torch.Generator().manual_seed(0)).to(some.device, some.dtype)
    tolerance = 1e-5 if x.dtype in (torch.float32, torch.float64) else 1e-2
    if torch.allclose(forward(x), type(module).forward(module, x), rtol=tolerance, atol=tolerance):
        # a partial and no closure: a copy of the model then computes with its own weights
        module.forward = forward


def _linear(module: nn.Module, in_force: InForce, x: Tensor) -> Tensor:
    layer = in_force(module)
    own: Tensor = type(module).forward(module, x) if layer is None else adapted_linears(x, [layer])[0]
    return own


def _is_gated(module: nn.Module, in_force: InForce) -> bool:
    """Whether it is down(silu(gate(x)) * up(x)), by its parts; `_offer` sees whether they are put together so."""
    parts = [getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    return all(isinstance(part, nn.Module) and in_force(part) is not None for part in parts)


def _feed_forward(module: Any, in_force: InForce, x: Tensor) -> Tensor:
    gate, up, down = in_force(module.gate_proj), in_force(module.up_proj), in_force(module.down_proj)
    if gate is None or up is None or down is None:
        own: Tensor = type(module).forward(module, x)
        return own
    return adapted_feed_forward(x, gate, up, down)


def _is_plain_norm(module: nn.Module) -> bool:
    """Whether it has one frozen weight and an eps, as RMS norms do; `_offer` sees whether it is one."""
    weight, eps = getattr(module, "weight", None), getattr(module, "variance_epsilon", None)
    if not isinstance(weight, Tensor) or not isinstance(eps, float) or len(list(module.parameters())) > 1:
        return False
    return weight.dim() == 1 and not weight.requires_grad and weight.dtype in (torch.float32, torch.float64)


def _norm(module: Any, x: Tensor) -> Tensor:
    return rms_norm(x, module.weight, module.variance_epsilon)
