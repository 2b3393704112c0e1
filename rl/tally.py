"""What is counted during an update, summed over micro-batches and ranks, and turned into metrics at the end."""

from __future__ import annotations

import torch

from palestra.rl.objective import Terms
from palestra.rl.ranks import Ranks


class Tally:
    """Sums and extremes of the terms of an update's micro-batches."""

    def __init__(self, empty: Terms) -> None:
        """`empty`: the terms of no tokens, so that a rank without rows counts under the same names."""
        self._loss = empty.loss.detach().double()
        self._sums = {name: value.double() for name, value in empty.sums.items()}
        self._maxima = {name: value.double() for name, value in empty.maxima.items()}
        self._minima = {name: value.double() for name, value in empty.minima.items()}

    def add(self, terms: Terms) -> None:
        """Count a micro-batch."""
        self._loss = self._loss + terms.loss.detach()
        for name, value in terms.sums.items():
            self._sums[name] = self._sums[name] + value
        for name, value in terms.maxima.items():
            self._maxima[name] = torch.maximum(self._maxima[name], value.double())
        for name, value in terms.minima.items():
            self._minima[name] = torch.minimum(self._minima[name], value.double())

    def metrics(self, num_actions: int, ranks: Ranks) -> dict[str, float]:
        """Means per action token of the step (`num_actions`, all ranks), extremes, and the loss."""
        summed = ranks.sum(torch.stack([self._loss, *self._sums.values()])).tolist()
        sums = dict(zip(self._sums, summed[1:], strict=True))
        result = {"loss": summed[0]}
        if self._maxima:
            extremes = torch.stack([*self._maxima.values(), *(-value for value in self._minima.values())])
            found = ranks.max(extremes).tolist()
            result |= dict(zip(self._maxima, found[: len(self._maxima)], strict=True))
            result |= {name: -value for name, value in zip(self._minima, found[len(self._maxima) :], strict=True)}
        result |= _effective_sizes(sums, num_actions)
        return result | {_MEAN_NAMES.get(name, f"{name}_mean"): total / num_actions for name, total in sums.items()}


def _effective_sizes(sums: dict[str, float], num_actions: int) -> dict[str, float]:
    """How many tokens' and trajectories' worth of gradient is left after weighting, as shares. Takes what it uses."""
    if "correction_squared" not in sums:
        return {}
    squared = sums.pop("correction_squared")
    trajectories, of_trajectories, squared_of_trajectories = (
        sums.pop(name) for name in ("trajectories", "trajectory_correction", "trajectory_correction_squared")
    )
    return {
        "ess_fraction": _share(sums["correction"], num_actions, squared),
        "ess_fraction_trajectories": _share(of_trajectories, trajectories, squared_of_trajectories),
    }


def _share(total: float, count: float, squared: float) -> float:
    return total**2 / (count * squared) if squared else 0.0


_MEAN_NAMES = {
    "clip_high": "clip_high_fraction",
    "clip_low": "clip_low_fraction",
    "dual_clip": "dual_clip_fraction",
    "modified": "modified_fraction",
    "rejected": "rejected_fraction",
    "kl_old_new_k1": "kl_old_new_k1",
    "kl_old_new_k3": "kl_old_new_k3",
    "mismatch_kl": "mismatch_kl",
    "mismatch_kl_k1": "mismatch_kl_k1",
    "kl_to_reference": "kl_to_reference",
    "entropy": "entropy",
}
