"""Every algorithm learns a task of two turns to its known optimum, through the real learner on a tiny transformer.

The policy says one token, sees one that depends on it, and says another. Its outcome is 0.6 for a first token that is
right, and 0.4 for a second that is right for what was seen: 1 is the most there is, and needs the observation to be
read. The expected outcome is a sum over all pairs of tokens, so it is known exactly and nothing is left to sampling.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from learning_support import sample
from palestra.envs.types import Scored
from palestra.rl.algorithms.make import KNOWN, make_algorithm
from palestra.rl.counted import Counting
from palestra.rl.critic import critic_of
from palestra.rl.learner import Learner, LearnerSettings
from palestra.rl.optimizer import OptimizerSettings
from palestra.rl.penalties import as_streams, everything
from palestra.rl.settings_algorithm import AlgorithmSettings
from palestra.rl.step import Practice, learn
from palestra.rollout.types import Finish, Group, TerminatedBy, Trajectory, Turn

WORDS = 5  # that the policy should say; three more stand for what it is shown
PROMPT, SEEN_RIGHT, SEEN_WRONG = WORDS, WORDS + 1, WORDS + 2
SIZE = WORDS + 3
FIRST, AFTER_RIGHT, AFTER_WRONG = 1, 2, 3
GROUPS, GROUP_SIZE, UPDATES = 6, 8, 80
ENOUGH = 0.95
FAST = ("rloo", "ppo")  # in every run of the tests; the others with `-m slow`
WEIGHTS = {"first": 0.6, "second": 0.4}
# gdpo has to be told its objectives; vapo's own lambda is for thousands of tokens, and its critic for long runs
NEEDS: dict[str, dict[str, Any]] = {
    "gdpo": {"objectives": WEIGHTS},
    "vapo": {"alpha": 1.0, "value_learning_rate": 3e-2},
}


def tiny(seed: int) -> PreTrainedModel:
    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=SIZE,
        max_position_embeddings=8,
        initializer_range=0.1,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).float()


def seen(first: int) -> int:
    return SEEN_RIGHT if first == FIRST else SEEN_WRONG


def parts(first: int, second: int) -> dict[str, float]:
    wanted = AFTER_RIGHT if first == FIRST else AFTER_WRONG
    return {"first": float(first == FIRST), "second": float(second == wanted)}


def outcome(first: int, second: int) -> float:
    return sum(WEIGHTS[name] * value for name, value in parts(first, second).items())


PAIRS = [(a, b) for a in range(SIZE) for b in range(SIZE)]


def policy(learner: Learner) -> np.ndarray:
    """Log-probabilities of both tokens of every pair [V * V, 2], as the learner scores what it trains on."""
    pairs = [Group("g0", "all", tuple(episode(f"g0-{a}-{b}", a, b, -1.0, -1.0) for a, b in PAIRS))]
    batch = everything(pairs, 4096)
    (streams,) = as_streams(pairs, batch, learner.sampled_logprobs(batch).astype(np.float64))
    return np.stack([stream for stream in streams if stream is not None])


def expected(logprobs: np.ndarray) -> float:
    """The expected outcome under the policy, over all pairs of tokens."""
    return float(np.exp(logprobs.sum(axis=1)) @ [outcome(a, b) for a, b in PAIRS])


def play(logprobs: np.ndarray, rng: np.random.Generator) -> list[Group]:
    """Groups of episodes, sampled from the policy with the log-probabilities of what was sampled."""
    chances = np.exp(logprobs.sum(axis=1))
    drawn = rng.choice(len(PAIRS), size=(GROUPS, GROUP_SIZE), p=chances / chances.sum())
    return [
        Group(
            f"g{g}",
            f"task{g}",
            tuple(episode(f"g{g}-{m}", *PAIRS[i], *logprobs[i].tolist()) for m, i in enumerate(members)),
        )
        for g, members in enumerate(drawn.tolist())
    ]


def episode(name: str, a: int, b: int, logprob_a: float, logprob_b: float) -> Trajectory:
    row = sample([PROMPT, a, seen(a), b], [0, 1, 0, 1], logprobs=[0.0, logprob_a, 0.0, logprob_b], turn=[0, 0, 0, 1])
    turns = tuple(
        Turn(k, 0, 1 + 2 * k, 1, Finish.STOP, "", (), 1, 0.0, 0.0, state=("opening", str(seen(a)))[k]) for k in range(2)
    )
    return Trajectory(
        id=name,
        task_id="two turns",
        group_id=name.partition("-")[0],
        seed=0,
        messages=(),
        turns=turns,
        samples=(row,),
        terminated_by=TerminatedBy.DONE,
        verdict=Scored(outcome(a, b), parts(a, b)),
    )


def updates_to_optimum(
    name: str, seed: int, told: Callable[[int, float], None] = lambda step, value: None
) -> int | None:
    """Batches after which the policy is as good as asked; None: it never was."""
    algorithm = make_algorithm(AlgorithmSettings(name=name, **NEEDS.get(name, {})), budget_tokens=2)
    optimizer = OptimizerSettings(learning_rate=5e-3, warmup_steps=0, max_grad_norm=1.0)
    learner = Learner(tiny(seed), LearnerSettings(train="full", optimizer=optimizer, critic=critic_of(algorithm)))
    rng = np.random.default_rng(seed)
    for step in range(UPDATES + 1):
        logprobs = policy(learner)
        told(step, expected(logprobs))
        if expected(logprobs) >= ENOUGH:
            return step
        learn(learner, algorithm, play(logprobs, rng), Counting(), Practice(4096))
    return None


EACH = [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in KNOWN]


@pytest.mark.parametrize("name", EACH)
def test_every_algorithm_reaches_the_optimum_of_a_task_of_two_turns(name: str) -> None:
    found = [updates_to_optimum(name, seed) for seed in range(3)]
    assert None not in found, f"{name}: batches needed by three seeds: {found}"
