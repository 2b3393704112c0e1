"""What is common to algorithms that credit tokens: rewards per token, rewards to come, whitening.

Everything is over the tokens that the policy sampled, in their order, one dense array per trajectory: an observation
between two of them neither ends a return nor discounts it, because it is not there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from palestra.rl.algorithms.base import Credit, Float64, constant

EpsForm = Literal["add", "floor"]


def token_rewards(sampled_tokens: int, outcome: float, penalties: Float64 | None = None) -> Float64:
    """[sampled_tokens]: minus the penalty of each token, and the outcome on the last one."""
    rewards = np.zeros(sampled_tokens) if penalties is None else -penalties.astype(np.float64)
    if sampled_tokens:
        rewards[-1] += outcome
    return rewards


def reward_to_go(rewards: Float64, gamma: float) -> Float64:
    """[T] from [T]: G_t = r_t + gamma G_{t+1}. reward_to_go([0, 1], 0.5) is [0.5, 1]."""
    if gamma == 1.0:
        return np.cumsum(rewards[::-1])[::-1].copy()
    returns = np.zeros_like(rewards)
    ahead = 0.0
    for t in range(rewards.size - 1, -1, -1):
        ahead = float(rewards[t]) + gamma * ahead
        returns[t] = ahead
    return returns


def whiten(values: Float64, ddof: int, eps: float, form: EpsForm) -> Float64:
    """[N] with mean 0 and variance 1: divided by sqrt(var + eps) ("add") or by sqrt(max(var, eps)) ("floor").

    Values that are all the same are exactly 0 afterwards.
    """
    if constant(values):
        return np.zeros_like(values)
    variance = float(values.var(ddof=ddof))
    centred: Float64 = values - float(values.mean())
    return centred / math.sqrt(variance + eps if form == "add" else max(variance, eps))


def whiten_step(credits: Sequence[Credit], ddof: int, eps: float, form: EpsForm) -> list[Credit]:
    """Advantages whitened over all tokens of all trajectories of the step; what they are laid out in stays as it is."""
    streams = [stream for credit in credits for stream in credit.advantages if stream is not None]
    if not streams:
        return list(credits)
    ends = np.cumsum([stream.size for stream in streams])[:-1]
    white = iter(np.split(whiten(np.concatenate(streams), ddof, eps, form), ends))
    return [
        replace(credit, advantages=tuple(None if stream is None else next(white) for stream in credit.advantages))
        for credit in credits
    ]
