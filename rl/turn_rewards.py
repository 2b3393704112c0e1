"""Which algorithms learn from outcomes alone; what turns earned may not be lost in them without a word."""

from __future__ import annotations

from collections.abc import Sequence

from palestra.envs.errors import ConfigError
from palestra.rl.algorithms.base import Algorithm
from palestra.rl.algorithms.center import Center
from palestra.rl.algorithms.dr_grpo import DrGRPO
from palestra.rl.algorithms.gdpo import GDPO
from palestra.rl.algorithms.grpo import GRPO
from palestra.rl.algorithms.loo_std import LooStd
from palestra.rl.algorithms.maxrl import MaxRL
from palestra.rl.algorithms.opo import OPO
from palestra.rl.algorithms.rloo import RLOO
from palestra.rl.algorithms.rpp_baseline import RPPBaseline
from palestra.rollout.types import Group

OUTCOME_ONLY = (Center, DrGRPO, GDPO, GRPO, LooStd, MaxRL, OPO, RLOO, RPPBaseline)
"""Classes of algorithms that do not look at `Turn.reward`. One of the user's own answers for itself."""


def check_turn_rewards(algorithm: Algorithm, groups: Sequence[Group]) -> None:
    """Raise ConfigError when judged trajectories earned something in their turns that the algorithm does not read."""
    if type(algorithm) not in OUTCOME_ONLY:
        return
    for trajectory in (t for group in groups for t in group.trajectories if t.valid):
        for turn in trajectory.turns:
            if turn.reward:
                raise ConfigError(
                    f"turn {turn.index} of trajectory {trajectory.id} earned {turn.reward:g}, but "
                    f"{type(algorithm).__name__} learns from outcomes alone, so it would be lost; set algorithm.name "
                    "to one that reads the rewards of turns (turn_return, same_turn_baseline, outcome_turn, gigpo, "
                    "reinforce_pp, turn_gae, ppo, vapo), or let the environment give none"
                )
