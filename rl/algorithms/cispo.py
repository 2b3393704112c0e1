"""CISPO (MiniMax-M1, arXiv:2506.13585): GRPO's credit; the ratio is capped and detached, so every token has a gradient.

The cap is on the ratio itself, 5 here, as in the runs that used the method at scale (4 to 8, arXiv:2510.13786); a
number like 0.28, a distance from 1 elsewhere, would be a cap of 0.28. Differs from the paper: token losses are averaged
over the whole step, not within each group.
"""

from __future__ import annotations

from palestra.rl.algorithms.grpo import GRPO
from palestra.rl.algorithms.recipes import Recipe

CISPO = Recipe(
    GRPO,
    {"surrogate": "cispo_upper", "aggregation": "token-mean"},
    of_surrogate={"cispo_max_ratio": 5.0},
)
