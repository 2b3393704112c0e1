"""REINFORCE++ with a baseline (arXiv:2501.03262): the group's mean off the outcome, then whitened over the whole step.

A_i = (r_i - mean of the group), one value for all sampled tokens of a trajectory, then minus the mean over all tokens
of the step and over their spread. Statistics of the whitening are per token, so long trajectories weigh more. Differs
from the paper: groups of equal outcomes are exactly 0 also after whitening (they are in its statistics), and the KL
that the paper adds to the loss is off unless it is asked for (`kl = "k2"`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from palestra.rl.algorithms.base import Credit, Measured, compares, divides, penalised, per_trajectory, rewards_of
from palestra.rl.algorithms.center import centred
from palestra.rl.objective import Objective
from palestra.rl.returns import EpsForm, whiten_step
from palestra.rollout.types import Group


@dataclass(frozen=True, slots=True)
class RPPBaseline:
    """Group mean, then global whitening."""

    objective: Objective = Objective()
    ddof: int = 1
    """Degrees of freedom taken from the number of tokens in their variance: 1 (sample) or 0 (population)."""
    eps: float = 1e-8
    """Keeps the variance away from 0."""
    eps_form: EpsForm = "add"
    """"add": the variance and eps; "floor": the larger of the two."""

    def __post_init__(self) -> None:
        divides(self.ddof, self.eps)

    def check(self, group_size: int) -> None:
        """Raise ConfigError for groups of one."""
        compares("rpp_baseline", group_size)

    def credit(self, groups: Sequence[Group], measured: Measured | None = None) -> list[Credit]:
        """Centred in the group, then whitened over the step."""
        groups = penalised(groups, measured)
        before = [per_trajectory(group, centred(rewards_of(group)).tolist()) for group in groups]
        after = whiten_step(before, self.ddof, self.eps, self.eps_form)
        return [white if plain.signal else plain for plain, white in zip(before, after, strict=True)]
