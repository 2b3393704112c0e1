"""What an episode leaves behind. Ids are the source of truth; text is derived from them, never the other way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from palestra.envs.types import Artefact, Message, NoVerdict, Scored, ToolResult, Verdict

Int32 = NDArray[np.int32]
Int16 = NDArray[np.int16]
Float32 = NDArray[np.float32]
Bool = NDArray[np.bool_]


class Finish(StrEnum):
    """Why an engine stopped sampling."""

    STOP = "stop"  # an end token was sampled; it is the last id of the completion
    LENGTH = "length"  # max_tokens reached; the turn is cut


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to sample one turn. No filter (top-p, top-k, penalties): the trained distribution is the sampled one."""

    max_tokens: int
    temperature: float = 1.0  # 0 is greedy; log-probabilities are then those at temperature 1
    seed: int | None = None
    stop_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """What an engine sampled.

    ids [n] int32, the end token included when it was sampled; logprobs [n] float32, natural logarithm of the
    probability under the tempered distribution that the id was drawn from; versions [n] int32, the weights that
    sampled each id.
    """

    ids: Int32
    logprobs: Float32
    finish: Finish
    versions: Int32


@dataclass(frozen=True, slots=True)
class Receipt:
    """An engine's proof of what it serves after a publish."""

    engine: str  # the replica's name
    version: int
    digest: str  # of the factors that the engine received, recomputed there
    matched_modules: int  # modules of the engine's model that the factors were bound to
    mode: Literal["adapter", "merged"]
    seconds: float


@dataclass(frozen=True, slots=True)
class Sample:
    """One token row to learn from: [L] each. A trajectory has several only when its history was rewritten.

    Index t names the token: logprobs[t] is of ids[t] given ids[:t]. On tokens that the policy did not sample in this
    row, logprobs and temperature are NaN (poison: whoever reads them is found out), version and turn are -1.
    """

    ids: Int32
    sampled: Bool
    logprobs: Float32
    temperature: Float32
    version: Int32
    turn: Int16

    def __len__(self) -> int:
        return len(self.ids)


class TerminatedBy(StrEnum):
    """The one word for why an episode ended."""

    DONE = "done"  # the policy said so
    STEPS = "steps"  # budget: decisions
    TOKENS = "tokens"  # budget: sampled tokens of the trajectory
    WALL_CLOCK = "wall_clock"  # budget: seconds of the episode
    CONTEXT = "context"  # budget: tokens of the context
    PARSE_ERRORS = "parse_errors"  # too many unreadable turns in a row
    INFRASTRUCTURE = "infrastructure"  # nobody's policy did this; see `error`


@dataclass(frozen=True, slots=True)
class Turn:
    """One decision: what was sampled, what came of it, and how long each part took (seconds)."""

    index: int
    sample: int  # which Sample of the trajectory holds its tokens
    prompt_tokens: int
    sampled_tokens: int
    finish: Finish
    text: str
    results: tuple[ToolResult, ...]
    observation_tokens: int
    generate_s: float
    step_s: float
    reward: float = 0.0
    """What the environment gave for this turn alone; the verdict is not in it."""
    state: str | None = None
    """Digest of the world in which the turn was taken, before its action. None: not asked for, or not known."""


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One episode, complete, whatever ended it."""

    id: str
    task_id: str
    group_id: str
    seed: int
    messages: tuple[Message, ...]  # text, for people; derived from the ids
    turns: tuple[Turn, ...]
    samples: tuple[Sample, ...]
    terminated_by: TerminatedBy
    verdict: Verdict
    error: str | None = None  # the first cause, when infrastructure failed
    seconds: float = 0.0
    facts: Mapping[str, str | int | float] = field(default_factory=dict)  # sandbox, engine, retries: for the record
    artefact: Artefact | None = None  # what was judged, until it is kept: `rollout/artefacts.py`

    @property
    def reward(self) -> float | None:
        """The outcome. None: not scored, so it is in no statistic and no loss."""
        return self.verdict.value if isinstance(self.verdict, Scored) else None

    @property
    def valid(self) -> bool:
        """Whether it counts: judged, and ended by the policy or its budgets."""
        return isinstance(self.verdict, Scored)

    @property
    def truncated(self) -> bool:
        """A turn was cut by a token cap, or a budget ended the episode."""
        return self.terminated_by not in (TerminatedBy.DONE, TerminatedBy.INFRASTRUCTURE) or any(
            turn.finish is Finish.LENGTH for turn in self.turns
        )

    @property
    def sampled_tokens(self) -> int:
        """Tokens that the policy sampled; observation and template tokens are not its doing."""
        return sum(int(sample.sampled.sum()) for sample in self.samples)


@dataclass(frozen=True, slots=True)
class Group:
    """The trajectories of one task, comparable with each other: the unit of credit."""

    id: str
    task_id: str
    trajectories: tuple[Trajectory, ...]


__all__ = [
    "Bool",
    "Completion",
    "Finish",
    "Float32",
    "Group",
    "Int16",
    "Int32",
    "NoVerdict",
    "Receipt",
    "Sample",
    "Sampling",
    "Scored",
    "TerminatedBy",
    "Trajectory",
    "Turn",
]
