"""From hidden states to log-probabilities in token chunks: never a [tokens, vocab] tensor beyond a chunk.

With a frozen head the gradient of each log-probability towards its hidden state is known in the forward, one row per
token, so the logits are computed once and the backward is a multiplication. With a trained head they are computed again
in the backward, which then also yields the head's gradient.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from palestra.envs.errors import ConfigError

CHUNK_ELEMENTS = 2**24
"""Logits in a chunk: 16 M float32 are 64 MB, and their probabilities as much again. Smaller chunks read the head more
often: at 49,152 words the products ran at 80 GFLOP/s with 170 rows and 92 with 340, and no faster with more."""


@dataclass(frozen=True, slots=True)
class Head:
    """A model's last layer: logits = cap(scale * (h @ weight.T + bias)), cap(x) = softcap * tanh(x / softcap)."""

    weight: Tensor = field(repr=False)  # [vocab, hidden]; the embedding's own tensor where they are tied
    bias: Tensor | None = field(default=None, repr=False)
    scale: float = 1.0
    softcap: float | None = None

    @classmethod
    def of(cls, model: PreTrainedModel) -> Head:
        """Read from a model and its configuration. Raises ConfigError for a head that is not a linear layer."""
        layer = model.get_output_embeddings()
        if not isinstance(layer, nn.Linear):
            raise ConfigError(
                f"{type(model).__name__} ends in {type(layer).__name__}, not a linear layer; choose another model"
            )
        config = model.config
        divisor = float(getattr(config, "logits_scaling", None) or 1.0)
        scale = float(getattr(config, "logit_scale", None) or 1.0) / divisor
        softcap = getattr(config, "final_logit_softcapping", None)
        return cls(layer.weight, layer.bias, scale, None if softcap is None else float(softcap))

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """[n, vocab] in at least float32 before any further arithmetic, and d logits / d (h @ weight.T) where it is
        not one number for all. `out` is memory that may be used for the logits."""
        raw = _product(hidden, self.weight, out)
        if self.bias is not None:
            raw = raw.add_(self.bias.to(raw.dtype))
        if self.scale != 1.0:
            raw = raw.mul_(self.scale)
        if self.softcap is None:
            return raw, None
        tanh = torch.tanh(raw / self.softcap)
        return self.softcap * tanh, 1 - tanh.square()

    def rows_per_chunk(self) -> int:
        """Tokens whose logits make one chunk."""
        return max(16, CHUNK_ELEMENTS // self.weight.shape[0])


def _product(hidden: Tensor, weight: Tensor, out: Tensor | None) -> Tensor:
    """hidden @ weight.T, accumulated and kept in at least float32: bfloat16 logits are off by up to 0.05."""
    if hidden.dtype in (torch.float32, torch.float64):
        return torch.mm(hidden, weight.T, out=None if out is None else out[: len(hidden)])
    if hidden.is_cuda:
        return torch.mm(hidden, weight.T, out_dtype=torch.float32)
    return hidden.float() @ weight.float().T


def accumulator(tensor: Tensor) -> torch.dtype:
    """float32, or float64 for float64: what logits and log-softmax are computed in."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def head_logprobs(
    head: Head,
    hidden: Tensor,
    targets: Tensor,
    temperature: Tensor,
    *,
    entropy_gradient: bool = False,
    smoothing: float = 0.0,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """log p(target) and entropy, [N] each, of softmax(logits / temperature).

    hidden [N, H]; targets [N] int64; temperature [N], the one each token was sampled at. Differentiable in hidden and,
    where it requires a gradient, in the head; the entropy only when asked, since that costs. Equal for all chunk sizes.
    With `smoothing` e, log p(target) is (1 - e) log p(target) + e times the mean over the vocabulary (label smoothing).
    """
    how = _How(head, chunk or head.rows_per_chunk(), entropy_gradient, smoothing)
    temperature = temperature.to(accumulator(hidden))
    logprobs, entropy = _HeadLogprobs.apply(hidden, head.weight, head.bias, targets, temperature, how)
    return logprobs, entropy


@dataclass(frozen=True, slots=True)
class _How:
    head: Head
    rows: int  # per chunk
    entropy_gradient: bool
    smoothing: float


class _HeadLogprobs(torch.autograd.Function):
    """Saves, per token, its gradient rows (frozen head) or the inputs (trained head)."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: Tensor, how: _How
    ) -> tuple[Tensor, Tensor]:
        ctx.how = how
        ctx.trained = ctx.needs_input_grad[1] or ctx.needs_input_grad[2]
        keep = ctx.needs_input_grad[0] and not ctx.trained
        dtype = accumulator(hidden)
        logprobs = torch.empty(len(hidden), dtype=dtype, device=hidden.device)
        entropy = torch.empty_like(logprobs)
        kept = [torch.empty_like(hidden) for _ in range((1 + how.entropy_gradient) if keep else 0)]
        memory = _Memory.of(hidden, weight, how.rows)
        for part in _chunks(len(hidden), how.rows):
            scores = _Scores.of(how.head, hidden[part], targets[part], temperature[part], how.smoothing, memory)
            logprobs[part], entropy[part] = scores.logprobs, scores.entropy
            if keep and how.entropy_gradient:
                kept[1][part] = scores.towards_entropy().to(weight.dtype) @ weight
            if keep:
                kept[0][part] = scores.logprob_towards_hidden(weight)
        if not how.entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        ctx.save_for_backward(*(kept if keep else (hidden, targets, temperature)))
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.trained:
            return *_trained_head_gradients(ctx, *gradients), None, None, None
        by_logprob, *by_entropy = ctx.saved_tensors
        grad = gradients[0][:, None] * by_logprob
        for rows in by_entropy:
            grad = grad + gradients[1][:, None] * rows
        return grad.to(by_logprob.dtype), None, None, None, None, None


def _trained_head_gradients(
    ctx: Any, to_logprobs: Tensor, to_entropy: Tensor
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Towards hidden, weight and bias, with each chunk's logits computed again."""
    hidden, targets, temperature = ctx.saved_tensors
    head: Head = ctx.how.head
    grad_hidden = torch.zeros_like(hidden)
    grad_weight = torch.zeros_like(head.weight) if ctx.needs_input_grad[1] else None
    grad_bias = torch.zeros_like(head.bias) if head.bias is not None and ctx.needs_input_grad[2] else None
    memory = _Memory.of(hidden, head.weight, ctx.how.rows)
    for part in _chunks(len(hidden), ctx.how.rows):
        scores = _Scores.of(head, hidden[part], targets[part], temperature[part], ctx.how.smoothing, memory)
        by_entropy = to_entropy[part, None] * scores.towards_entropy() if ctx.how.entropy_gradient else 0.0
        raw = scores.towards_logprob().mul_(to_logprobs[part, None]).add_(by_entropy).to(head.weight.dtype)
        grad_hidden[part] = raw @ head.weight
        if grad_weight is not None:
            grad_weight.addmm_(raw.T, hidden[part])
        if grad_bias is not None:
            grad_bias += raw.sum(0)
    return grad_hidden, grad_weight, grad_bias


@dataclass(frozen=True, slots=True)
class _Memory:
    """What every chunk writes its logits and probabilities to: fresh memory costs as much as a pass over it."""

    logits: Tensor | None  # None: the product of half-precision numbers makes its own
    probabilities: Tensor

    @classmethod
    def of(cls, hidden: Tensor, weight: Tensor, rows: int) -> _Memory:
        shape, dtype = (min(rows, len(hidden)), len(weight)), accumulator(hidden)
        logits = torch.empty(shape, dtype=dtype, device=hidden.device) if hidden.dtype == dtype else None
        return cls(logits, torch.empty(shape, dtype=dtype, device=hidden.device))


@dataclass(frozen=True, slots=True)
class _Scores:
    """One chunk: logits over temperature, less the largest of each row, and what the targets and the whole come to."""

    logits: Tensor  # [n, vocab]
    probabilities: Tensor
    targets: Tensor
    logprobs: Tensor
    entropy: Tensor
    slope: Tensor  # d (logits / temperature) / d (h @ weight.T)
    smoothing: float

    @classmethod
    def of(
        cls, head: Head, hidden: Tensor, targets: Tensor, temperature: Tensor, smoothing: float, memory: _Memory
    ) -> _Scores:
        logits, curve = head.logits(hidden, memory.logits)
        per_token = temperature[:, None]
        if not bool((temperature == 1).all()):
            logits.div_(per_token)
        logits.sub_(logits.amax(-1, keepdim=True))
        if head.bias is not None:
            # a word that cannot be adds 0 to the entropy, not 0 * -inf
            logits.clamp_min_(torch.finfo(logits.dtype).min)
        p = torch.softmax(logits, -1, out=memory.probabilities[: len(hidden)])
        log_sum = -p.amax(-1).log()  # the largest logit is 0 here
        logprobs = logits.gather(1, targets[:, None])[:, 0] - log_sum
        if smoothing:
            logprobs = (1 - smoothing) * logprobs + smoothing * (logits.mean(-1) - log_sum)
        entropy = log_sum - torch.linalg.vecdot(p, logits)
        slope = (head.scale / per_token) if curve is None else curve * (head.scale / per_token)
        return cls(logits, p, targets, logprobs, entropy, slope, smoothing)

    def towards_logprob(self) -> Tensor:
        """[n, vocab] gradient of log p(target). Takes the memory of the probabilities, so it comes last."""
        return self._less_target().mul_(-self.slope)

    def logprob_towards_hidden(self, weight: Tensor) -> Tensor:
        """[n, hidden] gradient of log p(target), by one pass over [n, vocab]. Comes last, too."""
        if self.slope.shape[1] == 1:
            return (self._less_target().to(weight.dtype) @ weight).mul_(-self.slope)
        return self.towards_logprob().to(weight.dtype) @ weight

    def _less_target(self) -> Tensor:
        """p - onehot, with the one shared out by the smoothing."""
        grad = self.probabilities
        if self.smoothing:
            grad.sub_(self.smoothing / grad.shape[1])
        ones = torch.full_like(self.logprobs, 1 - self.smoothing)[:, None]
        return grad.scatter_add_(1, self.targets[:, None], -ones)

    def towards_entropy(self) -> Tensor:
        """[n, vocab] gradient of the entropy: -p (log p + H)."""
        p = self.probabilities
        log_sum = -p.amax(-1, keepdim=True).log()
        return -p * (self.logits - log_sum + self.entropy[:, None]) * self.slope


def _chunks(length: int, rows: int) -> list[slice]:
    return [slice(start, min(start + rows, length)) for start in range(0, length, rows)]
