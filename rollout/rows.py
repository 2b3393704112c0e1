"""Building a token row while an episode is played: appended to, never edited."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from palestra.rollout.types import Completion, Sample


class Row:
    """The ids of one row so far, and which of them the policy sampled. Freezes into a Sample."""

    def __init__(self, context: Sequence[int]) -> None:
        self.ids: list[int] = list(context)
        self._turns: list[tuple[int, int, float, Completion]] = []  # (start, turn, temperature, completion)

    def __len__(self) -> int:
        return len(self.ids)

    def sampled(self, completion: Completion, turn: int, temperature: float) -> None:
        """Append what the policy sampled in one turn."""
        self._turns.append((len(self.ids), turn, temperature, completion))
        self.ids.extend(completion.ids.tolist())

    def context(self, ids: Sequence[int]) -> None:
        """Append what the policy did not sample."""
        self.ids.extend(ids)

    def freeze(self) -> Sample:
        """The row as arrays of one length. Poison stands wherever the policy sampled nothing."""
        length = len(self.ids)
        sampled = np.zeros(length, np.bool_)
        logprobs = np.full(length, np.nan, np.float32)
        temperatures = np.full(length, np.nan, np.float32)
        versions = np.full(length, -1, np.int32)
        turns = np.full(length, -1, np.int16)
        for start, turn, temperature, completion in self._turns:
            span = slice(start, start + len(completion.ids))
            sampled[span] = True
            logprobs[span] = completion.logprobs
            # greedy decoding reports the log-probabilities at temperature 1
            temperatures[span] = temperature or 1.0
            versions[span] = completion.versions
            turns[span] = turn
        return Sample(np.asarray(self.ids, np.int32), sampled, logprobs, temperatures, versions, turns)
