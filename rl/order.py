"""The endless order in which tasks are played: every task once per epoch, in a new order each epoch.

Nothing is stored: the order is a keyed permutation, so a taskset may be as long as it likes and any place of any epoch
is known at once, also after a resume.
"""

from __future__ import annotations

from dataclasses import dataclass

from palestra.rollout.seeds import derive_seed

ROUNDS = 4


@dataclass(frozen=True, slots=True)
class TaskOrder:
    """Position -> task index, from the seed alone. O(1) time and memory."""

    num_tasks: int
    seed: int

    def index(self, position: int) -> int:
        """The task at a position. Position 1024 of 1000 tasks is the 25th of the second epoch."""
        epoch, place = divmod(position, self.num_tasks)
        half = max(1, ((self.num_tasks - 1).bit_length() + 1) // 2)
        place = self._permuted(place, epoch, half)
        while place >= self.num_tasks:  # walk the cycle back into the range; fewer than four steps on average
            place = self._permuted(place, epoch, half)
        return place

    def _permuted(self, place: int, epoch: int, half: int) -> int:
        """A Feistel network on 2 * half bits: a bijection whatever its round function is."""
        mask = (1 << half) - 1
        left, right = place >> half, place & mask
        for number in range(ROUNDS):
            left, right = right, left ^ (derive_seed(self.seed, "order", epoch, number, right) & mask)
        return (left << half) | right
