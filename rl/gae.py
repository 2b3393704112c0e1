"""Generalised advantage estimation (arXiv:1506.02438) over a trajectory's actions, in float64 on the host.

    delta_t = r_t + gamma_t V_{t+1} - V_t        A_t = delta_t + gamma_t lambda A_{t+1}        R_t = A_t + V_t

Arrays hold actions only, in their order: tokens that the policy sampled, or whole turns. t + 1 is the next action, and
its V has read whatever was observed in between; V after the last action is the bootstrap. An observation is skipped by
not being there, so neither a value nor a reward that stands at one can be used by mistake.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from palestra.envs.errors import IntegrityError

Float64 = NDArray[np.float64]

MASS = 1e-9
"""Relative difference of two sums of the same rewards that is rounding."""


def gae(
    rewards: Float64, values: Float64, *, gamma: float | Float64, lam: float, bootstrap: float = 0.0
) -> tuple[Float64, Float64]:
    """Advantages and returns, [T] each, of one trajectory's T actions.

    `gamma`: the discount from each action to the next, one for all or [T]. `bootstrap`: V of the state after the last.
    Raises IntegrityError for a reward or value that is not finite.
    """
    if rewards.shape != values.shape:
        raise IntegrityError(f"{rewards.size} rewards for {values.size} values; expected one of each per action")
    if not (np.isfinite(rewards).all() and np.isfinite(values).all() and np.isfinite(bootstrap)):
        raise IntegrityError("a reward or a value of an action is not finite, so no advantage can be computed from it")
    discounts = np.broadcast_to(np.asarray(gamma, np.float64), values.shape)
    following = np.append(values[1:], bootstrap)[: values.size]
    deltas = rewards + discounts * following - values
    advantages = np.zeros_like(deltas)
    ahead = 0.0
    for t in range(deltas.size - 1, -1, -1):
        ahead = float(deltas[t]) + float(discounts[t]) * lam * ahead
        advantages[t] = ahead
    return advantages, advantages + values


def decoupled_gae(
    rewards: Float64,
    values: Float64,
    *,
    gamma: float | Float64,
    lam: float,
    critic_lam: float,
    bootstrap: float = 0.0,
) -> tuple[Float64, Float64]:
    """Advantages with one lambda and critic targets with another (VAPO, arXiv:2504.05118)."""
    advantages, returns = gae(rewards, values, gamma=gamma, lam=lam, bootstrap=bootstrap)
    if critic_lam != lam:
        _, returns = gae(rewards, values, gamma=gamma, lam=critic_lam, bootstrap=bootstrap)
    return advantages, returns


def adaptive_lambda(alpha: float, num_actions: int) -> float:
    """VAPO's policy lambda, 1 - 1 / (alpha l), so that an advantage reaches further in long episodes; never below 0."""
    return max(0.0, 1.0 - 1.0 / (alpha * num_actions)) if num_actions else 0.0


def turn_discounts(turn: NDArray[np.integer], gamma: float) -> Float64:
    """[T]: gamma from the last token of each turn to whatever follows it, 1 inside a turn; `turn` [T] of each token."""
    last_of_turn = np.append(turn[1:] != turn[:-1], True)[: turn.size]
    return np.where(last_of_turn, gamma, 1.0)


def onto_actions(rewards: ArrayLike, sampled: ArrayLike) -> Float64:
    """[num sampled] from the rewards of all L tokens of a row: what arrives at others belongs to the action before it.

    Raises IntegrityError for a reward before the first action, which nobody earned.
    """
    per_token, mask = np.asarray(rewards, np.float64), np.asarray(sampled, bool)
    where = np.flatnonzero(mask)
    earned = np.zeros(where.size)
    for at in np.flatnonzero(per_token != 0.0):
        before = int(np.searchsorted(where, at, side="right")) - 1
        if before < 0:
            raise IntegrityError(f"a reward of {per_token[at]} at token {at}, before the policy did anything")
        earned[before] += per_token[at]
    conserve(earned, float(per_token.sum()), "a row")
    return earned


def conserve(rewards: Float64, total: float, whose: str) -> None:
    """Raise IntegrityError unless the rewards of the actions add up to what was earned: none is lost, none made up."""
    found = float(rewards.sum())
    scale = max(1.0, abs(total), float(np.abs(rewards).sum()))
    if not abs(found - total) <= MASS * scale:
        raise IntegrityError(
            f"{whose}: the rewards of its actions add up to {found:.9g}, but it earned {total:.9g}; some reward lies "
            "where the policy did not act"
        )
