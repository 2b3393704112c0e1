"""The part of [algorithm] that says what a step does around credit and objective."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from palestra.rl.settings import NotNegative, Positive, Section

Cost = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class StepSettings(Section):
    """Which groups are used, what is taken off their rewards, and how many updates they serve. docs/training.md."""

    dynamic_sampling: bool = False
    """Drop groups whose episodes all had the same outcome and turn rewards, and play others in their place (DAPO)."""
    max_refills: NotNegative = 64
    """Groups that one step may play in place of others, with dynamic_sampling."""
    when_uninformative: Literal["train_fewer", "fail"] = "train_fewer"
    """What a step does when max_refills is spent: learn from the groups that it has, or stop the run."""
    overlong_tokens: Positive | None = None
    """Sampled tokens of an episode from which on its reward is lowered by 1 (DAPO); None: length costs nothing."""
    overlong_cache: NotNegative = 0
    """Tokens before overlong_tokens over which the reward falls in a line."""
    step_cost: Cost = 0.0
    """Taken off the reward for each decision."""
    token_cost: Cost = 0.0
    """Taken off the reward for each sampled token."""
    updates_per_batch: Positive = 1
    """Parts of whole groups that a batch is dealt into, with an optimiser step for each."""
    epochs: Positive = 1
    """Times that a batch is learned from."""
