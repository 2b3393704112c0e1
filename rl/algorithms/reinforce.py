"""REINFORCE (Williams 1992) with a leave-one-out baseline: the policy gradient itself.

Nothing is clipped, token losses are summed and trajectories averaged. On-policy its expectation is exactly the gradient
of the expected outcome, which no other choice here is. It is what to compare others with, and what to debug with; its
scale grows with the length of trajectories, so the learning rate has to be found again.
"""

from __future__ import annotations

from palestra.rl.algorithms.recipes import Recipe
from palestra.rl.algorithms.rloo import RLOO

REINFORCE = Recipe(
    RLOO,
    {"surrogate": "reinforce", "aggregation": "seq-mean-token-sum"},
)
