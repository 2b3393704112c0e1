"""What an algorithm is: how credit is shared out in a group, and the objective that learns from it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from palestra.envs.errors import ConfigError
from palestra.envs.types import Scored
from palestra.rl.objective import Objective
from palestra.rollout.types import Group, Trajectory

Float64 = NDArray[np.float64]

SPREAD = 1e-8
"""Rewards that differ by no more than this are the same: a mean in floating point leaves a residue, which a division
by the spread would blow up to a push on the whole group."""


@dataclass(frozen=True, slots=True)
class Credit:
    """What the trajectories of one group are credited with.

    One entry per trajectory, in the group's order: a value for each token that the policy sampled [sampled_tokens],
    over its samples in their order; None for a trajectory that is in no statistic and no loss.
    Credit((array([1., 1.]), None, array([-1.]))).
    """

    advantages: tuple[Float64 | None, ...]
    returns: tuple[Float64 | None, ...] | None = None
    """What a critic should have predicted at each sampled token, laid out as `advantages`; NaN where it is not asked.
    None without a critic."""
    values: tuple[Float64 | None, ...] | None = None
    """What the critic did predict there when the batch was frozen, laid out likewise."""

    @property
    def signal(self) -> bool:
        """Whether anything in the group is credited at all, or was not what its critic had predicted."""
        return any(
            stream is not None and bool(np.any(stream != 0.0)) for stream in (*self.advantages, *self._surprises)
        )

    @property
    def _surprises(self) -> list[Float64 | None]:
        """Returns minus values, 0 where the critic is not asked."""
        returns = self.returns or ()
        values = self.values or (None,) * len(returns)
        pairs = zip(returns, values, strict=True)
        return [r if r is None else np.nan_to_num(r - (0.0 if v is None else v)) for r, v in pairs]


@dataclass(frozen=True, slots=True)
class Measured:
    """What the learner measured on a step's sampled tokens before their credit.

    Each is laid out as [group][trajectory], with None for a trajectory without a verdict; arrays are [sampled_tokens].
    """

    values: tuple[tuple[Float64 | None, ...], ...] | None = None
    """V of the state before each sampled token; with a critic only."""
    last_values: tuple[tuple[float | None, ...], ...] | None = None
    """V of the state after the trajectory's last token: what a cut episode would still have earned."""
    penalties: tuple[tuple[Float64 | None, ...], ...] | None = None
    """beta * (log pi - log ref) of each token, to be taken off its reward; with a KL in the reward only."""


class Algorithm(Protocol):
    """Frozen settings. `credit` looks at the groups of one step, at what was measured on them, and at nothing else."""

    @property
    def objective(self) -> Objective: ...

    def check(self, group_size: int) -> None:
        """Raise ConfigError when groups of this size cannot teach anything."""
        ...

    def credit(self, groups: Sequence[Group], measured: Measured | None = None) -> list[Credit]:
        """The credit of every sampled token of each group. Where groups are compared within themselves, constant groups
        and single valid members get exactly 0."""
        ...


class PerGroup(ABC):
    """For an algorithm that looks at one group at a time."""

    __slots__ = ()

    @abstractmethod
    def advantages(self, group: Group) -> Credit:
        """The credit of every sampled token of one group."""

    def credit(self, groups: Sequence[Group], measured: Measured | None = None) -> list[Credit]:
        """Each group's by itself. A KL in the reward is taken off the outcomes first."""
        return [self.advantages(group) for group in penalised(groups, measured)]


def penalised(groups: Sequence[Group], measured: Measured | None) -> list[Group]:
    """The groups, with the penalties measured on a trajectory's tokens taken off its outcome."""
    if measured is None or measured.penalties is None:
        return list(groups)
    return [
        replace(group, trajectories=tuple(map(_penalised, group.trajectories, penalties)))
        for group, penalties in zip(groups, measured.penalties, strict=True)
    ]


def _penalised(trajectory: Trajectory, penalties: Float64 | None) -> Trajectory:
    if penalties is None or not isinstance(trajectory.verdict, Scored):
        return trajectory
    verdict = replace(trajectory.verdict, value=trajectory.verdict.value - float(penalties.sum()))
    return replace(trajectory, verdict=verdict)


def rewards_of(group: Group) -> Float64:
    """[num_trajectories] float64 outcomes; NaN marks a trajectory without a verdict."""
    rewards = (trajectory.reward for trajectory in group.trajectories)
    return np.array([np.nan if reward is None else reward for reward in rewards], dtype=np.float64)


def constant(rewards: Float64) -> bool:
    """Whether a group's outcomes teach nothing: fewer than two, or all the same."""
    return rewards.size < 2 or float(rewards.max() - rewards.min()) <= SPREAD


def per_trajectory(group: Group, values: Sequence[float]) -> Credit:
    """Credit each sampled token with its trajectory's value; NaN takes the trajectory out of the loss."""
    return Credit(
        tuple(
            None if np.isnan(value) else np.full(trajectory.sampled_tokens, value, dtype=np.float64)
            for trajectory, value in zip(group.trajectories, values, strict=True)
        )
    )


def divides(ddof: int, eps: float) -> None:
    """Raise ConfigError unless a spread can be computed and divided by like this."""
    if ddof not in (0, 1):
        raise ConfigError(f"algorithm.ddof is {ddof}; use 1 (sample variance) or 0 (population variance)")
    if not 0 <= eps < np.inf:
        raise ConfigError(f"algorithm.eps is {eps}; use a small number that is not negative, such as 1e-6")


def takes_no_penalties(name: str, objective: Objective) -> None:
    """Raise ConfigError for a KL in the reward where outcomes are not simply added up."""
    if objective.kl_in_reward:
        raise ConfigError(
            f"algorithm.kl is reward_k1, but {name} has no place in its rewards for a penalty; use a KL in the loss, "
            'such as kl = "k3_score"'
        )


def compares(name: str, group_size: int) -> None:
    """Raise ConfigError unless a group holds at least two attempts to compare."""
    if group_size < 2:
        raise ConfigError(
            f"rollout.group_size is {group_size}, but {name} compares the attempts of a group; use 2 or more"
        )
