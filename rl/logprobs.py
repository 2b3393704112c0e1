"""Log-probabilities of the sampled tokens of a packed row: body without cache, action rows only, head in chunks."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from palestra.envs.errors import ConfigError
from palestra.rl.attention import switch_length
from palestra.rl.batch import PackedRow, row_of_ids
from palestra.rl.closeness import allowed_variation, variation
from palestra.rl.head import Head, head_logprobs
from palestra.rl.layout import Layout
from palestra.rl.tree import plant


@dataclass(frozen=True, slots=True)
class Scored:
    """[N] each, in the order of the row's action tokens."""

    logprobs: Tensor
    entropy: Tensor
    hidden: Tensor | None = None
    """[N, hidden]: the states that predict the tokens, when they were asked for."""


def body_of(model: PreTrainedModel) -> nn.Module:
    """The model without its head: ids to hidden states."""
    body = getattr(model, model.base_model_prefix)
    if not isinstance(body, nn.Module):
        raise ConfigError(f"{type(model).__name__} has no body under {model.base_model_prefix!r}; choose another model")
    return body


def hidden_states(model: PreTrainedModel, row: PackedRow) -> Tensor:
    """[T, hidden] of a packed row, each token as in the samples that it is part of.

    Raises ConfigError when a sample is so long that it would change what its neighbours are computed with.
    """
    device = model.device
    limit = switch_length(model.config)
    if limit is not None and row.positions.max(initial=0) >= limit:
        raise ConfigError(
            f"a sample of {row.positions.max() + 1} tokens: beyond {limit} this model (longrope) computes the whole "
            "row with other rotary frequencies; use shorter samples, or another model"
        )
    layout = Layout.of(row.boundaries.tolist(), row.parents.tolist(), device)
    output = body_of(model)(
        input_ids=torch.from_numpy(row.ids).to(device)[None],
        position_ids=torch.from_numpy(row.positions).to(device)[None],
        use_cache=False,  # a cache would join the members that positions alone keep apart
        layout=layout,
    )
    states: Tensor = output.last_hidden_state[0]
    return states


def predictor_states(model: PreTrainedModel, row: PackedRow) -> Tensor:
    """[N, hidden]: the states that predict the row's action tokens."""
    return hidden_states(model, row)[torch.from_numpy(row.predictors).to(model.device)]


def score_row(
    model: PreTrainedModel,
    head: Head,
    row: PackedRow,
    *,
    entropy_gradient: bool = False,
    smoothing: float = 0.0,
    keep_hidden: bool = False,
) -> Scored:
    """Each action token's log-probability, at the temperature that it was sampled at, and the entropy there.

    `keep_hidden`: and the states that predict them, differentiable.
    """
    device = model.device
    hidden = predictor_states(model, row)
    first, again = distinct_actions(row)
    shared = len(first) < len(again)
    targets = torch.from_numpy(row.actions.targets[first]).to(device)
    temperature = torch.from_numpy(row.actions.temperature[first]).to(device)
    states = hidden[torch.from_numpy(first).to(device)] if shared else hidden
    logprobs, entropy = head_logprobs(
        head, states, targets, temperature, entropy_gradient=entropy_gradient, smoothing=smoothing
    )
    if shared:
        index = torch.from_numpy(again).to(device)
        logprobs, entropy = logprobs[index], entropy[index]
    return Scored(logprobs, entropy, hidden if keep_hidden else None)


def distinct_actions(row: PackedRow) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Action tokens that the head has to score [M], and which of them each action token of the row is [N].

    Samples that share an action token share its log-probability, when they were sampled at one temperature. Where
    nothing is shared, the order is kept.
    """
    keys = np.stack([row.predictors, row.actions.targets, row.actions.temperature.astype(np.float32).view(np.int32)])
    _, first, again = np.unique(keys, axis=1, return_index=True, return_inverse=True)
    if len(first) == keys.shape[1]:
        return np.arange(len(first)), np.arange(len(first))
    return first, again.reshape(-1)


@torch.no_grad()
def check_head(model: PreTrainedModel, head: Head) -> None:
    """Raise ConfigError unless `head` on our rows computes what the model itself computes, on a few tokens.

    The row is a forest, so attention over shared tokens is compared with the plain branches as well.
    """
    ids = np.arange(24) % model.config.get_text_config().vocab_size
    branches = [ids[:16], np.concatenate([ids[:8], ids[::-1][:12]])]
    forest = plant(branches, shortest=8)
    nobody = row_of_ids(ids)
    row = replace(
        nobody, ids=forest.ids, positions=forest.positions, boundaries=forest.boundaries, parents=forest.parents
    )
    states = hidden_states(model, row)
    ours = head.logits(states)[0]
    gap = 0.0
    for branch, places in zip(branches, forest.places, strict=True):
        whole = model(
            input_ids=torch.from_numpy(branch).to(model.device)[None],
            position_ids=torch.arange(len(branch), device=model.device)[None],
            use_cache=False,
            layout=Layout.of([0, len(branch)], [-1], model.device),
        )
        gap = max(gap, variation(whole.logits[0], ours[torch.from_numpy(places).to(model.device)]))
    if not gap <= allowed_variation(model.dtype):
        raise ConfigError(
            f"{type(model).__name__}: next tokens from our rows and head and from the model itself have a total "
            f"variation of {gap:.2g}, expected at most {allowed_variation(model.dtype)}; it does something between "
            "body and head, or in attention, that is not known here. Choose another model"
        )
