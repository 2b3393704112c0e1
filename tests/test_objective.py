"""The one weight path, against published formulas in plain float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from learning_support import POISONS, golden
from objective_support import ALL, DTYPES, MICRO_BATCHES, TOLERANCE, Found, Gathered, tokens_of_one
from palestra.rl.aggregation import Aggregation
from palestra.rl.corrections import TokenTIS
from palestra.rl.objective import Objective, loss_terms
from palestra.rl.ratio import log_ratio, segment_log_ratio
from palestra.rl.segments import Level
from palestra.rl.surrogates import (
    CISPOTwoSided,
    CISPOUpper,
    DPPOKl,
    DPPOTotalVariation,
    ImportanceSampling,
    PPOClip,
    Reinforce,
    Step,
    Surrogate,
)

POLICY, OFF = golden("policy"), golden("offpolicy")
LOSSES = {name: case for name, case in POLICY.items() if "loss" in case["conventions"]}
PLAIN_GSPO = "policy/gspo_turn_level_advantage"  # not in the token form, which differs where advantages do


def in_pure_functions_only(name: str) -> bool:
    """What a run refuses or has no use for."""
    how = LOSSES[name]["conventions"]
    return name == PLAIN_GSPO or (how["loss"].startswith("gspo") and how["aggregation"] == "token-sum")


def surrogate_of(how: dict[str, Any]) -> tuple[Surrogate, Level]:
    """The surrogate and the level of the ratio that a case's conventions ask for."""
    kind = how["loss"]
    if kind in ("gspo", "gspo_token"):
        return PPOClip(how["clip_low"], how["clip_high"], None), "sequence"
    surrogates = {
        "ppo": lambda: PPOClip(how["clip_low"], how["clip_high"], None),
        "ppo_dual": lambda: PPOClip(how["clip_low"], how["clip_high"], how["dual_c"]),
        "ppo_delta": lambda: PPOClip(how["clip_low"], how["clip_high"], how["delta"]),
        "cispo": lambda: CISPOTwoSided(how["clip_low"], how["clip_high"]),
        "cispo_upper": lambda: CISPOUpper(how["ratio_max"]),
        "dppo_tv": lambda: DPPOTotalVariation(how["tv_low"], how["tv_high"], how["ratio_max"]),
        "reinforce": Reinforce,
        "-ratio*advantage": ImportanceSampling,
    }
    return surrogates[kind](), "token"


def aggregation_of(how: dict[str, Any]) -> Aggregation:
    return Aggregation(how["aggregation"], how.get("horizon"))


def overrides_of(case: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in case["inputs"].items() if key != "use"}


def per_token(gathered: Gathered, surrogate: Surrogate, level: Level, plain: bool = False) -> torch.Tensor:
    """[N] losses of the whole batch, by the pure functions alone: also where a run would refuse the combination."""
    new, old = gathered.part(gathered.new, ALL), gathered.part(gathered.old, ALL)
    segments = None if level == "token" else gathered.segments(level)
    found = segment_log_ratio(new, old, segments) if plain and segments else log_ratio(new, old, segments)
    losses, _ = surrogate.per_token(Step(new, old, found, gathered.part(gathered.advantages, ALL)))
    return losses


def check(found: Found, expected: dict[str, Any], mask: np.ndarray, tolerance: float) -> None:
    assert found.loss == pytest.approx(expected["loss"], rel=tolerance, abs=tolerance)
    np.testing.assert_allclose(found.gradient, expected["grad_new_logp"], rtol=tolerance, atol=tolerance)
    assert not found.gradient[~mask].any()
    for key, value in expected.get("metrics", {}).items():
        if key != "seq_ratio":
            assert found.metrics[_ours(key)] == pytest.approx(value, abs=1e-6), key


def _ours(key: str) -> str:
    return key.removesuffix("_tokens").replace("_weight", "").replace("_frac_", "_").replace("_frac", "") + "_fraction"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("split", MICRO_BATCHES)
@pytest.mark.parametrize("name", [name for name in LOSSES if not in_pure_functions_only(name)])
def test_every_surrogate_has_the_golden_loss_gradient_and_metrics(name: str, split: str, dtype: torch.dtype) -> None:
    case = LOSSES[name]
    how = case["conventions"]
    surrogate, level = surrogate_of(how)
    objective = Objective(surrogate, None, ratio=level, aggregation=aggregation_of(how))
    for poison in POISONS:
        gathered = Gathered(dtype, poison, aggregation_of(how), **overrides_of(case))
        found = gathered.run(objective, MICRO_BATCHES[split])
        check(found, case["expected"], gathered.mask, TOLERANCE[dtype])
        if "must_not_equal" in case:
            assert abs(found.loss - case["must_not_equal"]["loss"]) > 1e-3


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LOSSES)
def test_the_pure_functions_compute_every_case(name: str, dtype: torch.dtype) -> None:
    case = LOSSES[name]
    surrogate, level = surrogate_of(case["conventions"])
    expected, tolerance = case["expected"], TOLERANCE[dtype]
    for poison in POISONS:
        gathered = Gathered(dtype, poison, aggregation_of(case["conventions"]), **overrides_of(case))
        losses = per_token(gathered, surrogate, level, plain=case["conventions"]["loss"] == "gspo")
        loss = (gathered.part(gathered.weights, ALL) * losses).sum()
        loss.backward()
        assert float(loss.detach()) == pytest.approx(expected["loss"], rel=tolerance, abs=tolerance)
        np.testing.assert_allclose(gathered.new.grad, expected["grad_new_logp"], rtol=tolerance, atol=tolerance)
        if "per_token_loss" in expected:
            np.testing.assert_allclose(
                gathered.table(losses), expected["per_token_loss"], rtol=tolerance, atol=tolerance
            )
        ratios = expected.get("seq_ratio") or expected.get("metrics", {}).get("seq_ratio")
        if ratios:
            drift = gathered.part(gathered.new.detach() - gathered.old, ALL)
            found = gathered.segments("sequence").mean(drift).exp()
            np.testing.assert_allclose(found, ratios[: len(found)], rtol=tolerance)


def test_the_token_form_keeps_the_sign_of_each_turn_where_the_plain_one_smears_it() -> None:
    case = POLICY[PLAIN_GSPO]
    gradients = {}
    for plain in (True, False):
        gathered = Gathered(torch.float64, float("nan"), Aggregation("seq-mean-token-mean"), **overrides_of(case))
        losses = per_token(gathered, PPOClip(0.2, 0.28, None), "sequence", plain)
        (gathered.part(gathered.weights, ALL) * losses).sum().backward()
        gradients[plain] = gathered.part(gathered.new.grad, ALL).numpy()  # type: ignore[arg-type]
    advantages = gathered.part(gathered.advantages, ALL).numpy()
    assert (gradients[False] * advantages < 0).all()
    assert not (gradients[True] * advantages < 0).all()


def test_a_turn_has_one_ratio_and_is_clipped_as_one() -> None:
    turns = [[0, 0, -1, -1, 1, 1, -1], [0, -1, 1, 1, -1, -1, -1], [0, 0, 0, -1, 1, 1, 1], [-1] * 7]
    gathered = Gathered(torch.float64, float("nan"), turn=turns)
    drift = gathered.part(gathered.new.detach() - gathered.old, ALL)
    ratios = gathered.table(gathered.segments("turn").spread(gathered.segments("turn").mean(drift)).exp())
    assert ratios[0, 0] == ratios[0, 1] == pytest.approx((1.1 * 0.7) ** 0.5)
    assert ratios[0, 4] == ratios[0, 5] == pytest.approx((1.5 * 0.95) ** 0.5)
    assert ratios[2, 4] == pytest.approx((0.6 * 2.5 * 1.0) ** (1 / 3))
    found = gathered.run(Objective(PPOClip(0.2, 0.1, None), None, ratio="turn"), MICRO_BATCHES["row by row"])
    # A = 1: sqrt(1.5 * 0.95) = 1.19 is above 1.1, so both tokens of the turn are clipped, though 0.95 is not
    assert (found.gradient[0, 4], found.gradient[0, 5]) == (0.0, 0.0)
    assert found.gradient[0, 0] == pytest.approx(-ratios[0, 0] / 13)
    assert found.metrics["clip_high_fraction"] == pytest.approx(2 / 13)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("poison", POISONS)
def test_on_the_first_step_the_ratio_is_exactly_one_and_still_has_a_gradient(dtype: torch.dtype, poison: float) -> None:
    case = POLICY["policy/on_policy_first_step"]
    for level in ("token", "turn", "sequence"):
        gathered = Gathered(dtype, poison, Aggregation(), new_logp=case["inputs"]["new_logp"])
        objective = Objective(PPOClip(0.2, 0.2, None), None, ratio=level)  # type: ignore[arg-type]
        found = gathered.run(objective, MICRO_BATCHES["one"], old=None)
        ratios = [found.metrics[f"ratio_{which}"] for which in ("mean", "min", "max")]
        assert (ratios, found.metrics["clip_high_fraction"]) == ([1.0, 1.0, 1.0], 0.0)
        check(found, case["expected"], gathered.mask, TOLERANCE[dtype])


@pytest.mark.parametrize("split", MICRO_BATCHES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_diagnostics_have_the_golden_values(dtype: torch.dtype, split: str) -> None:
    for poison in POISONS:
        found = Gathered(dtype, poison).run(Objective(), MICRO_BATCHES[split])
        for key, value in POLICY["policy/diagnostics"]["expected"].items():
            assert found.metrics[key] == pytest.approx(value, rel=1e-5, abs=TOLERANCE[dtype]), key


@pytest.mark.parametrize(
    ("ratio", "advantage", "dual", "loss"),
    [
        (1.25, 1, None, -1.25),
        (1.3, 1, None, -1.28),
        (0.7, -1, None, 0.8),
        (1.3, -1, None, 1.3),
        (5, -1, None, 5),
        (5, -1, 3.0, 3),
    ],
)
def test_each_side_is_clipped_by_its_own_bound(ratio: float, advantage: float, dual: float | None, loss: float) -> None:
    one = torch.tensor([1.0], dtype=torch.float64)
    found, _ = PPOClip(0.2, 0.28, dual).per_token(Step(one, one, torch.log(ratio * one), advantage * one))
    assert float(found) == pytest.approx(loss)


@pytest.mark.parametrize(
    ("new", "old", "advantage", "kept"),
    [
        (0.5, 0.2, 1.0, False),  # KL 0.19, and further in the direction of the advantage
        (0.5, 0.2, -1.0, True),  # the gradient brings it back
        (0.2, 0.5, -1.0, False),
        (0.2, 0.5, 1.0, True),
        (0.004, 0.001, 1.0, True),  # four times likelier and still rare: KL 0.002
        (1.0, 1.0, 1.0, True),
        (0.0, 0.5, -1.0, False),  # no infinity
    ],
)
def test_divergence_is_of_the_probability_and_stops_only_what_goes_on_the_same_way(
    new: float, old: float, advantage: float, kept: bool
) -> None:
    logprobs = torch.tensor([new], dtype=torch.float64).log().clamp(min=-60).requires_grad_()
    before = torch.tensor([old], dtype=torch.float64).log()
    step = Step(logprobs, before, (logprobs - before).clamp(-20, 20), torch.tensor([advantage], dtype=torch.float64))
    for surrogate in (DPPOKl(0.05, 0.05), DPPOTotalVariation(0.2, 0.2)):
        losses, sums = surrogate.per_token(step)
        (gradient,) = torch.autograd.grad(losses.sum(), logprobs)
        assert bool(torch.isfinite(losses).all())
        assert bool(gradient.any()) == kept
        assert float(sums["modified"]) == float(not kept)


def test_several_steps_take_the_weight_of_the_old_policy_and_the_ratio_of_the_new() -> None:
    new, old, mu = (torch.tensor([value], dtype=torch.float64) for value in (-0.5, -1.1, -1.0))
    tokens = tokens_of_one(torch.ones(1).double(), torch.ones(1).double(), mu)
    terms = loss_terms(Objective(PPOClip(0.2, 5.0, None), mode="decoupled"), new, tokens, old=old)
    assert float(terms.loss) == pytest.approx(-0.9048374 * 1.8221188)
    with pytest.raises(ValueError, match="compute and pass `old`"):
        loss_terms(Objective(mode="decoupled"), new, tokens)
    with pytest.raises(ValueError, match="pass that of the policy's weights"):
        loss_terms(Objective(mode="decoupled_loglinear"), new, tokens)


def test_staleness_is_counted_by_token() -> None:
    versions = [[7, 7, 0, 0, 9, 9, 0], [8, 0, 8, 8, 0, 0, 0], [5, 5, 5, 0, 7, 7, 7], [0] * 7]
    gathered = Gathered(torch.float32, float("nan"), token_version=versions)
    found = gathered.run(Objective(), MICRO_BATCHES["row by row"], version=10)
    ages = 10 - np.array(versions)[gathered.mask]
    assert found.metrics["staleness_mean"] == pytest.approx(ages.mean())
    assert found.metrics["staleness_max"] == ages.max()


@pytest.mark.parametrize("mode", ["bypass", "decoupled_loglinear"])
def test_the_mismatch_is_shown_also_where_the_ratio_is_to_the_sampler(mode: str) -> None:
    objective = Objective(PPOClip(), None, mode=mode)  # type: ignore[arg-type]
    gathered = Gathered(torch.float64, float("nan"), token_version=[[10] * 7] * 4)
    found = gathered.run(objective, MICRO_BATCHES["row by row"], old=None, version=10)
    drift = gathered.part(gathered.new.detach() - gathered.mu, ALL).abs()
    assert found.metrics["log_rho_abs_mean"] == pytest.approx(float(drift.mean()))
    assert found.metrics["log_rho_abs_max"] == pytest.approx(float(drift.max()))


def test_extreme_disagreement_stays_finite() -> None:
    logprobs = torch.tensor([-1.0, -100.0], requires_grad=True)
    tokens = tokens_of_one(torch.ones(2), torch.tensor([1.0, -1.0]), torch.tensor([-200.0, -0.1]))
    for mode, correction in (("on_policy", TokenTIS()), ("bypass", None)):
        terms = loss_terms(Objective(PPOClip(), correction, mode=mode), logprobs, tokens)  # type: ignore[arg-type]
        (gradient,) = torch.autograd.grad(terms.loss, logprobs)
        assert bool(torch.isfinite(terms.loss)), mode
        assert bool(torch.isfinite(gradient).all()), mode
        assert all(bool(torch.isfinite(value)) for value in terms.sums.values()), mode
