"""Recorded episodes to imitate: which of a record are copied, and what became of the others.

An episode of a held-out task is never copied, whatever the settings say.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from palestra.envs.environment import Taskset
from palestra.envs.errors import ConfigError
from palestra.rl.config import Config
from palestra.rl.model import resolve_model
from palestra.rl.records import read_records, record_files
from palestra.rl.same_tokenizer import Reader, check_recorder
from palestra.rl.settings_warm_start import WarmStart
from palestra.rollout.types import Trajectory

HELD_OUT = "of held-out tasks"


@dataclass(frozen=True, slots=True)
class Chosen:
    """Episodes to copy, in the order of the record. `left_out` counts the others by reason: {"truncated": 4}"""

    episodes: tuple[Trajectory, ...]
    read: int
    left_out: Mapping[str, int]

    def counts(self) -> dict[str, object]:
        """The same as plain data."""
        return {"read": self.read, "used": len(self.episodes), "left_out": dict(self.left_out)}

    def words(self) -> str:
        """One line: how many were read and used, and why the others were not."""
        reasons = ", ".join(f"{count} {reason}" for reason, count in self.left_out.items())
        return f"{self.read} recorded episodes read, {len(self.episodes)} used; left out: {reasons or 'none'}"


def choose(config: Config, taskset: Taskset) -> Chosen:
    """The recorded episodes that `config.warm_start` asks for. Reads everything that it can be wrong about.

    Raises ConfigError for records that are damaged, of another model or environment, or none of which can be copied.
    """
    settings = config.warm_start
    assert settings.recorded is not None
    place = Path(settings.recorded).expanduser()
    files = record_files(place)
    folder = resolve_model(config.model.path)
    check_recorder(place, config, folder)
    reader = Reader.of(config, folder)
    chooser = _Chooser(settings, held_out_ids(taskset), reader.context_tokens)
    for where, trajectory in read_records(files):
        reader.check(trajectory, where)
        chooser.offer(trajectory)
    chosen = chooser.chosen()
    if not chosen.episodes:
        raise ConfigError(
            f"warm_start.recorded: nothing in {place} can be copied: {chosen.words()}. Record more, or loosen "
            "warm_start.min_reward, keep_truncated or max_tokens"
        )
    return chosen


@dataclass(slots=True)
class _Chooser:
    """Filters one episode after the other, and keeps no more than it may use."""

    settings: WarmStart
    held_out: frozenset[str]
    context_tokens: int | None
    read: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    seen: set[bytes] = field(default_factory=set)
    by_task: dict[str, list[tuple[int, Trajectory]]] = field(default_factory=dict)

    def offer(self, trajectory: Trajectory) -> None:
        """Take it or count why not."""
        self.read += 1
        reason = self._objection(trajectory)
        if reason is not None:
            self.left_out[reason] += 1
            return
        self.seen.add(_fingerprint(trajectory))
        kept = self.by_task.setdefault(trajectory.task_id, [])
        kept.append((self.read, trajectory))
        most = self.settings.per_task
        if most is not None and len(kept) > most:
            kept.sort(key=lambda numbered: (-_reward(numbered[1]), numbered[0]))
            kept.pop()
            self.left_out[f"beyond {most} of a task"] += 1

    def chosen(self) -> Chosen:
        """All that was taken, in the order in which it was offered."""
        numbered = sorted((one for kept in self.by_task.values() for one in kept), key=lambda one: one[0])
        return Chosen(tuple(trajectory for _, trajectory in numbered), self.read, dict(self.left_out))

    def _objection(self, trajectory: Trajectory) -> str | None:
        """Why an episode is not to be copied; None when it is. The first reason counts."""
        settings, tokens = self.settings, sum(len(sample) for sample in trajectory.samples)
        longest = max((len(sample) for sample in trajectory.samples), default=0)
        if trajectory.task_id in self.held_out:
            return HELD_OUT
        if not trajectory.valid:
            return "without a verdict"
        if _reward(trajectory) < settings.min_reward:
            return f"with a reward below {settings.min_reward:g}"
        if trajectory.truncated and not settings.keep_truncated:
            return "truncated"
        if settings.max_tokens is not None and tokens > settings.max_tokens:
            return f"longer than {settings.max_tokens} tokens"
        if self.context_tokens is not None and longest > self.context_tokens:
            return f"with a row longer than the model's {self.context_tokens} tokens"
        if not trajectory.sampled_tokens:
            return "without a sampled token"
        if _fingerprint(trajectory) in self.seen:
            return "equal to another"
        return None


def held_out_ids(taskset: Taskset) -> frozenset[str]:
    """The ids of all tasks that nothing may be learned from."""
    tasks = taskset.split("test")
    return frozenset(tasks[index].id for index in range(len(tasks)))


def _reward(trajectory: Trajectory) -> float:
    assert trajectory.reward is not None
    return trajectory.reward


def _fingerprint(trajectory: Trajectory) -> bytes:
    """Of the ids and of which of them were sampled: two episodes that agree teach the same."""
    sha = hashlib.sha256()
    for sample in trajectory.samples:
        sha.update(len(sample).to_bytes(8, "little") + sample.ids.tobytes() + sample.sampled.tobytes())
    return sha.digest()
