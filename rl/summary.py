"""summary.json: what a run came to, in plain values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from palestra.rl.evaluation import Report, discarded_tokens
from palestra.rl.publish import Proof
from palestra.rollout.types import Group

COUNTED = (
    "episodes",
    "invalid_episodes",
    "policy_tokens",
    "discarded_tokens",
    "steps_without_signal",
    "engine_replacements",
    "request_retries",
    "gap_sum",
    "gap_count",
)
"""Added up over the lives of a run."""
LARGEST = ("gap_max", "probe_gap_before")
"""The largest of all lives."""


@dataclass(slots=True)
class Summary:
    """Figures that a run gathers; written at the end, whatever the end was."""

    engine: str
    sandbox: str
    seed: int
    sandbox_reason: str = ""  # why boxes are of this kind, and what is not enforced there
    success_before: Report | None = None
    success_after: Report | None = None
    steps: int = 0
    steps_without_signal: int = 0
    wall_s: float = 0.0
    warm_start_s: float = 0.0
    first_token_s: float | None = None
    policy_tokens: int = 0
    discarded_tokens: int = 0  # sampled in tries of an episode that a machine's failure ended; in no record
    episodes: int = 0
    invalid_episodes: int = 0
    weight_version: int = 0
    proofs: Sequence[Proof] = ()
    probe_gap_before: float = 0.0  # the largest of what earlier lives proved
    gap_sum: float = 0.0
    gap_count: int = 0
    gap_max: float = 0.0
    leaked_sandboxes: int = 0
    engine_replacements: int = 0
    request_retries: int = 0
    exit: str = "failed"
    totals: dict[str, int] = field(default_factory=dict)

    def counts(self) -> dict[str, float]:
        """What is counted up to a checkpoint, for the life that goes on from it."""
        told = {name: getattr(self, name) for name in (*COUNTED, *LARGEST)}
        return told | {"probe_gap_before": self._probe_gap()}

    def go_on_from(self, counts: Mapping[str, object]) -> None:
        """Take in what was counted up to the checkpoint of an earlier life."""
        for name in (*COUNTED, *LARGEST):
            before, here = counts.get(name, 0), getattr(self, name)
            assert isinstance(before, int | float), name
            setattr(self, name, max(here, before) if name in LARGEST else here + before)

    def count(self, groups: Sequence[Group]) -> None:
        """Add the episodes of a step, those of dropped groups included."""
        episodes = [t for group in groups for t in group.trajectories]
        self.episodes += len(episodes)
        self.invalid_episodes += sum(not t.valid for t in episodes)
        self.policy_tokens += sum(t.sampled_tokens for t in episodes)
        self.discarded_tokens += discarded_tokens(episodes)

    def sampled_gap(self, mean: float, largest: float, tokens: int) -> None:
        """Add |trainer - engine| of a step's sampled tokens, all of the weights that the trainer has."""
        self.gap_sum += mean * tokens
        self.gap_count += tokens
        self.gap_max = max(self.gap_max, largest)

    def _probe_gap(self) -> float:
        return max([self.probe_gap_before, *(proof.gap for proof in self.proofs)])

    def as_dict(self) -> dict[str, Any]:
        """The keys of summary.json."""
        gap = {"mean": self.gap_sum / self.gap_count, "max": self.gap_max} if self.gap_count else None
        return {
            "exit": self.exit,
            "success_before": _success(self.success_before),
            "success_after": _success(self.success_after),
            "steps": self.steps,
            "steps_without_signal": self.steps_without_signal,
            "wall_s": round(self.wall_s, 1),
            "warm_start_s": round(self.warm_start_s, 1),
            "first_token_s": None if self.first_token_s is None else round(self.first_token_s, 1),
            "policy_tokens": self.policy_tokens,
            "discarded_tokens": self.discarded_tokens,
            "episodes": self.episodes,
            "invalid_episodes": self.invalid_episodes,
            "engine": self.engine,
            "sandbox": self.sandbox,
            "sandbox_reason": self.sandbox_reason,
            "sync_mode": self.proofs[-1].mode if self.proofs else None,
            "seed": self.seed,
            "weight_versions": self.weight_version + 1,
            "max_logprob_gap": self._probe_gap() if self.proofs or self.probe_gap_before else None,
            "sampled_logprob_gap": gap,
            "leaked_sandboxes": self.leaked_sandboxes,
            "engine_replacements": self.engine_replacements,
            "request_retries": self.request_retries,
            **self.totals,
        }


def _success(report: Report | None) -> dict[str, Any] | None:
    if report is None:
        return None
    valid = None if report.success_valid is None else report.success_valid.mean
    return report.success.as_dict() | {
        "valid_mean": valid,
        "validity": report.validity,
        "temperature": report.temperature,
    }
