"""GAE over the tokens that the policy sampled, with everything that they earned in its place."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from palestra.rl.algorithms.base import Float64
from palestra.rl.gae import conserve, decoupled_gae, turn_discounts
from palestra.rl.returns import token_rewards
from palestra.rl.turns import token_turns, turns_of
from palestra.rl.valued import Valued
from palestra.rollout.types import Trajectory

DiscountPer = Literal["token", "turn"]


def token_gae(
    one: Valued, gamma: float, discount_per: DiscountPer, lam: float, critic_lam: float
) -> tuple[Float64, Float64]:
    """Advantages and returns of a trajectory's sampled tokens, laid out as they are in its rows."""
    turn = token_turns(one.trajectory)
    order = in_time(turn)
    rewards = rewards_in_time(one.trajectory, one.penalties)
    discounts = turn_discounts(turn[order], gamma) if discount_per == "turn" else np.full(turn.size, gamma)
    found = decoupled_gae(
        rewards, one.values[order], gamma=discounts, lam=lam, critic_lam=critic_lam, bootstrap=one.bootstrap
    )
    back = np.argsort(order)
    return found[0][back], found[1][back]


def rewards_in_time(trajectory: Trajectory, penalties: Float64 | None) -> Float64:
    """[sampled_tokens] in the order of sampling: what each token earned. Raises IntegrityError when any is lost."""
    turn = token_turns(trajectory)
    order, outcome = in_time(turn), float(trajectory.reward or 0.0)
    rewards = token_rewards(turn.size, outcome, None if penalties is None else penalties[order])
    if not turn.size:
        return rewards
    earned = sum(t.reward for t in trajectory.turns)
    if any(t.reward for t in trajectory.turns):
        turns_of(trajectory)  # the places of turn rewards are only as good as the table
        for t in trajectory.turns:
            rewards[np.flatnonzero(turn[order] == t.index)[-1]] += t.reward
    off = 0.0 if penalties is None else float(penalties.sum())
    conserve(rewards, outcome + earned - off, f"trajectory {trajectory.id}")
    return rewards


def in_time(turn: NDArray[np.int64]) -> NDArray[np.int64]:
    """The order in which tokens were sampled, from the turn of each: rows may hold turns in another order."""
    return np.argsort(turn, kind="stable")
