"""GiGPO (arXiv:2505.10978): the episode against the group's episodes, each turn against the turns taken in its state.

A = A_episode + omega A_step. A_episode compares what the attempts earned in all; A_step compares the discounted returns
to go of turns, of any attempt of the group, whose world was exactly the same before the action (equal `Turn.state`). A
state that was met once is compared with nothing: exactly 0. The episode baseline is over trajectories, as in the
paper's equation 3; the reference code's default averages over steps, so that long attempts count more. Differs from
the paper: the outcome is earned by the last turn; a first turn without a digest is taken in the task's opening state.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from palestra.envs.errors import ConfigError, IntegrityError
from palestra.rl.algorithms.base import Credit, Float64, Measured, compares, divides
from palestra.rl.algorithms.grpo import grpo_advantages
from palestra.rl.objective import Objective
from palestra.rl.returns import reward_to_go
from palestra.rl.turns import Turns, credit_of, tables_of
from palestra.rollout.types import Group


@dataclass(frozen=True, slots=True)
class GiGPO:
    """Needs an environment that says in which state its world is, such as a ToolEnvironment told to digest states."""

    objective: Objective = Objective()
    gamma: float = 0.95
    """Discount per turn, of the step returns."""
    step_weight: float = 1.0
    """omega."""
    std: Literal["group", "none"] = "none"
    """Of both norms: divided by the spread of what is compared, or by nothing."""
    ddof: int = 1
    eps: float = 1e-6

    def __post_init__(self) -> None:
        divides(self.ddof, self.eps)
        if self.std not in ("group", "none"):
            raise ConfigError(f'algorithm.std is "{self.std}", but gigpo knows "group" and "none"')

    def check(self, group_size: int) -> None:
        """Raise ConfigError for groups of one."""
        compares("gigpo", group_size)

    def credit(self, groups: Sequence[Group], measured: Measured | None = None) -> list[Credit]:
        """Each group's by itself. Raises IntegrityError where the environment has told no state at all."""
        tables = [tables_of(group, measured, index) for index, group in enumerate(groups)]
        told = [state for group in tables for table in group if table is not None for state in table.states[1:]]
        if told and all(state is None for state in told):
            raise IntegrityError(
                "no turn of the step knows the state that it was taken in, and gigpo compares turns of equal states; "
                "use an environment that digests states (environment.options.digest_states = true in those that are "
                'built in), or algorithm.name = "same_turn_baseline"'
            )
        return [credit_of(group, self.advantages([table for table in group if table is not None])) for group in tables]

    def advantages(self, tables: Sequence[Turns]) -> list[Float64]:
        """[K] for each trajectory of a group."""
        episodes = self._norm(np.array([table.total for table in tables]))
        returns = [reward_to_go(table.rewards, self.gamma) for table in tables]
        steps = self._steps([anchors(table, index) for index, table in enumerate(tables)], returns)
        return [episode + self.step_weight * step for episode, step in zip(episodes, steps, strict=True)]

    def _steps(self, keys: Sequence[Sequence[Hashable]], returns: Sequence[Float64]) -> list[Float64]:
        met: dict[Hashable, list[tuple[int, int]]] = {}
        for attempt, its in enumerate(keys):
            for turn, key in enumerate(its):
                met.setdefault(key, []).append((attempt, turn))
        steps = [np.zeros_like(table) for table in returns]
        for places in met.values():
            values = self._norm(np.array([returns[attempt][turn] for attempt, turn in places]))
            for (attempt, turn), value in zip(places, values, strict=True):
                steps[attempt][turn] = value
        return steps

    def _norm(self, values: Float64) -> Float64:
        return grpo_advantages(values, self.std, self.ddof, self.eps)


def anchors(table: Turns, attempt: int) -> list[Hashable]:
    """What each turn is compared by: its state; the opening for a first turn without one, nothing else for others."""
    opening: Hashable = ("opening",)
    return [
        state if state is not None else opening if turn == 0 else (attempt, turn)
        for turn, state in enumerate(table.states)
    ]
