"""Corrections of the mismatch between trainer and engine: detached weights and masks. Their bias: test_oracles."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest
import torch

from learning_support import POISONS, golden
from objective_support import ALL, DTYPES, MICRO_BATCHES, TOLERANCE, Gathered
from palestra.rl.action_tokens import ActionTokens
from palestra.rl.algorithms.make import make_algorithm
from palestra.rl.corrections import (
    OPSM,
    Corrected,
    Correction,
    GeometricMask,
    GeometricTIS,
    IcePop,
    Mismatch,
    ProductMask,
    ProductTIS,
    TokenClamp,
    TokenTIS,
)
from palestra.rl.objective import Objective, loss_terms
from palestra.rl.ratio import proximal_loglinear
from palestra.rl.settings_algorithm import AlgorithmSettings
from palestra.rl.surrogates import PPOClip, Reinforce

OFF = golden("offpolicy")
DECOUPLED = [name for name in OFF if name.startswith("offpolicy/decoupled")]
CLIP = PPOClip(0.2, 0.2, None)


def correction_of(name: str) -> Correction:
    """From the name that a golden case has for it."""
    numbers = [float(number) for number in re.findall(r"(?<![a-z])\d+(?:\.\d+)?|(?<=cap)\d+(?:\.\d+)?", name)]
    known: dict[str, Any] = {
        "token_tis_cap": TokenTIS,
        "icepop": IcePop,
        "seq_tis_cap": lambda cap: ProductTIS("sequence", cap),
        "turn_product_tis_cap": lambda cap: ProductTIS("turn", cap),
        "geo_mask_weights_one": lambda low, high: GeometricMask("sequence", low, high, None),
        "seq_mask_tis_geo": lambda low, high: GeometricMask("sequence", low, high),
        "turn_geo_mask_token_tis": lambda low, high: GeometricMask("turn", low, high),
    }
    return known[re.sub(r"_?\d+(?:\.\d+)?", "", name)](*numbers)  # type: ignore[no-any-return]


def acting(corrected: Corrected) -> torch.Tensor:
    """M * c."""
    kept = corrected.kept
    return corrected.weights if kept is None else torch.where(kept, corrected.weights, torch.zeros(()).double())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("split", MICRO_BATCHES)
@pytest.mark.parametrize("name", DECOUPLED)
def test_every_correction_has_the_golden_weights_loss_and_gradient(name: str, split: str, dtype: torch.dtype) -> None:
    case, tolerance = OFF[name], TOLERANCE[dtype]
    correction = correction_of(case["conventions"]["weight"])
    turns = {"turn": case["inputs"]["turn"]} if "turn" in case["inputs"] else {}
    for poison in POISONS:
        gathered = Gathered(dtype, poison, **turns)
        weights = gathered.table(acting(correction.of(gathered.mismatch())))
        np.testing.assert_allclose(weights, case["expected"]["weights"], rtol=tolerance, atol=tolerance)
        found = gathered.run(Objective(CLIP, correction, mode="decoupled"), MICRO_BATCHES[split])
        assert found.loss == pytest.approx(case["expected"]["loss"], rel=tolerance, abs=tolerance)
        np.testing.assert_allclose(found.gradient, case["expected"]["grad_new_logp"], rtol=tolerance, atol=tolerance)
        assert not found.gradient[~gathered.mask].any()
        assert found.metrics["ess_fraction"] == pytest.approx(case["expected"]["ess_fraction"], rel=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("split", MICRO_BATCHES)
def test_bypass_takes_the_ratio_to_the_sampler_and_corrects_nothing_on_top(split: str, dtype: torch.dtype) -> None:
    case, tolerance = OFF["offpolicy/bypass_ppo"], TOLERANCE[dtype]
    for poison in POISONS:
        # what it is given as old is not what it takes the ratio to
        found = Gathered(dtype, poison).run(Objective(CLIP, None, mode="bypass"), MICRO_BATCHES[split])
        assert found.loss == pytest.approx(case["expected"]["loss"], rel=tolerance)
        assert abs(found.loss - case["must_not_equal"]["loss"]) > 5e-4
        np.testing.assert_allclose(found.gradient, case["expected"]["grad_new_logp"], rtol=tolerance, atol=tolerance)
        metrics = case["expected"]["metrics"]
        assert found.metrics["clip_high_fraction"] == pytest.approx(metrics["clip_frac_high"])
        assert found.metrics["clip_low_fraction"] == pytest.approx(metrics["clip_frac_low"])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("split", MICRO_BATCHES)
def test_one_step_needs_no_old_policy(split: str, dtype: torch.dtype) -> None:
    case, tolerance = OFF["offpolicy/one_step_token_tis_cap2"]["expected"], TOLERANCE[dtype]
    for poison in POISONS:
        gathered = Gathered(dtype, poison)
        found = gathered.run(Objective(CLIP), MICRO_BATCHES[split], old=None)
        assert found.loss == pytest.approx(case["loss"], rel=tolerance)
        np.testing.assert_allclose(found.gradient, case["grad_new_logp"], rtol=tolerance, atol=tolerance)
        mismatch = gathered.mismatch()
        now = Mismatch(mismatch.log_drift, mismatch.log_drift, *(getattr(mismatch, name) for name in NAMES))
        weights = gathered.table(TokenTIS(2.0).of(now).weights)
        np.testing.assert_allclose(weights, case["weights"], rtol=tolerance, atol=tolerance)


NAMES = ("advantages", "trajectory", "turn")


@pytest.mark.parametrize("dtype", DTYPES)
def test_opsm_keeps_and_drops_whole_trajectories(dtype: torch.dtype) -> None:
    case = OFF["offpolicy/opsm_delta0.06"]
    for poison in POISONS:
        gathered = Gathered(dtype, poison)
        mismatch = gathered.mismatch()
        away = gathered.segments("sequence").mean(-mismatch.log_drift)
        np.testing.assert_allclose(away, case["expected"]["seq_kl"][:3], rtol=1e-5)
        kept = OPSM(case["conventions"]["delta"]).of(mismatch).kept
        assert kept is not None
        assert kept.numpy().tolist() == [
            bool(case["expected"]["keep"][row]) for row in gathered.part(gathered.row, ALL)
        ]
    strict = OPSM(0.05).of(mismatch).kept
    assert strict is not None
    # row c has a negative advantage and 0.057; row a would be far away too, but its advantage is positive
    assert gathered.table(strict)[2].any() == False  # noqa: E712  # numpy's own
    assert gathered.table(strict)[:2].sum() == 7


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("split", MICRO_BATCHES)
def test_the_old_policy_is_interpolated_by_the_age_of_each_token(split: str, dtype: torch.dtype) -> None:
    case, tolerance = OFF["offpolicy/proximal_loglinear"], TOLERANCE[dtype]
    version = case["conventions"]["v_cur"]
    for poison in POISONS:
        gathered = Gathered(dtype, poison, token_version=case["inputs"]["token_version"])
        new, mu, versions = (gathered.part(t, ALL) for t in (gathered.new, gathered.mu, gathered.version))
        proximal = proximal_loglinear(new, mu, versions, version)
        assert not proximal.requires_grad
        expected = np.array(case["expected"]["proximal_logp"])
        np.testing.assert_allclose(gathered.table(proximal), expected, rtol=tolerance, atol=tolerance)
        gathered.old = torch.from_numpy(expected).to(dtype)
        given = gathered.run(Objective(CLIP, mode="decoupled"), MICRO_BATCHES[split])
        again = Gathered(dtype, poison, token_version=case["inputs"]["token_version"])
        made = again.run(Objective(CLIP, mode="decoupled_loglinear"), MICRO_BATCHES[split], old=None, version=version)
        assert made.loss == pytest.approx(given.loss, rel=tolerance)
        np.testing.assert_allclose(made.gradient, given.gradient, rtol=tolerance, atol=tolerance)


def test_tokens_of_the_newest_weights_are_their_own_old_policy() -> None:
    new, mu = torch.tensor([-1.0, -1.0, -1.0]), torch.tensor([-2.0, -2.0, -2.0])
    found = proximal_loglinear(new, mu, torch.tensor([10, 9, 8]), 10)
    assert found.tolist() == [-2.0, -2.0, -1.5]


def test_age_is_counted_in_the_versions_that_engines_had() -> None:
    """With four updates a batch, versions 8, 4 and 0 lie one publish apart."""
    new, mu = torch.tensor([-1.0, -1.0, -1.0, -1.0]), torch.tensor([-2.0, -2.0, -2.0, -2.0])
    found = proximal_loglinear(new, mu, torch.tensor([8, 4, 0, 1]), 8, 4)
    assert found.tolist() == [-2.0, -2.0, -1.5, -1.5]  # one batch was shorter: its versions round up
    algorithm = make_algorithm(AlgorithmSettings(mode="decoupled_loglinear", updates_per_batch=2, epochs=2), 64)
    assert algorithm.objective.updates_per_version == 4


def mismatch_of(rho: list[float], trajectory: list[int] | None = None, turn: list[int] | None = None) -> Mismatch:
    log_rho = torch.tensor(rho, dtype=torch.float64).log()
    zeros = [0] * len(rho)
    which = (torch.tensor(trajectory or zeros), torch.tensor(turn or zeros))
    return Mismatch(log_rho, log_rho, torch.full_like(log_rho, -1.0), *which)


@pytest.mark.parametrize(
    ("correction", "weights"),
    [
        (TokenTIS(2.0), [0.25, 1.5, 2.0]),
        (TokenClamp(0.5, 2.0), [0.5, 1.5, 2.0]),
        (IcePop(0.5, 5.0), [0.0, 1.5, 3.0]),
        (ProductTIS("sequence", 2.0), [1.125] * 3),
        (ProductTIS("turn", 2.0), [0.375, 0.375, 2.0]),
        (ProductMask("turn", 2.0), [0.375, 0.375, 0.0]),
        (ProductMask("turn", 4.0, 0.5), [0.0, 0.0, 3.0]),
        (ProductMask("sequence", 2.0), [1.125] * 3),
        (GeometricTIS("turn", 2.0), [0.375**0.5, 0.375**0.5, 2.0]),
        (GeometricTIS("sequence", 2.0), [1.125 ** (1 / 3)] * 3),
        (GeometricMask("turn", 0.5, 2.0), [0.25, 1.5, 0.0]),
        (GeometricMask("sequence", 0.5, 2.0, None), [1.0] * 3),
        (GeometricMask("sequence", 0.5, 1.03, None), [0.0] * 3),
        (OPSM(0.1), [1.0] * 3),
    ],
)
def test_weights_by_hand(correction: Correction, weights: list[float]) -> None:
    mismatch = mismatch_of([0.25, 1.5, 3.0], turn=[0, 0, 1])
    np.testing.assert_allclose(acting(correction.of(mismatch)), weights, rtol=1e-12)


def test_a_turn_belongs_to_its_trajectory_whatever_the_numbers_are() -> None:
    mismatch = mismatch_of([2.0, 3.0, 5.0, 7.0], [7, 2, 7, 2], [0, 1, 1, 0])
    found = ProductTIS("turn", math.inf).of(mismatch).weights
    np.testing.assert_allclose(found, [2.0, 3.0, 5.0, 7.0])
    np.testing.assert_allclose(ProductTIS("sequence", math.inf).of(mismatch).weights, [10.0, 21.0, 10.0, 21.0])


def test_the_product_dies_with_length_and_the_mean_does_not() -> None:
    for tokens in (70, 1000):
        mismatch = mismatch_of([1.01] * tokens)
        assert float(ProductTIS("sequence", math.inf).of(mismatch).weights[0]) == pytest.approx(1.01**tokens)
        assert float(GeometricTIS("sequence", 2.0).of(mismatch).weights[0]) == pytest.approx(1.01)
        kept = ProductMask("sequence", 2.0).of(mismatch).kept
        assert kept is not None
        assert not kept.any()


def test_a_weight_has_no_gradient_and_does_not_overflow() -> None:
    log_rho = torch.tensor([400.0, -400.0, 0.0])
    zeros = torch.zeros(3, dtype=torch.int64)
    mismatch = Mismatch(log_rho, log_rho, torch.ones(3), zeros, zeros)
    for correction in (TokenTIS(), TokenClamp(), IcePop(), ProductTIS("turn"), ProductMask("sequence", 2.0)):
        assert bool(torch.isfinite(correction.of(mismatch).weights).all())
    mu, new = torch.tensor([-1.0]), torch.tensor([-0.5], requires_grad=True)
    one = torch.ones(1)
    tokens = ActionTokens(one, one, mu, *[torch.zeros(1, dtype=torch.int64)] * 3)
    loss_terms(Objective(Reinforce(), TokenTIS(5.0)), new, tokens).loss.backward()
    assert new.grad is not None
    assert float(new.grad) == pytest.approx(-math.exp(0.5))  # c * -1, without the derivative of c
