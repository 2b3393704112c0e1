"""A policy so small that the expected gradient of any algorithm is a finite sum, taken over every possible step.

The first decision is left or right; left ends with 0.5, right is followed by an observation and a second decision,
which ends with 1 or 0. Two softmaxes of two logits each, so the gradient has four numbers; those of a softmax sum to
zero, so two of them say it all. Credit, packing and weights are the project's own; only probabilities are enumerated.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from learning_support import golden, sample, trajectory
from palestra.rl.aggregation import Aggregation
from palestra.rl.algorithms.base import Algorithm
from palestra.rl.algorithms.make import KNOWN
from palestra.rl.batch import Batch, pack
from palestra.rl.objective import Objective
from palestra.rollout.types import Finish, Group, Sample, Turn

PROMPT, LEFT, RIGHT, SEEN, GOOD, BAD = range(6)
OUTCOMES = ((LEFT,), (RIGHT, GOOD), (RIGHT, BAD))
REWARDS = (0.5, 1.0, 0.0)
MODES = (
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
    "token-mean",
    "prompt-mean-token-mean",
    "traj-mean-token-mean",
    "seq-mean-token-mean",
)


def softmax(logits: Sequence[float]) -> np.ndarray:
    powers = np.exp(np.asarray(logits) - max(logits))
    return powers / powers.sum()


def turn(index: int) -> Turn:
    """A decision of one token; the second is always taken in the same state."""
    return Turn(index, 0, 1, 1, Finish.STOP, "", (), 1 - index, 0.0, 0.0, state=f"after {index}")


@dataclass(frozen=True)
class TinyPolicy:
    """Logits of the first and of the second decision, and what the outcomes are worth."""

    theta: tuple[float, float]
    phi: tuple[float, float]
    rewards: tuple[float, ...] = REWARDS

    def probabilities(self) -> np.ndarray:
        """[3] of the outcomes."""
        first, second = softmax(self.theta), softmax(self.phi)
        return np.array([first[0], first[1] * second[0], first[1] * second[1]])

    def score(self, token: int) -> np.ndarray:
        """[4]: the gradient of the token's log-probability."""
        first, second = softmax(self.theta), softmax(self.phi)
        if token in (LEFT, RIGHT):
            return np.concatenate([np.eye(2)[token - LEFT] - first, np.zeros(2)])
        return np.concatenate([np.zeros(2), np.eye(2)[token - GOOD] - second])

    def logprob(self, token: int) -> float:
        logits, which = (self.theta, token - LEFT) if token in (LEFT, RIGHT) else (self.phi, token - GOOD)
        return float(np.log(softmax(logits)[which]))

    def gradient(self) -> np.ndarray:
        """[4] of the expected reward, by the definition."""
        return sum(
            p * r * sum(self.score(token) for token in outcome)
            for p, r, outcome in zip(self.probabilities(), self.rewards, OUTCOMES, strict=True)
        )

    def row(self, outcome: int) -> Sample:
        """The outcome as a row: the second decision stands behind an observation."""
        if outcome == 0:
            return sample([PROMPT, LEFT], [0, 1], logprobs=[0.0, self.logprob(LEFT)])
        second = OUTCOMES[outcome][1]
        logprobs = [0.0, self.logprob(RIGHT), 0.0, self.logprob(second)]
        return sample([PROMPT, RIGHT, SEEN, second], [0, 1, 0, 1], logprobs=logprobs, turn=[0, 0, 0, 1])

    def group(self, name: str, outcomes: Sequence[int]) -> Group:
        made = [trajectory(f"{name}{i}", [self.row(o)], self.rewards[o]) for i, o in enumerate(outcomes)]
        turns = [tuple(turn(k) for k in range(len(OUTCOMES[o]))) for o in outcomes]
        return Group(name, "task", tuple(replace(t, turns=its) for t, its in zip(made, turns, strict=True)))


def golden_policy() -> TinyPolicy:
    """The one of the golden cases."""
    inputs = golden("oracles")["oracle/off_policy_weights"]["inputs"]
    return TinyPolicy(tuple(inputs["theta"]), tuple(inputs["phi"]))


def possible_groups(policy: TinyPolicy, size: int) -> Iterator[tuple[float, tuple[int, ...]]]:
    """Every group up to order, with its probability."""
    probabilities = policy.probabilities()
    for outcomes in itertools.combinations_with_replacement(range(len(OUTCOMES)), size):
        counts = Counter(outcomes)
        ways = math.factorial(size) / math.prod(math.factorial(n) for n in counts.values())
        yield ways * float(np.prod([probabilities[o] for o in outcomes])), outcomes


def possible_steps(policy: TinyPolicy, groups: int, size: int) -> Iterator[tuple[float, list[Group]]]:
    """Every step of so many groups up to order, with its probability."""
    kinds = list(possible_groups(policy, size))
    for picked in itertools.combinations_with_replacement(range(len(kinds)), groups):
        ways = math.factorial(groups) / math.prod(math.factorial(n) for n in Counter(picked).values())
        made = [policy.group(f"g{i}", kinds[kind][1]) for i, kind in enumerate(picked)]
        yield ways * math.prod(kinds[kind][0] for kind in picked), made


def batch_of(algorithm: Algorithm, groups: Sequence[Group]) -> Batch:
    return pack(groups, algorithm.credit(groups), 1000, algorithm.objective)


def direction(policy: TinyPolicy, algorithm: Algorithm, groups: Sequence[Group]) -> np.ndarray:
    """[4]: what one on-policy step adds to the logits, for a surrogate whose gradient is -A grad log pi at ratio 1."""
    actions = batch_of(algorithm, groups).actions()
    scores = [policy.score(int(token)) for token in actions.targets]
    return sum(
        (w * a * s for w, a, s in zip(actions.weights, actions.advantages, scores, strict=True)), start=np.zeros(4)
    )


def moments(policy: TinyPolicy, algorithm: Algorithm, groups: int, size: int) -> tuple[np.ndarray, float]:
    """[4] and a number: the expectation of `direction` over every possible step, and of its squared length."""
    mean, square = np.zeros(4), 0.0
    for probability, made in possible_steps(policy, groups, size):
        step = direction(policy, algorithm, made)
        mean, square = mean + probability * step, square + probability * float(step @ step)
    return mean, square


def expected(policy: TinyPolicy, algorithm: Algorithm, groups: int, size: int) -> np.ndarray:
    """[4]: the expectation of `direction` over every possible step."""
    return moments(policy, algorithm, groups, size)[0]


def expected_token_mean(policy: TinyPolicy, algorithm: Algorithm, groups: int, size: int) -> np.ndarray:
    """As `expected`, of a token-mean algorithm that credits groups one by one, for steps of many groups.

    Groups are independent and meet only in the number of tokens, whose distribution is computed group by group.
    """
    kinds = []
    for probability, outcomes in possible_groups(policy, size):
        made = [policy.group("g", outcomes)]
        tokens = batch_of(algorithm, made).num_actions
        kinds.append((probability, tokens, direction(policy, algorithm, made) * max(1, tokens)))
    others = np.ones(1)  # P(tokens of the other groups = index)
    alone = np.bincount([t for _, t, _ in kinds], weights=[p for p, _, _ in kinds])
    for _ in range(groups - 1):
        others = np.convolve(others, alone)
    numbers = np.arange(others.size)
    return sum(
        (groups * p * total * float((others / np.maximum(1, numbers + tokens)).sum()) for p, tokens, total in kinds),
        start=np.zeros(4),
    )


@dataclass(frozen=True)
class Bias:
    """An expected direction beside the gradient."""

    cosine: float
    first: float  # its component of the first decision, over the gradient's
    second: float

    @property
    def tilt(self) -> float:
        """1: no bias in direction. 0.9: the second decision learns a tenth too slowly beside the first."""
        return self.second / self.first


def bias(found: np.ndarray, exact: np.ndarray) -> Bias:
    cosine = float(found @ exact / np.linalg.norm(found) / np.linalg.norm(exact))
    return Bias(cosine, float(found[0] / exact[0]), float(found[2] / exact[2]))


CHOICES: dict[tuple[str, str], Algorithm] = {
    (name, mode): KNOWN[name].algorithm(Objective(aggregation=Aggregation(mode, 2 if mode.endswith("norm") else None)))
    for name, modes in {
        "rloo": MODES,
        "center": ("seq-mean-token-sum",),
        "loo_std": ("seq-mean-token-sum",),
        "grpo": ("seq-mean-token-sum", "token-mean", "seq-mean-token-mean"),
        "opo": ("seq-mean-token-sum",),
        "rpp_baseline": ("seq-mean-token-sum",),
        "reinforce_pp": ("seq-mean-token-sum",),
        "maxrl": ("seq-mean-token-sum",),
        "turn_return": ("seq-mean-token-sum",),
        "same_turn_baseline": ("seq-mean-token-sum",),
        "gigpo": ("seq-mean-token-sum",),
    }.items()
    for mode in modes
}
"""Credit and aggregation, each credit with summed token losses so that nothing else is biased."""


def bias_rows() -> list[str]:
    """The first table of docs/algorithms/README.md: every choice, groups of 2 and 4, steps of 1 and 2 groups; the noise
    of 2 groups of 4."""
    policy = golden_policy()
    exact = policy.gradient()
    rows = []
    for (name, mode), algorithm in CHOICES.items():
        found = [moments(policy, algorithm, n, size) for size in (2, 4) for n in (1, 2)]
        cells = [bias(mean, exact) for mean, _ in found]
        mean, square = found[-1]  # |E x|^2 / E |x|^2: 1 if every step were the same, near 0 if noise is most of it
        shown = [f"{b.cosine:.4f}, {b.tilt:.3f}" for b in cells] + [f"{float(mean @ mean) / square:.4f}"]
        rows.append(f"| {name} | {mode} | " + " | ".join(shown) + " |")
    return rows


def batch_size_rows() -> list[str]:
    """The second: the default, by the number of groups in a step."""
    policy = golden_policy()
    exact, default = policy.gradient(), CHOICES["rloo", "token-mean"]
    rows = []
    for size in (2, 4, 8):
        cells = [bias(expected_token_mean(policy, default, n, size), exact) for n in (1, 2, 4, 8, 16, 64)]
        rows.append(f"| {size} | " + " | ".join(f"{b.tilt:.4f}" for b in cells) + " |")
    return rows


if __name__ == "__main__":
    print(*bias_rows(), "", *batch_size_rows(), sep="\n")
