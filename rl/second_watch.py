"""Watching the distance between the verifier that pays and a second one that only looks."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from palestra.envs.errors import IntegrityError

log = logging.getLogger(__name__)


@dataclass(slots=True)
class SecondWatch:
    """`limit`: how much more the first may pay on average in a step, None: there is no second; `patience`: steps in a
    row beyond it after which the run stops."""

    limit: float | None = None
    patience: int = 3
    beyond: int = 0

    def note(self, gap: float | None) -> None:
        """Take in the gap of a step, None where no episode was judged twice. Raises IntegrityError beyond the limit for
        too long: a policy that has learned to please one judge only must not learn more of it."""
        if self.limit is None or gap is None:
            return
        self.beyond = 0 if gap <= self.limit else self.beyond + 1
        if self.beyond >= self.patience:
            raise IntegrityError(
                f"for {self.beyond} steps in a row the verifier paid more than the second one, the last time by "
                f"{gap:.3g} on average; environment.second_verifier.alarm_gap allows {self.limit:g}. Read episodes on "
                "which they differ (facts.second_reward in the records) before going on"
            )
        if self.beyond:
            log.warning("the verifier paid %.3g more than the second one; the alarm is at %g", gap, self.limit)
