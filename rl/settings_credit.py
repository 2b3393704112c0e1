"""The part of [algorithm] that says how outcomes become credit.

A setting that is left out takes the default of the algorithm, which is on its page and in the resolved configuration.
One that the algorithm does not read is refused.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from palestra.rl.settings import Positive, PositiveFloat, Section, Share

Eps = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Discount = Annotated[float, Field(gt=0, le=1)]
Weight = Annotated[float, Field(allow_inf_nan=False)]


class CreditSettings(Section):
    """Who is credited with what."""

    name: str = "rloo"
    """An algorithm of docs/algorithms, or a function of your own: "my_project.credit:make"."""
    std: Literal["group", "batch", "none"] | None = None
    """What advantages are divided by: the spread of their group, of all rewards of the step, or nothing."""
    ddof: Literal[0, 1] | None = None
    """Degrees of freedom taken off in variances: 1 (of a sample) or 0 (of a population)."""
    eps: Eps | None = None
    """Keeps divisors away from 0: added to a standard deviation; of whitening, see eps_form."""
    eps_form: Literal["add", "floor"] | None = None
    """Of whitening: divide by sqrt(variance + eps), or by sqrt(max(variance, eps))."""
    gamma: Discount | None = None
    """Discount of rewards to come: per token that the policy samples, or per turn where an algorithm looks at turns."""
    objectives: dict[str, Weight] | None = None
    """Parts of a verdict to learn from, with their weights: { correct = 1.0, brief = 0.5 }."""
    turn_baseline: Literal["leave_one_out", "mean"] | None = None
    """What a turn's return is compared with: the mean of the other episodes, or of all, the own one among them."""
    outcome_weight: Weight | None = None
    """Of "outcome_turn": the outcome's share in turns that are credited with their own reward as well."""
    credited_turns: Positive | None = None
    """Of "outcome_turn": how many first turns are credited with their own reward."""
    step_weight: Weight | None = None
    """Of "gigpo": weight of the comparison of turns taken in equal states."""
    lam: Share | None = None
    """lambda of GAE: 0 trusts the critic one action ahead, 1 what was earned. "vapo" without it is length-adaptive."""
    alpha: PositiveFloat | None = None
    """Of "vapo": lambda is 1 - 1 / (alpha * sampled tokens of the episode)."""
    discount_per: Literal["token", "turn"] | None = None
    """Of "ppo" and "vapo": what gamma counts."""
    bootstrap: Literal["budgets", "none"] | None = None
    """With a critic: whether an episode that a budget ended goes on with the value of its last state."""
    value_learning_rate: PositiveFloat | None = None
    """Of the value head alone; follows the optimizer's schedule."""
    value_coefficient: PositiveFloat | None = None
    """Weight of the value loss. Acts with value_trunk_gradient, or where the head's gradient is clipped: elsewhere Adam
    takes the scale out again, and value_learning_rate is what counts."""
    value_clip: Eps | None = None
    """How far a value may move from what it was when the batch was frozen before it stops being pulled; 0: any."""
    value_trunk_gradient: bool | None = None
    """Train the policy's body for the value loss as well."""
