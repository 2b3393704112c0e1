"""Which tokens the policy was undecided at."""

from __future__ import annotations

import torch
from torch import Tensor


def most_undecided(entropy: Tensor, share: float) -> Tensor:
    """[N] bool: tokens in the `share` (above 0, to 1) of highest entropy, among the action tokens given.

    At or above the quantile 1 - share, linearly interpolated (arXiv:2506.01939). Give it all action tokens of a step:
    the quantile of a part is another one.
    """
    if not 0 < share <= 1:
        raise ValueError(f"the share is {share}; use more than 0 and at most 1, such as 0.2")
    values = entropy.detach()
    if not values.numel():
        return torch.zeros_like(values, dtype=torch.bool)
    # by hand, since torch.quantile refuses more than 16 million values
    ordered = values.sort().values
    position = (1 - share) * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    threshold = torch.lerp(ordered[below], ordered[above], position - below)
    return values >= threshold
