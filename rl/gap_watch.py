"""Watching the engine's and the trainer's log-probabilities of what was sampled, where both mean the same weights.

The probe after a publish looks at a few fixed rows; this looks at every token of the step, through whatever the engine
did with it: its batches, its caches, its prefixes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from palestra.envs.errors import IntegrityError
from palestra.rl.learner import UpdateStats
from palestra.rl.summary import Summary


@dataclass(slots=True)
class GapWatch:
    """`on_policy`: tokens were sampled by the weights that score them. `limit`: of the mean |trainer - engine| of a
    step, None: only noted; `patience`: steps in a row beyond it after which the run stops."""

    on_policy: bool
    limit: float | None = None
    patience: int = 3
    beyond: int = 0

    def note(self, updates: Sequence[UpdateStats], summary: Summary) -> None:
        """Take in the updates of a step that measured it. Raises IntegrityError beyond the limit for too long."""
        if not self.on_policy or not updates:
            return
        for stats in updates:
            summary.sampled_gap(
                stats.metrics["log_rho_abs_mean"], stats.metrics["log_rho_abs_max"], stats.action_tokens
            )
        gaps = [stats.metrics["log_rho_abs_mean"] for stats in updates]
        gap = float(np.average(gaps, weights=[stats.action_tokens for stats in updates]))
        if self.limit is None:
            return
        self.beyond = 0 if gap <= self.limit else self.beyond + 1
        if self.beyond >= self.patience:
            raise IntegrityError(
                f"for {self.beyond} steps in a row engine and trainer differ in the log-probabilities of what was "
                f"sampled, the last time by {gap:.3g} on average; rollout.max_sampled_gap allows {self.limit:g}. Look "
                "at the engine's precision, its caches and its filters, or raise the limit"
            )
