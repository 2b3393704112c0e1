"""[algorithm] as a whole: an algorithm's name decides which credit settings apply, and what is not set."""

from __future__ import annotations

from typing import Any

from pydantic import model_validator

from palestra.rl.algorithms.make import of_user, recipe
from palestra.rl.idle import idle
from palestra.rl.settings_credit import CreditSettings
from palestra.rl.settings_objective import ObjectiveSettings
from palestra.rl.settings_step import StepSettings


class AlgorithmSettings(StepSettings, ObjectiveSettings, CreditSettings):  # printed from the last to the first
    """Credit, objective, and what a step does with them; docs/algorithms/ has a page for each algorithm."""

    @model_validator(mode="before")
    @classmethod
    def _filled_in(cls, values: Any) -> Any:
        """What the algorithm reads and the user left out is filled in, so that a saved configuration says it all."""
        name = values.get("name", "rloo") if isinstance(values, dict) else None
        if not isinstance(name, str) or of_user(name):
            return values
        return recipe(name).filled_in(values)

    @model_validator(mode="after")
    def _read_by_the_algorithm(self) -> AlgorithmSettings:
        """No credit setting is given that would have no effect."""
        reads = {"name"} if of_user(self.name) else {"name", *recipe(self.name).reads}
        for setting in CreditSettings.model_fields:
            if setting not in reads and getattr(self, setting) is not None:
                own = ", ".join(sorted(reads - {"name"})) or "no credit settings"
                raise ValueError(
                    f"algorithm.{setting} is {getattr(self, setting)!r}, but {self.name} does not read it; leave it "
                    f"out ({self.name} reads {own}), or name another algorithm"
                )
        return self

    @model_validator(mode="after")
    def _read_by_the_choices(self) -> AlgorithmSettings:
        """No other setting is given that would have no effect."""
        usual = {name: field.default for name, field in AlgorithmSettings.model_fields.items()}
        if not of_user(self.name):
            usual |= recipe(self.name).filled_in({})
        for sentence in idle(dict(self), usual):
            raise ValueError(sentence)
        return self
