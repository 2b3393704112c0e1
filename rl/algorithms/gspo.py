"""GSPO (arXiv:2507.18071): GRPO's credit, and one ratio per trajectory.

The ratio is the geometric mean over the sampled tokens of a trajectory, so its bounds are much closer to 1 than a
token's: 3e-4 and 4e-4. Its division by the length is inside the ratio, which is why losses are averaged per trajectory.
Differs from the paper: the token form, which has the same values and gradients for credit that is the same on all
tokens, and keeps the sign of each turn where it is not.
"""

from __future__ import annotations

from palestra.rl.algorithms.grpo import GRPO
from palestra.rl.algorithms.recipes import Recipe

GSPO = Recipe(
    GRPO,
    {
        "ratio": "sequence",
        "clip_low": 3e-4,
        "clip_high": 4e-4,
        "dual_clip": None,
        "aggregation": "traj-mean-token-mean",
    },
)
