"""What a name in `algorithm.name` stands for: a way to share out credit, and the objective settings of its paper.

An algorithm is a frozen dataclass. Its fields beside `objective` are the credit settings that it reads, under their
names, and the fields' defaults are the settings' defaults: nothing about them is written down twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

from palestra.rl.algorithms.base import Algorithm
from palestra.rl.objective import Objective


@dataclass(frozen=True, slots=True)
class Recipe:
    """Recipe(GRPO, {"clip_low": 0.2}): GRPO, and this clip bound where the user set none."""

    algorithm: Callable[..., Algorithm]
    presets: Mapping[str, object] = field(default_factory=dict)
    """Values of settings in [algorithm] that hold where the user gave none."""
    of_surrogate: Mapping[str, object] = field(default_factory=dict)
    """More of them, which fall away where the user chose another surrogate: no other surrogate reads them."""

    @property
    def reads(self) -> Mapping[str, object]:
        """The credit settings that the algorithm reads, with their defaults."""
        return {
            f.name: f.default if f.default_factory is MISSING else f.default_factory()
            for f in fields(self.algorithm)  # type: ignore[arg-type]  # a dataclass, by the contract above
            if f.name != "objective"
        }

    def filled_in(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The settings that were given, and this recipe's values for those that were not."""
        own = self.presets.get("surrogate")
        fitting = self.of_surrogate if given.get("surrogate", own) == own else {}
        return {**self.presets, **fitting, **self.reads, **given}

    def make(self, objective: Objective, settings: Mapping[str, Any]) -> Algorithm:
        """The algorithm; `settings` has a value for everything that it reads, and may have more."""
        return self.algorithm(objective, **{name: settings[name] for name in self.reads})
