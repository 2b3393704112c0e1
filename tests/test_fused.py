"""Fused layers: the values and gradients of the plain ones, and out of the way where they do not fit."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from learning_support import tiny_gpt2, tiny_llama
from palestra.rl import lora
from palestra.rl.fused import Adapted, adapted_feed_forward, adapted_linears, rms_norm
from palestra.rl.fused_layers import fuse, unfuse


def adapted(generator: torch.Generator, inputs: int, outputs: int, *, bias: bool = False) -> Adapted:
    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    a, b = random(3, inputs).requires_grad_(), random(outputs, 3).requires_grad_()
    return Adapted(random(outputs, inputs), random(outputs) if bias else None, a, b, 1.7)


def plain(layer: Adapted, x: Tensor) -> Tensor:
    return linear(x, layer.weight, layer.bias) + layer.scale * linear(linear(x, layer.a), layer.b)


def same(ours: Tensor, theirs: Tensor, leaves: list[Tensor]) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    weights = torch.cos(torch.arange(ours.numel(), dtype=ours.dtype)).view_as(ours)
    pairs = zip(
        torch.autograd.grad((weights * ours).sum(), leaves),
        torch.autograd.grad((weights * theirs).sum(), leaves),
        strict=True,
    )
    for x, y in pairs:
        torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-11)


def test_adapted_layers_that_read_the_same_are_the_plain_ones() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 5, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    layers = [adapted(generator, 4, 6), adapted(generator, 4, 3, bias=True)]
    ours, theirs = torch.cat(adapted_linears(x, layers), -1), torch.cat([plain(layer, x) for layer in layers], -1)
    same(ours, theirs, [x, *(t for layer in layers for t in (layer.a, layer.b))])


def test_the_gated_feed_forward_is_the_plain_one() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 5, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    gate, up, down = adapted(generator, 4, 7), adapted(generator, 4, 7, bias=True), adapted(generator, 7, 4)
    theirs = plain(down, silu(plain(gate, x)) * plain(up, x))
    leaves = [x, *(t for layer in (gate, up, down) for t in (layer.a, layer.b))]
    same(adapted_feed_forward(x, gate, up, down), theirs, leaves)


def test_the_norm_is_the_plain_one() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 5, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.rand(4, generator=generator, dtype=torch.float64)
    theirs = x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt() * weight
    same(rms_norm(x, weight, 1e-3), theirs, [x])


def with_adapter(model: PreTrainedModel) -> lora.AdaptedModel:
    """With an adapter that is not zero."""
    made = lora.attach(model.eval(), lora.LoraSettings(rank=2, alpha=4.0))
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.3, generator=torch.Generator().manual_seed(len(name)))
    return made


def logits_and_gradients(model: lora.AdaptedModel) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    logits = model(input_ids=torch.arange(12)[None] % 50, use_cache=False).logits
    (logits * torch.cos(torch.arange(logits.numel()).view_as(logits))).sum().backward()
    return logits.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_fused_model_computes_what_it_did(dtype: torch.dtype) -> None:
    model = with_adapter(tiny_llama(dtype=dtype))
    replaced = [type(module).__name__ for module in model.modules() if "forward" in module.__dict__]
    assert {name: replaced.count(name) for name in set(replaced)} == {"Linear": 14, "LlamaMLP": 2, "LlamaRMSNorm": 5}
    ours, our_gradients = logits_and_gradients(model)
    unfuse(model)
    theirs, their_gradients = logits_and_gradients(model)
    # transformers norms float64 numbers in float32
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert our_gradients.keys() == their_gradients.keys()
    for name, grad in their_gradients.items():
        torch.testing.assert_close(our_gradients[name], grad, rtol=1e-4, atol=1e-4, msg=name)


def test_a_float32_adapter_on_a_half_precision_base_is_as_exact_as_before() -> None:
    exact, exact_gradients = logits_and_gradients(with_adapter(tiny_llama(dtype=torch.float32)))
    model = with_adapter(tiny_llama(dtype=torch.bfloat16))
    ours, our_gradients = logits_and_gradients(model)
    unfuse(model)
    theirs, their_gradients = logits_and_gradients(model)
    assert ours.dtype == torch.bfloat16
    assert (ours - exact).norm() < 1.2 * (theirs - exact).norm()
    for name, grad in exact_gradients.items():
        assert our_gradients[name].dtype == torch.float32
        assert (our_gradients[name] - grad).norm() < 1.3 * (their_gradients[name] - grad).norm() + 1e-3, name


def test_switching_the_adapter_off_gives_the_base() -> None:
    model = with_adapter(tiny_llama())
    base = tiny_llama().eval()
    ids = torch.arange(12)[None]
    with torch.no_grad():
        with lora.reference(model):
            torch.testing.assert_close(model(ids).logits, base(ids).logits, rtol=1e-6, atol=1e-6)
        assert not torch.allclose(model(ids).logits, base(ids).logits, atol=1e-2)


def test_a_copy_of_a_fused_model_computes_with_its_own_weights() -> None:
    model = with_adapter(tiny_llama())
    ids = torch.arange(12)[None]
    with torch.no_grad():
        before = model(ids).logits
        other = copy.deepcopy(model)
        for parameter in other.parameters():
            parameter.mul_(1.5)
        assert torch.equal(model(ids).logits, before)
        assert not torch.allclose(other(ids).logits, before)


def test_what_does_not_fit_is_left_alone() -> None:
    class Shifted(nn.Module):
        """As Gemma scales: by 1 + weight."""

        def __init__(self) -> None:
            super().__init__()
            self.weight, self.variance_epsilon = nn.Parameter(torch.zeros(4), requires_grad=False), 1e-6

        def forward(self, x: Tensor) -> Tensor:
            return x * (x.square().mean(-1, keepdim=True) + self.variance_epsilon).rsqrt() * (1 + self.weight)

    shifted = Shifted()
    fuse(shifted, lambda module: None)
    assert "forward" not in shifted.__dict__

    config = LlamaConfig(**{**tiny_llama().config.to_dict(), "hidden_act": "gelu"})
    gelu = lora.attach(LlamaForCausalLM(config), lora.LoraSettings(rank=2, alpha=4.0))
    half = lora.attach(tiny_llama(dtype=torch.bfloat16), lora.LoraSettings(rank=2, alpha=4.0))
    columns = lora.attach(tiny_gpt2(), lora.LoraSettings(rank=2, alpha=4.0))
    for model, names in ((gelu, {"Linear", "LlamaRMSNorm"}), (half, {"Linear", "LlamaMLP"}), (columns, set())):
        assert {type(module).__name__ for module in model.modules() if "forward" in module.__dict__} == names
