"""What the objective is given of each action token besides log-probabilities."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from palestra.rl.members import Actions


@dataclass(frozen=True, slots=True)
class ActionTokens:
    """Gathered action tokens of one micro-batch, [N] each; numbers in the dtype of the log-probabilities.

    A trajectory's tokens are all in one micro-batch, so whatever is said of a turn or a trajectory is said of it whole.
    """

    weights: Tensor
    advantages: Tensor
    sampling_logprobs: Tensor  # of the policy that sampled, at the temperature it sampled with; unread in imitation
    trajectory: Tensor  # int64: tokens with the same number are of one trajectory
    turn: Tensor  # int64, within the trajectory
    version: Tensor  # int64: of the weights that sampled

    @classmethod
    def of(cls, actions: Actions, device: torch.device, dtype: torch.dtype) -> ActionTokens:
        """From gathered action tokens on the host."""

        def numbers(values: np.ndarray) -> Tensor:
            return torch.from_numpy(values).to(device, dtype)

        def names(values: np.ndarray) -> Tensor:
            return torch.from_numpy(values).to(device, torch.int64)

        return cls(
            numbers(actions.weights),
            numbers(actions.advantages),
            numbers(actions.sampling_logprobs),
            names(actions.trajectory),
            names(actions.turn),
            names(actions.version),
        )
