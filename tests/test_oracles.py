"""What each algorithm's step is in expectation, beside the policy gradient: exact, by taking every possible step."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from learning_support import golden
from oracle_policy import (
    CHOICES,
    GOOD,
    LEFT,
    OUTCOMES,
    REWARDS,
    RIGHT,
    TinyPolicy,
    batch_of,
    batch_size_rows,
    bias,
    bias_rows,
    direction,
    expected,
    expected_token_mean,
    golden_policy,
    possible_groups,
    possible_steps,
)
from palestra.rl.action_tokens import ActionTokens
from palestra.rl.aggregation import Aggregation
from palestra.rl.algorithms.base import Algorithm
from palestra.rl.algorithms.make import KNOWN
from palestra.rl.algorithms.rloo import RLOO
from palestra.rl.corrections import Correction, GeometricTIS, IcePop, ProductMask, ProductTIS, TokenTIS
from palestra.rl.objective import Objective, loss_terms
from palestra.rl.surrogates import Reinforce

POLICY = golden_policy()
EXACT = POLICY.gradient()
DOCS = Path(__file__).parents[1] / "docs" / "algorithms" / "README.md"
SUMMED = Aggregation("seq-mean-token-sum")


def test_the_gradient_by_definition_is_the_golden_one_and_that_of_finite_differences() -> None:
    assert (
        pytest.approx(golden("oracles")["oracle/off_policy_weights"]["expected"]["exact_gradient"], abs=1e-12) == EXACT
    )

    def value(theta: tuple[float, float]) -> float:
        return float(TinyPolicy(theta, POLICY.phi).probabilities() @ np.array(REWARDS))

    step, (a, b) = 1e-6, POLICY.theta
    assert (value((a + step, b)) - value((a - step, b))) / (2 * step) == pytest.approx(EXACT[0], abs=1e-9)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_rloo_with_summed_token_losses_is_the_policy_gradient(size: int) -> None:
    found = expected(POLICY, RLOO(Objective(aggregation=SUMMED)), 1, size)
    assert np.abs(found - EXACT).max() < 1e-12


@pytest.mark.parametrize("groups", [2, 3])
def test_so_it_is_with_several_groups_when_those_without_signal_count(groups: int) -> None:
    counted = Aggregation("seq-mean-token-sum", count_without_signal=True)
    assert np.abs(expected(POLICY, RLOO(Objective(aggregation=counted)), groups, 2) - EXACT).max() < 1e-12
    dropped = bias(expected(POLICY, RLOO(Objective(aggregation=SUMMED)), groups, 2), EXACT)
    assert dropped.cosine == pytest.approx(1.0, abs=1e-12)  # a factor, and no change of direction
    assert dropped.first == pytest.approx(dropped.second, abs=1e-12)


def test_it_is_so_for_any_policy() -> None:
    rng = np.random.default_rng(0)
    for _ in range(5):
        policy = TinyPolicy(tuple(rng.normal(size=2)), tuple(rng.normal(size=2)))
        found = expected(policy, RLOO(Objective(aggregation=SUMMED)), 1, 3)
        assert np.abs(found - policy.gradient()).max() < 1e-12


@pytest.mark.parametrize(
    ("name", "mode", "size", "scale"),
    [
        ("center", "seq-mean-token-sum", 2, 1 / 2),
        ("center", "seq-mean-token-sum", 4, 3 / 4),
        ("rloo", "seq-mean-token-sum-norm", 4, 1 / 2),
    ],
)
def test_centring_and_a_constant_normaliser_only_change_the_scale(
    name: str, mode: str, size: int, scale: float
) -> None:
    assert expected(POLICY, CHOICES[name, mode], 1, size) == pytest.approx(scale * EXACT, abs=1e-12)


def test_a_spread_of_the_others_alone_keeps_the_direction() -> None:
    found = bias(expected(POLICY, CHOICES["loo_std", "seq-mean-token-sum"], 1, 4), EXACT)
    assert (found.cosine, found.tilt) == pytest.approx((1.0, 1.0), abs=1e-9)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_maxrl_follows_the_log_of_the_success_rate_up_to_an_order_below_the_group_size(size: int) -> None:
    policy = TinyPolicy(POLICY.theta, POLICY.phi, rewards=(0.0, 1.0, 0.0))
    failure = 1 - float(policy.probabilities()[1])
    order = sum(failure**k for k in range(size - 1))  # of 1 / p = 1 + failure + failure^2 + ...
    found = expected(policy, CHOICES["maxrl", "seq-mean-token-sum"], 1, size)
    assert found == pytest.approx(order * policy.gradient(), abs=1e-12)


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("rloo", "token-mean"),
        ("rloo", "seq-mean-token-mean"),
        ("rloo", "prompt-mean-token-mean"),
        ("grpo", "seq-mean-token-sum"),
        ("opo", "seq-mean-token-sum"),
        ("rpp_baseline", "seq-mean-token-sum"),
        ("reinforce_pp", "seq-mean-token-sum"),
    ],
)
@pytest.mark.parametrize("size", [2, 4])
def test_the_other_choices_change_the_direction(name: str, mode: str, size: int) -> None:
    found = bias(expected(POLICY, CHOICES[name, mode], 1, size), EXACT)
    assert abs(found.tilt - 1) > 0.02


def test_token_mean_scales_the_two_decisions_by_known_amounts() -> None:
    default = CHOICES["rloo", "token-mean"]
    for size, first, second in ((2, 0.667, 0.596), (4, 0.693, 0.649)):
        found = bias(expected(POLICY, default, 1, size), EXACT)
        assert (found.first, found.second) == pytest.approx((first, second), abs=5e-4)


def test_the_bias_of_token_mean_goes_away_with_the_batch_and_that_of_a_mean_per_row_does_not() -> None:
    default, per_row = CHOICES["rloo", "token-mean"], CHOICES["rloo", "seq-mean-token-mean"]
    tilts = [bias(expected_token_mean(POLICY, default, n, 4), EXACT).tilt for n in (1, 4, 16, 64)]
    assert tilts == sorted(tilts)
    assert 1 - tilts[-1] < 0.002
    assert [bias(expected(POLICY, per_row, n, 2), EXACT).tilt for n in (1, 2)] == pytest.approx([0.7015] * 2, abs=1e-4)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("groups", [1, 2])
def test_large_batches_are_computed_as_small_ones_are(groups: int, size: int) -> None:
    default = CHOICES["rloo", "token-mean"]
    direct = expected(POLICY, default, groups, size)
    assert expected_token_mean(POLICY, default, groups, size) == pytest.approx(direct, abs=1e-14)


def test_the_figures_in_the_docs_are_the_computed_ones() -> None:
    lines = DOCS.read_text(encoding="utf-8").splitlines()
    assert [row for row in bias_rows() + batch_size_rows() if row not in lines] == []


@pytest.mark.parametrize("name", ["rloo", "grpo", "reinforce"])
def test_the_gradient_of_the_loss_is_what_was_enumerated(name: str) -> None:
    """Through the real loss: with the policy on both sides its gradient is minus the direction."""
    surrogate = {"objective": Objective(Reinforce(), aggregation=SUMMED)} if name == "reinforce" else {}
    algorithm: Algorithm = KNOWN[name].algorithm(**surrogate)
    for _, groups in possible_steps(POLICY, 1, 3):
        batch = batch_of(algorithm, groups)
        if batch.num_actions:
            found = loss_gradient(POLICY, algorithm.objective, batch.actions())
            assert -found == pytest.approx(direction(POLICY, algorithm, groups), abs=1e-7)  # rows are kept in float32


def loss_gradient(policy: TinyPolicy, objective: Objective, actions: object) -> np.ndarray:
    """[4] of the loss of these action tokens, by automatic differentiation."""
    tokens = ActionTokens.of(actions, torch.device("cpu"), torch.float64)  # type: ignore[arg-type]
    logits, logprobs = torch_logprobs(policy, [int(target) for target in actions.targets])  # type: ignore[attr-defined]
    loss_terms(objective, logprobs, tokens).loss.backward()
    return torch.cat([x.grad for x in logits if x.grad is not None]).numpy()


def torch_logprobs(policy: TinyPolicy, targets: list[int]) -> tuple[list[torch.Tensor], torch.Tensor]:
    logits = [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (policy.theta, policy.phi)]
    table = [x.log_softmax(0) for x in logits]
    picked = [table[0][t - LEFT] if t in (LEFT, RIGHT) else table[1][t - GOOD] for t in targets]
    return logits, torch.stack(picked)


BEYOND = 1e9
CORRECTIONS: dict[str, Correction | None] = {
    "sequence_is": ProductTIS("sequence", BEYOND),
    "token_is": TokenTIS(BEYOND),
    "no_correction": None,
    "sequence_tis_cap1.2": ProductTIS("sequence", 1.2),
    "sequence_mis_cap1.2": ProductMask("sequence", 1.2),
    "token_tis_cap1.2": TokenTIS(1.2),
    "icepop_0.8_1.2": IcePop(0.8, 1.2),
    "geometric_sequence_weight": GeometricTIS("sequence", BEYOND),
}


@pytest.mark.parametrize("name", CORRECTIONS)
def test_corrections_of_a_stale_policy_have_the_golden_expectations(name: str) -> None:
    """Sampled by another policy, corrected by the loss: only the whole product, uncapped, is the gradient."""
    case = golden("oracles")["oracle/off_policy_weights"]
    stale = TinyPolicy(tuple(case["inputs"]["theta_behaviour"]), tuple(case["inputs"]["phi_behaviour"]))
    objective = Objective(Reinforce(), CORRECTIONS[name], aggregation=SUMMED)
    total = np.zeros(4)
    for outcome, probability in enumerate(stale.probabilities()):
        gain = REWARDS[outcome] - case["conventions"]["baseline"]
        logits, logprobs = torch_logprobs(POLICY, list(OUTCOMES[outcome]))
        loss_terms(objective, logprobs, stale_tokens(stale, outcome, gain)).loss.backward()
        total -= probability * torch.cat([torch.zeros(2) if x.grad is None else x.grad for x in logits]).numpy()
    assert total == pytest.approx(case["expected"]["estimators"][name], abs=1e-9)
    assert bias(total, EXACT).cosine == pytest.approx(case["expected"]["cosine_to_exact"][name], abs=1e-9)


def stale_tokens(stale: TinyPolicy, outcome: int, gain: float) -> ActionTokens:
    turns = torch.arange(len(OUTCOMES[outcome]))
    sampled = torch.tensor([stale.logprob(token) for token in OUTCOMES[outcome]], dtype=torch.float64)
    ones, zeros = torch.ones_like(sampled), torch.zeros_like(turns)
    return ActionTokens(ones, gain * ones, sampled, zeros, turns, zeros)


def test_probabilities_of_possible_steps_sum_to_one() -> None:
    assert sum(p for p, _ in possible_groups(POLICY, 4)) == pytest.approx(1.0, abs=1e-12)
    assert sum(p for p, _ in possible_steps(POLICY, 2, 3)) == pytest.approx(1.0, abs=1e-12)
