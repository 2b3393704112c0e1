"""The KL to a reference and the entropy: values, gradients, and which estimate has the true one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from learning_support import POISONS, golden
from objective_support import ALL, DTYPES, MICRO_BATCHES, TOLERANCE, Gathered, tokens_of_one
from palestra.rl.entropy import most_undecided
from palestra.rl.kl import Estimate, clamped, kl_per_token, reward_penalties
from palestra.rl.objective import Objective, loss_terms
from palestra.rl.surrogates import PPOClip

KL = golden("kl_entropy")
OURS: dict[str, Estimate] = {
    "kl/k1": "k1",
    "kl/k2": "k2",
    "kl/k3": "k3",
    "kl/k3_score_function": "k3_score",
    "kl/k3_with_k2_gradient": "k3_k2_gradient",
    "kl/k3_importance_weighted": "k3_is",
    "kl/k3_importance_weighted_detached": "k3_is_detached",
}
CASES = [name for name in KL if name in OURS]
CLIP = PPOClip(0.2, 0.2, None)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_every_estimate_has_the_golden_value_and_gradient(name: str, dtype: torch.dtype) -> None:
    expected, tolerance = KL[name]["expected"], TOLERANCE[dtype]
    for poison in POISONS:
        gathered = Gathered(dtype, poison)
        new, ref, old = (gathered.part(table, ALL) for table in (gathered.new, gathered.ref, gathered.old))
        per_token = kl_per_token(OURS[name], new, ref, old)
        np.testing.assert_allclose(gathered.table(per_token), expected["per_token"], rtol=tolerance, atol=tolerance)
        (per_token.sum() / 13).backward()
        np.testing.assert_allclose(gathered.new.grad, expected["grad_new_logp"], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("split", MICRO_BATCHES)
@pytest.mark.parametrize("name", [name for name in CASES if name != "kl/k1"])
def test_the_kl_is_a_term_of_the_loss_weighed_like_the_surrogate(name: str, split: str, dtype: torch.dtype) -> None:
    expected, tolerance = KL[name]["expected"], TOLERANCE[dtype]
    for poison in POISONS:
        plain = Gathered(dtype, poison).run(Objective(CLIP, None), MICRO_BATCHES[split])
        found = Gathered(dtype, poison).run(
            Objective(CLIP, None, kl=OURS[name], kl_coefficient=0.5),  # type: ignore[arg-type]
            MICRO_BATCHES[split],
        )
        assert found.loss - plain.loss == pytest.approx(0.5 * expected["loss"], abs=tolerance)
        change = found.gradient - plain.gradient
        np.testing.assert_allclose(change, 0.5 * np.array(expected["grad_new_logp"]), atol=tolerance)
        assert found.metrics["kl_to_reference"] == pytest.approx(expected["loss"], rel=1e-5)


def test_which_estimates_have_the_true_expected_gradient() -> None:
    case = KL["kl/expected_gradient_oracle"]
    reference = torch.tensor(case["inputs"]["ref_prob"], dtype=torch.float64).log()
    truth = torch.tensor(case["expected"]["true_gradient"], dtype=torch.float64)
    right = {"k2", "k3_score", "k3_k2_gradient", "k3_is"}
    for kind in OURS.values():
        theta = torch.tensor(case["inputs"]["theta"], dtype=torch.float64, requires_grad=True)
        logprobs = torch.log_softmax(theta, 0)
        estimates = kl_per_token(kind, logprobs, reference, logprobs.detach())
        (logprobs.detach().exp() * estimates).sum().backward()
        assert theta.grad is not None
        assert bool(torch.allclose(theta.grad, truth, atol=1e-9)) == (kind in right), kind
        if kind == "k1":
            assert bool(torch.allclose(theta.grad, torch.zeros(3).double(), atol=1e-12))
        if kind in ("k3", "k3_is_detached"):
            forward = torch.tensor(case["expected"]["forward_kl_gradient"], dtype=torch.float64)
            torch.testing.assert_close(theta.grad, forward)
        if kind != "k2":
            value = float((logprobs.exp() * estimates).sum().detach())
            assert value == pytest.approx(case["expected"]["true_kl"], abs=1e-9), kind


def test_the_importance_weighted_estimate_is_right_for_samples_of_another_policy() -> None:
    case = KL["kl/expected_gradient_oracle"]
    reference = torch.tensor(case["inputs"]["ref_prob"], dtype=torch.float64).log()
    old = torch.log_softmax(torch.tensor([-0.5, 0.8, 0.1], dtype=torch.float64), 0)
    truth = torch.tensor(case["expected"]["true_gradient"], dtype=torch.float64)
    right = {}
    for kind in ("k3_is", "k3_score", "k2"):
        theta = torch.tensor(case["inputs"]["theta"], dtype=torch.float64, requires_grad=True)
        estimates = kl_per_token(kind, torch.log_softmax(theta, 0), reference, old)  # type: ignore[arg-type]
        (old.exp() * estimates).sum().backward()
        right[kind] = bool(torch.allclose(theta.grad, truth, atol=1e-9))  # type: ignore[arg-type]
    assert right == {"k3_is": True, "k3_score": False, "k2": False}


def test_k1_in_the_reward_has_the_true_expected_gradient() -> None:
    case = KL["kl/expected_gradient_oracle"]
    reference = np.log(np.array(case["inputs"]["ref_prob"]))
    theta = torch.tensor(case["inputs"]["theta"], dtype=torch.float64, requires_grad=True)
    logprobs = torch.log_softmax(theta, 0)
    penalties = reward_penalties(logprobs.detach().numpy(), reference, 0.5)
    # the score function of a reward of -penalty, minimised
    (logprobs.detach().exp() * torch.from_numpy(penalties) * logprobs).sum().backward()
    np.testing.assert_allclose(theta.grad, 0.5 * np.array(case["expected"]["true_gradient"]), atol=1e-9)


def test_penalties_are_computed_in_double_precision() -> None:
    logprobs, reference = np.array([-1.0, -2.0], np.float32), np.array([-1.5, -1.0], np.float32)
    found = reward_penalties(logprobs, reference, 0.1)
    assert (found.dtype, found.tolist()) == (np.float64, [0.05, -0.1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_clamped_estimates_are_those_of_other_trainers(dtype: torch.dtype) -> None:
    case = KL["kl/clamped_k3"]
    new, ref = (torch.tensor(case["inputs"][key], dtype=dtype) for key in ("new_logp", "ref_logp"))
    bounds = case["conventions"]["input_clamp"], case["conventions"]["output_clamp"]
    expected = case["expected"]
    np.testing.assert_allclose(clamped("k3", new, ref, *bounds), expected["k3_clamped"], rtol=1e-6)
    np.testing.assert_allclose(clamped("k1", new, ref, *bounds), expected["k1_clamped"], rtol=1e-6)
    np.testing.assert_allclose(kl_per_token("k3", new, ref), expected["k3_unclamped"], rtol=1e-5)


def test_only_the_argument_is_bounded_so_the_gradient_is_there_where_the_drift_is_largest() -> None:
    new = torch.tensor([-12.0], requires_grad=True)
    (gradient,) = torch.autograd.grad(kl_per_token("k3_score", new, torch.tensor([-1.0])).sum(), new)
    assert float(gradient) != 0.0
    (lost,) = torch.autograd.grad(clamped("k3", new, torch.tensor([-1.0]), 20, 10).sum(), new)
    assert float(lost) == 0.0
    (finite,) = torch.autograd.grad(kl_per_token("k3", torch.full((1,), -900.0, requires_grad=True), new).sum(), new)
    assert bool(torch.isfinite(finite).all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_entropy_bonus_is_of_action_tokens_and_weighed_like_the_surrogate(dtype: torch.dtype) -> None:
    case = KL["entropy/bonus_token_mean"]
    mask = torch.tensor(case["inputs"]["mask"], dtype=torch.bool)
    for poison in POISONS:
        logits = torch.tensor(case["inputs"]["logits"], dtype=dtype)
        logits[~mask] = poison
        logits.requires_grad_()
        logprobs = torch.log_softmax(logits[mask], 1)
        entropy = -(logprobs.exp() * logprobs).sum(1)
        np.testing.assert_allclose(entropy.detach(), np.array(case["expected"]["entropy"])[[0, 2]], rtol=1e-6)
        tokens = tokens_of_one(torch.full((2,), 0.5, dtype=dtype), torch.zeros(2, dtype=dtype), logprobs[:, 0].detach())
        objective = Objective(CLIP, None, entropy_coefficient=case["conventions"]["coef"])
        terms = loss_terms(objective, logprobs[:, 0], tokens, entropy=entropy)
        terms.loss.backward()
        tolerance = TOLERANCE[dtype]
        assert float(terms.loss.detach()) == pytest.approx(case["expected"]["loss"], rel=tolerance)
        assert abs(float(terms.loss.detach()) - case["must_not_equal"]["loss"]) > 1e-3
        np.testing.assert_allclose(logits.grad, case["expected"]["grad_logits"], rtol=1e-5, atol=tolerance)


def test_a_bonus_without_gradient_is_refused() -> None:
    logprobs = torch.zeros(1, requires_grad=True)
    tokens = tokens_of_one(torch.ones(1), torch.ones(1), torch.zeros(1))
    with pytest.raises(ValueError, match="would teach nothing"):
        loss_terms(Objective(entropy_coefficient=0.1), logprobs, tokens, entropy=torch.ones(1))
    with pytest.raises(ValueError, match="are missing"):
        loss_terms(Objective(entropy_coefficient=0.1), logprobs, tokens)


def test_the_most_undecided_tokens_are_found_by_an_interpolated_quantile() -> None:
    entropy = torch.tensor([0.1, 2.0, 0.3, 1.0, 0.7])
    assert most_undecided(entropy, 0.2).tolist() == [False, True, False, False, False]  # at or above 1.2
    assert most_undecided(entropy, 0.5).tolist() == [False, True, False, True, True]  # at or above the median
    assert most_undecided(entropy, 1.0).all()
    assert most_undecided(torch.zeros(0), 0.2).tolist() == []
    for share in (0.0, 1.1):
        with pytest.raises(ValueError, match="the share"):
            most_undecided(entropy, share)
