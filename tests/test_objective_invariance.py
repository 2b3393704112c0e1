"""However trajectories are dealt over micro-batches, the loss and its gradient are the same, whatever is minimised."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from palestra.rl.action_tokens import ActionTokens
from palestra.rl.aggregation import Aggregation, token_weights
from palestra.rl.aggregation import Mode as AggregationMode
from palestra.rl.corrections import (
    OPSM,
    Correction,
    GeometricMask,
    GeometricTIS,
    IcePop,
    ProductMask,
    ProductTIS,
    TokenClamp,
    TokenTIS,
)
from palestra.rl.objective import Mode, Objective, loss_terms
from palestra.rl.ranks import Ranks
from palestra.rl.segments import Level
from palestra.rl.surrogates import (
    CISPOTwoSided,
    CISPOUpper,
    DPPOKl,
    DPPOTotalVariation,
    ImportanceSampling,
    PPOClip,
    Reinforce,
    Surrogate,
)
from palestra.rl.tally import Tally

LEVELS: tuple[Level, ...] = ("token", "turn", "sequence")
MODES: tuple[Mode, ...] = ("on_policy", "decoupled", "decoupled_loglinear", "bypass")
SURROGATES: list[Surrogate] = [
    PPOClip(),
    PPOClip(0.2, 0.2, None),
    CISPOTwoSided(),
    CISPOUpper(2.0),
    Reinforce(),
    ImportanceSampling(),
    DPPOTotalVariation(0.1, 0.1, 2.0),
    DPPOKl(),
]
CORRECTIONS: list[Correction | None] = [
    None,
    TokenTIS(),
    TokenClamp(),
    IcePop(),
    OPSM(0.1),
    *(ProductTIS(level) for level in LEVELS[1:]),
    *(ProductMask(level) for level in LEVELS[1:]),
    *(GeometricTIS(level) for level in LEVELS[1:]),
    *(GeometricMask(level, 0.8, 1.2) for level in LEVELS[1:]),
    *(GeometricMask(level, 0.8, 1.2, None) for level in LEVELS[1:]),
]
AGGREGATIONS = [Aggregation(mode, 9 if mode.endswith("norm") else None) for mode in get_args(AggregationMode)]
VERSION = 7


@dataclass(frozen=True)
class Step:
    """The action tokens of one optimiser step: [N] each, and every trajectory's places among them."""

    columns: dict[str, torch.Tensor]
    places: list[np.ndarray]


def step_of(rng: np.random.Generator) -> Step:
    """Two to six trajectories, each of one to three turns of one to five tokens."""
    trajectory, turn = [], []
    for index in range(int(rng.integers(2, 7))):
        for which in range(int(rng.integers(1, 4))):
            length = int(rng.integers(1, 6))
            trajectory += [index] * length
            turn += [2 * which] * length  # turns are not always numbered without gaps
    num = len(trajectory)
    sampling = -rng.exponential(1.0, num)
    old = sampling + rng.normal(0, 0.3, num)
    numbers = {
        "advantages": rng.normal(0, 1, num),
        "sampling": sampling,
        "old": old,
        "new": old + rng.normal(0, 0.3, num),
        "reference": old + rng.normal(0, 0.3, num),
        "entropy": rng.random(num),
    }
    columns = {name: torch.from_numpy(values) for name, values in numbers.items()}
    names = {"trajectory": trajectory, "turn": turn, "version": rng.integers(3, VERSION + 1, num)}
    columns |= {name: torch.tensor(values) for name, values in names.items()}
    places = [np.flatnonzero(np.array(trajectory) == index) for index in range(max(trajectory) + 1)]
    return Step(columns, places)


def deal(rng: np.random.Generator, num: int) -> list[list[int]]:
    """Trajectories in another order, in one to `num` micro-batches, some of which may be empty."""
    micro_batches: list[list[int]] = [[] for _ in range(int(rng.integers(1, num + 1)))]
    for index in rng.permutation(num):
        micro_batches[int(rng.integers(len(micro_batches)))].append(int(index))
    return micro_batches


def run(objective: Objective, step: Step, dealt: list[list[int]]) -> tuple[float, torch.Tensor, dict[str, float]]:
    trajectory = step.columns["trajectory"].numpy().astype(np.int32)
    weights = torch.from_numpy(token_weights(objective.aggregation, trajectory, trajectory, trajectory // 2))
    new = step.columns["new"].clone().requires_grad_()
    entropy = (step.columns["entropy"] * new).abs()
    total = torch.zeros((), dtype=torch.float64)
    tally = None
    for micro_batch in [[], *dealt]:
        order = [step.places[index] for index in micro_batch]
        at = torch.from_numpy(np.concatenate(order)) if order else torch.zeros(0, dtype=torch.int64)
        c = {name: column[at] for name, column in step.columns.items()}
        tokens = ActionTokens(weights[at], c["advantages"], c["sampling"], c["trajectory"], c["turn"], c["version"])
        terms = loss_terms(
            objective,
            new[at],
            tokens,
            old=c["old"],
            reference=c["reference"],
            entropy=entropy[at],
            version=VERSION,
        )
        total = total + terms.loss
        tally = tally or Tally(terms)
        tally.add(terms)
    total.backward()
    assert tally is not None
    assert new.grad is not None
    return float(total.detach()), new.grad, tally.metrics(len(new), Ranks())


def objectives(surrogate: Surrogate, level: Level, mode: Mode) -> list[Objective]:
    """Every correction and aggregation that may go with these, with a KL and an entropy bonus."""
    corrections = [None] if mode == "bypass" else CORRECTIONS
    return [
        Objective(
            surrogate,
            correction,
            mode=mode,
            ratio=level,
            aggregation=how,
            kl="k3_is",
            kl_coefficient=0.1,
            entropy_coefficient=0.01,
        )
        for correction, how in itertools.product(corrections, AGGREGATIONS)
        if level == "token" or how.mode != "token-sum"
    ]


def allowed(surrogate: Surrogate, level: Level, mode: Mode) -> bool:
    if isinstance(surrogate, Reinforce):
        return level == "token" and mode == "on_policy"
    return level == "token" or not isinstance(surrogate, DPPOKl | DPPOTotalVariation)


TOGETHER = [choice for choice in itertools.product(SURROGATES, LEVELS, MODES) if allowed(*choice)]


def same(objective: Objective, step: Step, dealt: list[list[int]]) -> None:
    loss, gradient, metrics = run(objective, step, [list(range(len(step.places)))])
    other_loss, other_gradient, other_metrics = run(objective, step, dealt)
    assert other_loss == pytest.approx(loss, rel=1e-9, abs=1e-9)
    torch.testing.assert_close(other_gradient, gradient, rtol=1e-9, atol=1e-9)
    assert other_metrics == pytest.approx(metrics, rel=1e-9, abs=1e-9)


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), data=st.data())
def test_dealing_changes_neither_loss_nor_gradient_nor_metrics(seed: int, data: st.DataObject) -> None:
    rng = np.random.default_rng(seed)
    step = step_of(rng)
    choice = data.draw(st.sampled_from(TOGETHER))
    same(data.draw(st.sampled_from(objectives(*choice))), step, deal(rng, len(step.places)))


def sweep(mode: Mode, every: int) -> None:
    rng = np.random.default_rng(7)
    step = step_of(rng)
    order = rng.permutation(len(step.places)).tolist()
    chosen = [objective for choice in TOGETHER if choice[2] == mode for objective in objectives(*choice)]
    for objective in chosen[::every]:
        same(objective, step, [order[:2], order[2:]])


@pytest.mark.parametrize("mode", MODES)
def test_combinations_of_all_kinds_are_summed_over_micro_batches(mode: Mode) -> None:
    sweep(mode, 11)  # in step with neither the modes of aggregation nor the corrections


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_every_combination_is_summed_over_micro_batches(mode: Mode) -> None:
    sweep(mode, 1)


def test_a_turn_cut_over_micro_batches_would_be_another_ratio() -> None:
    """Why a trajectory is never split: the property above is one of whole segments."""
    step = step_of(np.random.default_rng(3))
    objective = Objective(PPOClip(0.2, 0.2, None), None, ratio="sequence", mode="decoupled")
    whole = run(objective, step, [list(range(len(step.places)))])[0]
    halves = [half for place in step.places for half in np.array_split(place, 2) if len(half)]
    cut = run(objective, Step(step.columns, halves), [[index] for index in range(len(halves))])[0]
    assert abs(whole - cut) > 1e-6
