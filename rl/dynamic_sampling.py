"""Dynamic sampling (DAPO, arXiv:2503.14476): learn from groups in which some attempts did better than others.

The test is on what the environment gave, the outcome and the rewards of turns, before anything is added to it. On a
shaped reward every group looks informative, since no two lengths are the same, and the policy would be trained on
length alone.
"""

from __future__ import annotations

import numpy as np

from palestra.rl.algorithms.base import constant, rewards_of
from palestra.rollout.types import Group


def informative(group: Group) -> bool:
    """Whether the group's judged trajectories differ in outcome, or in what any of their turns earned: with outcomes 0
    and 1 and no turn rewards, 0 < number correct < G. A turn that a trajectory did not reach earned it nothing.

    Trajectories without a verdict say nothing; a group with fewer than two verdicts is not informative.
    """
    outcomes = rewards_of(group)
    judged = [trajectory for trajectory in group.trajectories if trajectory.valid]
    earned = np.zeros((len(judged), max((len(trajectory.turns) for trajectory in judged), default=0)))
    for row, trajectory in zip(earned, judged, strict=True):
        row[: len(trajectory.turns)] = [turn.reward for turn in trajectory.turns]
    return not all(map(constant, (outcomes[~np.isnan(outcomes)], *earned.T)))
