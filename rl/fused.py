"""Parts of a decoder layer with fewer passes over memory and less kept for the backward; the values are the same.

A frozen linear layer with a low-rank adapter, y = x W' + b + scale (x A') B', adds the adapter into the product's own
output, and its backward into the gradient of x. A gated feed-forward keeps gate and up and computes the rest again. An
RMS norm keeps its input and one number per token. The adapter may be float32 on a base in half precision: its products
are then in float32 and the sum is rounded once, as peft has it, and x is kept in half precision only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu


@dataclass(frozen=True, slots=True)
class Adapted:
    """A frozen linear layer and its adapter: weight [out, in], bias [out], a [rank, in], b [out, rank]."""

    weight: Tensor
    bias: Tensor | None
    a: Tensor
    b: Tensor
    scale: float

    @property
    def tensors(self) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        return self.weight, self.bias, self.a, self.b

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """y [T, out], and x A' [T, rank] for the backward."""
        low = x.to(self.a.dtype) @ self.a.T
        y = x @ self.weight.T if self.bias is None else torch.addmm(self.bias, x, self.weight.T)
        return y.to(low.dtype).addmm_(low, self.b.T, alpha=self.scale).to(y.dtype), low

    def backward(self, to_y: Tensor, x: Tensor, low: Tensor, to_x: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients towards x (added into `to_x` where given), a and b."""
        exact = to_y.to(low.dtype)
        to_low = exact @ self.b  # without the scale, which costs less at the other end
        to_x = to_y @ self.weight if to_x is None else to_x.addmm_(to_y, self.weight)
        if to_x.dtype == low.dtype:
            to_x.addmm_(to_low, self.a, alpha=self.scale)
        else:
            to_x.add_((to_low @ self.a).mul_(self.scale))
        return to_x, (to_low.T @ x.to(low.dtype)).mul_(self.scale), (exact.T @ low).mul_(self.scale)


def adapted_linears(x: Tensor, layers: Sequence[Adapted]) -> tuple[Tensor, ...]:
    """The outputs [..., out] of layers that read the same x [..., in]."""
    flat = x.reshape(-1, x.shape[-1])
    tensors = [tensor for layer in layers for tensor in layer.tensors]
    outputs: tuple[Tensor, ...] = _Linears.apply(flat, [layer.scale for layer in layers], *tensors)
    return tuple(y.view(*x.shape[:-1], -1) for y in outputs)


def adapted_feed_forward(x: Tensor, gate: Adapted, up: Adapted, down: Adapted) -> Tensor:
    """down(silu(gate(x)) * up(x)), [..., width] for x [..., width]."""
    flat = x.reshape(-1, x.shape[-1])
    layers = (gate, up, down)
    tensors = [tensor for layer in layers for tensor in layer.tensors]
    output: Tensor = _FeedForward.apply(flat, [layer.scale for layer in layers], *tensors)
    return output.view(*x.shape[:-1], -1)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis, for a frozen weight."""
    output: Tensor = _RmsNorm.apply(x, weight, eps)
    return output


def _layers(scales: Sequence[float], tensors: Sequence[Any]) -> list[Adapted]:
    """The opposite of listing each layer's `tensors`."""
    each = [iter(tensors)] * 4
    return [Adapted(*four, scale) for *four, scale in zip(*each, scales, strict=True)]  # type: ignore[call-arg]


class _Linears(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scales: Sequence[float], *tensors: Any) -> tuple[Tensor, ...]:
        outputs = [layer.forward(x) for layer in _layers(scales, tensors)]
        ctx.scales, ctx.num_tensors = scales, len(tensors)
        ctx.save_for_backward(*tensors, x, *(low for _, low in outputs))
        return tuple(y for y, _ in outputs)

    @staticmethod
    def backward(ctx: Any, *to_outputs: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # once: recomputed layers give them up when they are asked for
        tensors, (x, *lows) = saved[: ctx.num_tensors], saved[ctx.num_tensors :]
        to_x: Tensor | None = None
        gradients: list[Tensor | None] = []
        for layer, to_y, low in zip(_layers(ctx.scales, tensors), to_outputs, lows, strict=True):
            to_x, to_a, to_b = layer.backward(to_y, x, low, to_x)
            gradients += [None, None, to_a, to_b]
        return to_x, None, *gradients


class _FeedForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scales: Sequence[float], *tensors: Any) -> Tensor:
        gate, up, down = _layers(scales, tensors)
        g, low_g = gate.forward(x)
        u, low_u = up.forward(x)
        y, low_y = down.forward(silu(g).mul_(u))
        ctx.scales = scales
        ctx.save_for_backward(*tensors, x, g, u, low_g, low_u, low_y)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, x, g, u, low_g, low_u, low_y = ctx.saved_tensors
        gate, up, down = _layers(ctx.scales, tensors)
        gated = silu(g)
        to_mixed, down_a, down_b = down.backward(gradients[0], gated * u, low_y, None)
        to_u = gated.mul_(to_mixed)
        to_g = torch.ops.aten.silu_backward(to_mixed.mul_(u), g)
        to_x, gate_a, gate_b = gate.backward(to_g, x, low_g, None)
        to_x, up_a, up_b = up.backward(to_u, x, low_u, to_x)
        return to_x, None, None, None, gate_a, gate_b, None, None, up_a, up_b, None, None, down_a, down_b


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        mean_square = torch.linalg.vecdot(x, x)[..., None] / x.shape[-1]
        inverse = (mean_square + eps).rsqrt_()  # [..., 1]
        ctx.save_for_backward(x, weight, inverse)
        scaled: Tensor = x * inverse
        return scaled.mul_(weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, inverse = ctx.saved_tensors
        to_scaled = gradients[0] * weight
        along = torch.linalg.vecdot(to_scaled, x)[..., None] * inverse.pow(3) / x.shape[-1]
        return to_scaled.mul_(inverse).addcmul_(x, along, value=-1), None, None
