"""DAPO (arXiv:2503.14476): GRPO's credit, clip-higher, token-mean, dynamic sampling, no KL.

Its fourth part, the soft overlong punishment, needs lengths of your own: `overlong_tokens` and `overlong_cache` (the
paper: 20480 and 4096). Differs from the paper: the cap on tokens that the paper has by its response length is
`environment.budgets.tokens` of the whole episode, lengths are of sampled tokens, and refills are capped.
"""

from __future__ import annotations

from palestra.rl.algorithms.grpo import GRPO
from palestra.rl.algorithms.recipes import Recipe

DAPO = Recipe(
    GRPO,
    {
        "clip_low": 0.2,
        "clip_high": 0.28,
        "dual_clip": None,
        "aggregation": "token-mean",
        "dynamic_sampling": True,
    },
)
