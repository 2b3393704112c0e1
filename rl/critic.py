"""The value head: what an episode will still earn, read off the policy's own hidden states.

V(state before token t) is a linear function, in float32, of the hidden state that predicts token t: the state in which
the policy acts, with every observation before it read. So no value is ever computed at an observation. The head is the
critic's alone: it has its own AdamW and learning rate, and its gradient is clipped by itself, so that a bad critic
cannot shrink the policy's step. Values know no temperature.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from palestra.envs.errors import ConfigError
from palestra.rl.members import Actions
from palestra.rl.objective import Terms
from palestra.rl.optimizer import OptimizerSettings, load_moments, make_optimizer, moments
from palestra.rl.ranks import Ranks


@dataclass(frozen=True, slots=True)
class CriticSettings:
    """How a critic is trained beside the policy."""

    learning_rate: float = 1e-3
    """Of the value head; follows the optimizer's schedule."""
    coefficient: float = 0.5
    """Weight of the value loss in the loss."""
    clip: float | None = 0.2
    """How far a value may move from what it was when the batch was frozen, before it stops being pulled. None: any."""
    trunk_gradient: bool = False
    """Train the policy's body for the value loss as well. False: the policy's gradient stays the policy's own."""

    def __post_init__(self) -> None:
        for name, value in (("learning_rate", self.learning_rate), ("coefficient", self.coefficient)):
            if not 0 < value < float("inf"):
                raise ConfigError(f"algorithm.value_{name} is {value}; use a number above 0")
        if self.clip is not None and not self.clip > 0:
            raise ConfigError(f"algorithm.value_clip is {self.clip}; use a distance above 0, or none for no clipping")


@runtime_checkable
class HasCritic(Protocol):
    """An algorithm whose credit needs values."""

    @property
    def critic(self) -> CriticSettings: ...


def critic_of(algorithm: object) -> CriticSettings | None:
    """The critic that an algorithm asks for; None for one that needs no values."""
    return algorithm.critic if isinstance(algorithm, HasCritic) else None


def value_loss(
    values: Tensor, returns: Tensor, old: Tensor, weights: Tensor, clip: float | None
) -> tuple[Tensor, Tensor]:
    """sum of w 0.5 max((V - R)^2, (clipped V - R)^2), and how often the clipped branch was the larger one.

    [N] each; `clip` bounds V around `old`. `weights` hold counts over the whole optimiser step.
    """
    error = (values - returns).square()
    if clip is None:
        return (weights * 0.5 * error).sum(), error.detach().new_zeros(())
    clipped = (old + (values - old).clamp(-clip, clip) - returns).square()
    # where the value has not moved beyond the clip both are one, up to rounding: then it is not clipped
    active = ((values - old).abs() > clip) & (clipped > error)
    return (weights * 0.5 * torch.where(active, clipped, error)).sum(), active.detach().sum()


class Critic:
    """A value head and its optimizer. The learner owns it and calls it in the order terms, sum_gradients, apply."""

    def __init__(
        self,
        settings: CriticSettings,
        hidden_size: int,
        optimizer: OptimizerSettings,
        *,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """`optimizer`: the policy's, for everything but the learning rate. Starts at V = 0 everywhere."""
        self.settings = settings
        self._head = nn.Linear(hidden_size, 1, device=device, dtype=torch.promote_types(dtype, torch.float32))
        nn.init.zeros_(self._head.weight)
        nn.init.zeros_(self._head.bias)
        self._named = dict(self._head.named_parameters())
        self._max_grad_norm = optimizer.max_grad_norm
        own = replace(optimizer, learning_rate=settings.learning_rate, weight_decay=0.0)
        self._optimizer = make_optimizer(own, list(self._named.values()))

    def values(self, hidden: Tensor) -> Tensor:
        """[N] from the hidden states that predict N tokens, [N, hidden]."""
        values: Tensor = self._head(hidden.to(self._head.weight.dtype))[:, 0]  # [N]
        return values

    def terms(self, hidden: Tensor | None, actions: Actions) -> Terms:
        """The value loss of a micro-batch, times its coefficient, over the tokens that have a return.

        hidden [N, hidden]: the states that predict the tokens; None: of no tokens.
        """
        device, dtype = self._head.weight.device, self._head.weight.dtype
        hidden = torch.zeros(0, self._head.in_features, device=device) if hidden is None else hidden

        def numbers(values: object) -> Tensor:
            return torch.as_tensor(values).to(device, dtype)

        # selected before the arithmetic: what is no number where nothing is to be learned stays out of it
        where = torch.isfinite(torch.as_tensor(actions.returns)).nonzero()[:, 0]
        returns = numbers(actions.returns[where.numpy()])
        old, weights = numbers(actions.old_values[where.numpy()]), numbers(actions.value_weights[where.numpy()])
        states = hidden[where.to(hidden.device)]
        values = self.values(states if self.settings.trunk_gradient else states.detach())
        seen = values.detach()
        old = torch.where(torch.isnan(old), seen, old)
        loss, clipped = value_loss(values, returns, old, weights, self.settings.clip)
        sums = {
            "critic_tokens": torch.full((), len(where), device=device, dtype=dtype),
            "critic_values": seen.sum(),
            "critic_returns": returns.sum(),
            "critic_returns_squared": returns.square().sum(),
            "critic_errors_squared": (seen - returns).square().sum(),
            "critic_clipped": clipped.to(dtype),
        }
        return Terms(self.settings.coefficient * loss, sums)

    def sum_gradients(self, ranks: Ranks, scale: float) -> float:
        """Sum the head's gradient over ranks and take the loss scale off it; its norm before clipping."""
        parameters = list(self._named.values())
        ranks.sum_gradients(parameters)
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        torch._foreach_mul_(gradients, 1.0 / scale)
        return float(torch.nn.utils.get_total_norm(gradients))

    def apply(self, norm: float, factor: float) -> None:
        """Clip by `norm`, and step with `factor` of the learning rate."""
        torch.nn.utils.clip_grads_with_norm_(self._named.values(), self._max_grad_norm, torch.tensor(norm))
        for group in self._optimizer.param_groups:
            group["lr"] = self.settings.learning_rate * factor
        self._optimizer.step()
        self.forget_gradients()

    def forget_gradients(self) -> None:
        """Leave the weights as they are."""
        self._optimizer.zero_grad(set_to_none=True)

    def tensors(self) -> dict[str, Tensor]:
        """Copies of the weights and moments, for the learner's state."""
        copies = {f"weight/{name}": p.detach().to("cpu", copy=True) for name, p in self._named.items()}
        copies |= moments(self._optimizer, self._named, lambda tensor: tensor, keep=True)
        return {f"critic/{key}": tensor for key, tensor in copies.items()}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on from `tensors` of a learner's state. Raises ConfigError when they are of no such head."""
        own = {key.removeprefix("critic/"): t for key, t in tensors.items() if key.startswith("critic/")}
        for name, parameter in self._named.items():
            found = own.get(f"weight/{name}")
            if found is None or found.shape != parameter.shape:
                shape = None if found is None else tuple(found.shape)
                raise ConfigError(
                    f"the state has a value head's {name} of shape {shape}, this learner's critic has "
                    f"{tuple(parameter.shape)}; resume with the algorithm and model that the run was started with"
                )
        for name, parameter in self._named.items():
            _fill(parameter, own[f"weight/{name}"])
        load_moments(self._optimizer, self._named, own, _fill)


@torch.no_grad()
def _fill(tensor: Tensor, whole: Tensor) -> None:
    tensor.copy_(whole)


def with_values(terms: Terms, of_values: Terms) -> Terms:
    """The policy's terms and the critic's of one micro-batch, in one."""
    return replace(terms, loss=terms.loss + of_values.loss.to(terms.loss), sums={**terms.sums, **of_values.sums})


def critic_metrics(metrics: Mapping[str, float], grad_norm: float) -> dict[str, float]:
    """The metrics of an update, with what the critic's sums say about it in place of their means per action token.

    Where no token had a return there is nothing to say, and "value_grad_norm" is not among them.
    """
    sums = {name: value for name, value in metrics.items() if name.startswith("critic_")}
    found = {name: value for name, value in metrics.items() if name not in sums}
    tokens = sums["critic_tokens_mean"]
    if not tokens:
        return found
    mean = {name: value / tokens for name, value in sums.items()}
    variance = mean["critic_returns_squared_mean"] - mean["critic_returns_mean"] ** 2
    squared_error = mean["critic_errors_squared_mean"]
    return found | {
        "value_mean": mean["critic_values_mean"],
        "return_mean": mean["critic_returns_mean"],
        "value_error": squared_error**0.5,
        "value_clip_fraction": mean["critic_clipped_mean"],
        "value_grad_norm": grad_norm,
        "explained_variance": 1.0 - squared_error / variance if variance > 1e-12 else 0.0,
    }
