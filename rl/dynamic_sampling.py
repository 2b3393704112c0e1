"""Dynamic sampling (DAPO, arXiv:2503.14476): learn from groups in which some attempts did better than others.

The test is on what the environment gave, the outcome and the rewards of turns, before anything is added to it. On a
shaped reward every group looks informative, since no two lengths are the same, and the policy would be trained on
length alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from palestra.envs.types import Scored
from palestra.rl.algorithms.base import constant, rewards_of
from palestra.rollout.types import Group


def informative(group: Group, objectives: Sequence[str] = ()) -> bool:
    """Whether the group's judged trajectories differ in outcome, or in what any of their turns earned: with outcomes 0
    and 1 and no turn rewards, 0 < number correct < G. A turn that a trajectory did not reach earned it nothing.

    Trajectories without a verdict say nothing; a group with fewer than two verdicts is not informative. `objectives`:
    the parts of a verdict that the algorithm learns from; then they are what must differ, and nothing else.
    """
    if objectives:
        verdicts = [t.verdict for t in group.trajectories if isinstance(t.verdict, Scored)]
        columns = ([verdict.parts.get(name, 0.0) for verdict in verdicts] for name in objectives)
        return not all(constant(np.array(column)) for column in columns)
    outcomes = rewards_of(group)
    judged = [trajectory for trajectory in group.trajectories if trajectory.valid]
    earned = np.zeros((len(judged), max((len(trajectory.turns) for trajectory in judged), default=0)))
    for row, trajectory in zip(earned, judged, strict=True):
        row[: len(trajectory.turns)] = [turn.reward for turn in trajectory.turns]
    return not all(map(constant, (outcomes[~np.isnan(outcomes)], *earned.T)))
