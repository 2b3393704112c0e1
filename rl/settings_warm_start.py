"""The section [warm_start]: what is imitated before the first step, and how."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from palestra.rl.settings import NotNegative, Positive, PositiveFloat, Section


class WarmStart(Section):
    """Imitation before the first step, of scripted episodes, of recorded ones, or of both; on training tasks only."""

    demonstrations: NotNegative = 0
    """Scripted episodes to play and copy; 0: none."""
    recorded: str | None = None
    """Recorded episodes to copy: a run's folder, a folder of .jsonl files, or one such file; None: none."""
    min_reward: Annotated[float, Field(allow_inf_nan=False)] = 1.0
    """Recorded episodes with a lower reward are left out."""
    keep_truncated: bool = False
    """Copy recorded episodes that a budget or a token cap ended, too."""
    max_tokens: Positive | None = None
    """Recorded episodes with more tokens than this, observations included, are left out; None: no limit."""
    per_task: Positive | None = None
    """Recorded episodes of one task at most: the best rewarded, then the earliest; None: no limit."""
    validation_episodes: NotNegative = 32
    """Episodes that are measured and not copied, whole tasks, a tenth of all at most; their loss is told each epoch."""
    epochs: Positive = 1
    """Passes over the episodes, in a new order each."""
    learning_rate: PositiveFloat = 1e-3
    """Peak, after a warm-up over a tenth of the updates; falls in a line to 0."""
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of each copied token that goes to the whole vocabulary: keeps the policy from being too sure to explore."""
    demonstrations_per_batch: Positive = 32
    """Episodes in one optimiser step."""
    train: Literal["full", "lora"] = "lora"
    """All weights (they become the base), or the adapter that is trained on afterwards."""

    @property
    def wanted(self) -> bool:
        """Whether there is anything to imitate."""
        return self.demonstrations > 0 or self.recorded is not None
