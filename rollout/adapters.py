"""What is published, as it travels: raw LoRA factors per module with their scale, or whole weights where all are
trained, and a digest that both ends recompute."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from palestra.rollout.types import Float32


@dataclass(frozen=True, slots=True)
class Factors:
    """The update of one linear layer: W + scale * b @ a, with a [rank, in] and b [out, rank], both float32.

    `scale` is sent (alpha / rank, or alpha / sqrt(rank)), so that no receiver recomputes it.
    """

    a: Float32
    b: Float32
    scale: float


@dataclass(frozen=True, slots=True)
class Adapter:
    """Every layer's factors, by the module's name in the base model ("model.layers.0.self_attn.q_proj")."""

    factors: Mapping[str, Factors]
    weights: Mapping[str, Float32] = field(default_factory=dict)
    """In place of the base's, by the parameter's name in the base model ("model.norm.weight"): of full training."""

    @property
    def num_parts(self) -> int:
        """Modules that an engine binds: each that has factors, and each whole weight."""
        return len(self.factors) + len(self.weights)

    @property
    def num_bytes(self) -> int:
        """Bytes of all factors and weights."""
        arrays = [array for factors in self.factors.values() for array in (factors.a, factors.b)]
        return sum(array.nbytes for array in [*arrays, *self.weights.values()])

    def digest(self) -> str:
        """SHA-256 over names, shapes, scales and bytes, in the order of names. O(bytes)."""
        sha = hashlib.sha256()
        for name in sorted(self.factors):
            factors = self.factors[name]
            for part in (factors.a, factors.b):
                sha.update(f"{name}{part.shape}{factors.scale!r}".encode())
                sha.update(np.ascontiguousarray(part, dtype=np.float32).data)
        for name in sorted(self.weights):
            sha.update(f"{name}{self.weights[name].shape}".encode())
            sha.update(np.ascontiguousarray(self.weights[name], dtype=np.float32).data)
        return sha.hexdigest()
