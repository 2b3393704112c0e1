"""DPPO (arXiv:2602.04879): a trust region in probability, not in its ratio.

A token is dropped where its probability has moved by more than 0.2 in the direction of its advantage. A rare token may
so grow manifold before it is dropped, a likely one may not move far. The ratio is to the policy that sampled (mode
bypass), which is what the region is around. Differs from the paper: leave-one-out credit, and a cap on the ratio that
only limits the weight of single tokens.
"""

from __future__ import annotations

from palestra.rl.algorithms.recipes import Recipe
from palestra.rl.algorithms.rloo import RLOO

DPPO = Recipe(
    RLOO,
    {"surrogate": "dppo_tv", "mode": "bypass", "correction": "none"},
)
