"""What every engine refuses before it does any work: requests that cannot be served, adapters that do not fit."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from palestra.envs.errors import EngineError
from palestra.rollout.adapters import Adapter
from palestra.rollout.types import Sampling

UNPUBLISHED = -1
"""The version of tokens sampled before the first `load`: from the base weights as they lie in the folder."""

Shapes = Mapping[str, tuple[int, int] | None]
"""[out, in] of every linear layer that an adapter may name; None where the engine does not know it."""

Sizes = Mapping[str, tuple[int, ...]]
"""Shape of every parameter that whole weights may replace."""


def check_request(prompt: Sequence[int], sampling: Sampling, *, context_tokens: int, vocab: int) -> None:
    """Raise ValueError for what no engine can serve, before anything is sent."""
    if sampling.max_tokens < 1:
        raise ValueError(f"max_tokens is {sampling.max_tokens}; ask for at least 1")
    if not (math.isfinite(sampling.temperature) and sampling.temperature >= 0):
        raise ValueError(f"temperature is {sampling.temperature}; use 0 (greedy) or a positive number")
    if len(prompt) + sampling.max_tokens > context_tokens:
        raise ValueError(
            f"prompt of {len(prompt)} tokens and max_tokens {sampling.max_tokens} make "
            f"{len(prompt) + sampling.max_tokens}, but the engine serves rows of at most {context_tokens}"
        )
    check_ids(prompt, vocab=vocab, at_least=1, at_most=context_tokens)


def check_ids(ids: Sequence[int], *, vocab: int, at_least: int, at_most: int) -> None:
    """Raise ValueError for rows of a wrong length or with ids outside the vocabulary (an engine may die of those)."""
    if not at_least <= len(ids) <= at_most:
        raise ValueError(f"{len(ids)} tokens given, the engine takes {at_least} to {at_most}")
    low, high = min(ids), max(ids)
    if low < 0 or high >= vocab:
        raise ValueError(f"token id {low if low < 0 else high} is outside the vocabulary of {vocab}")


def check_adapter(adapter: Adapter, shapes: Shapes, sizes: Sizes | None = None) -> None:
    """Raise EngineError unless every module of `adapter` is a linear layer of the model, of its size, and finite; the
    same for whole weights, by the parameters' `sizes` (None: an engine that takes factors only).

    A partial match is a failure: a policy that is only half published is nobody's policy.
    """
    if not adapter.num_parts:
        raise EngineError("the adapter names no module; the old version stays in force")
    _check_known(adapter.factors, shapes, "linear layer")
    if adapter.weights and sizes is None:
        raise EngineError("whole weights were sent to an engine that serves factors; use sync_mode merged")
    _check_known(adapter.weights, sizes or {}, "parameter")
    for name, factors in adapter.factors.items():
        size = (factors.b.shape[0], factors.a.shape[1])
        if shapes[name] not in (None, size) or factors.a.shape[0] != factors.b.shape[1]:
            raise EngineError(
                f"{name}: factors a {factors.a.shape} and b {factors.b.shape} do not fit a layer [out, in] of "
                f"{shapes[name]}; the old version stays in force"
            )
        if not (np.isfinite(factors.a).all() and np.isfinite(factors.b).all() and math.isfinite(factors.scale)):
            raise EngineError(f"{name}: factors or scale are not finite; the old version stays in force")
    for name, weight in adapter.weights.items():
        if sizes is not None and weight.shape != sizes[name]:
            raise EngineError(f"{name}: a weight of {weight.shape} for {sizes[name]}; the old version stays in force")
        if not np.isfinite(weight).all():
            raise EngineError(f"{name}: weights are not finite; the old version stays in force")


def _check_known(wanted: Mapping[str, object], have: Mapping[str, object], what: str) -> None:
    missing = [name for name in wanted if name not in have]
    if missing:
        known = next(iter(sorted(have)), f"no {what} at all")
        raise EngineError(
            f"the adapter matched {len(wanted) - len(missing)} of {len(wanted)} modules: the model has no "
            f"{missing[0]!r}, it has e.g. {known!r}; name modules as the base model does. The old version stays"
        )
