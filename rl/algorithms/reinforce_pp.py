"""REINFORCE++ (arXiv:2501.03262): no comparison within a group, but rewards to come, whitened over the whole step.

Each token's reward is minus its KL penalty, when the KL is in the reward; a turn's own reward comes on its last token,
the outcome on the last of all.
Advantages are the rewards to come, discounted per sampled token, minus their mean over all tokens of the step and over
their spread. Differs from the paper: observations neither cut a return nor discount it, and a step whose returns are
all the same is exactly 0. Since groups are not compared, a group of equal outcomes has a signal here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from palestra.envs.errors import ConfigError
from palestra.rl.algorithms.base import Credit, Float64, Measured, divides
from palestra.rl.objective import Objective
from palestra.rl.returns import EpsForm, reward_to_go, whiten_step
from palestra.rl.token_gae import in_time, rewards_in_time
from palestra.rl.turns import token_turns
from palestra.rollout.types import Group, Trajectory


@dataclass(frozen=True, slots=True)
class ReinforcePP:
    """Groups of one will do."""

    objective: Objective = Objective()
    gamma: float = 1.0
    """Discount per sampled token."""
    ddof: int = 1
    """Degrees of freedom taken from the number of tokens in their variance: 1 (sample) or 0 (population)."""
    eps: float = 1e-8
    """Keeps the variance away from 0."""
    eps_form: EpsForm = "add"
    """"add": the variance and eps; "floor": the larger of the two."""

    def __post_init__(self) -> None:
        divides(self.ddof, self.eps)
        if not 0 < self.gamma <= 1:
            raise ConfigError(f"algorithm.gamma is {self.gamma}; a discount is above 0 and at most 1")

    def check(self, group_size: int) -> None:
        """Nothing to refuse: attempts of other tasks are compared with as well."""

    def credit(self, groups: Sequence[Group], measured: Measured | None = None) -> list[Credit]:
        """Whitened rewards to come of the valid trajectories."""
        none = [(None,) * len(group.trajectories) for group in groups]
        penalties = none if measured is None or measured.penalties is None else measured.penalties
        returns = [
            Credit(tuple(_to_come(t, p, self.gamma) for t, p in zip(group.trajectories, of_group, strict=True)))
            for group, of_group in zip(groups, penalties, strict=True)
        ]
        return whiten_step(returns, self.ddof, self.eps, self.eps_form)


def _to_come(trajectory: Trajectory, penalties: Float64 | None, gamma: float) -> Float64 | None:
    """[sampled_tokens], laid out by rows, but counted in the order of sampling: rows may hold turns in another."""
    if trajectory.reward is None:
        return None
    order = in_time(token_turns(trajectory))
    returns = np.empty(order.size)
    returns[order] = reward_to_go(rewards_in_time(trajectory, penalties), gamma)
    return returns
