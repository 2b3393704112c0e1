"""The weight of each action token in the loss: seven modes, counted over the whole optimiser step.

    mode                       weight of token t                   seen in
    token-mean (default)       1 / tokens                          DAPO, verl, prime-rl
    seq-mean-token-mean        1 / (rows * tokens of the row)      the GRPO paper
    seq-mean-token-sum         1 / trajectories                    the policy gradient, with RLOO
    seq-mean-token-sum-norm    1 / (trajectories * horizon)        Dr. GRPO
    prompt-mean-token-mean     1 / (groups * tokens of the group)  ScaleRL
    traj-mean-token-mean       1 / (trajectories * its tokens)     several rows per trajectory
    token-sum                  1                                   the learning rate absorbs the scale

Counts are of rows, trajectories and groups with at least one action token in the step, over all micro-batches and
ranks, before anything is rejected: a rejected token leaves the numerator only. Modes that average sums count
trajectories, so that splitting one into several rows changes nothing; seq-mean-token-mean counts rows, as published.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from palestra.envs.errors import ConfigError

Mode = Literal[
    "token-mean",
    "seq-mean-token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
    "prompt-mean-token-mean",
    "traj-mean-token-mean",
    "token-sum",
]
Index = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Aggregation:
    """How token losses become one number. Aggregation("seq-mean-token-sum-norm", horizon=512)."""

    mode: Mode = "token-mean"
    horizon: int | None = None
    """Tokens: the constant divisor of seq-mean-token-sum-norm, usually the sampling budget of a trajectory."""
    count_without_signal: bool = False
    """Count groups that teach nothing in the denominators, though they are in no sum. False: uninformative groups do
    not weaken the step (as DAPO's filter has it); True: the numbers of trainers that keep them in the batch."""

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise ConfigError(f"aggregation is {self.mode!r}; use one of {', '.join(get_args(Mode))}")
        if (self.mode == "seq-mean-token-sum-norm") != (self.horizon is not None and self.horizon > 0):
            raise ConfigError(
                f"aggregation {self.mode} with horizon {self.horizon}: seq-mean-token-sum-norm divides by a horizon "
                "of 1 or more tokens, and no other mode has one"
            )


def token_weights(how: Aggregation, sample: Index, trajectory: Index, group: Index) -> NDArray[np.float64]:
    """[N] float64 weights of the step's N action tokens, from the index of each token's row, trajectory and group."""
    if how.mode == "token-sum":
        return np.ones(sample.size)
    if how.mode == "token-mean":
        return np.full(sample.size, 1.0 / max(1, sample.size))
    if how.mode in ("seq-mean-token-sum", "seq-mean-token-sum-norm"):
        live = np.unique(trajectory).size
        return np.full(sample.size, 1.0 / max(1, live * (how.horizon or 1)))
    owner = {"seq-mean-token-mean": sample, "traj-mean-token-mean": trajectory, "prompt-mean-token-mean": group}
    _, which, tokens = np.unique(owner[how.mode], return_inverse=True, return_counts=True)
    return 1.0 / (tokens.size * tokens[which])
