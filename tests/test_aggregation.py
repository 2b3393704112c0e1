"""The weight of a token: seven modes, counted over the whole step, before anything is rejected."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from learning_support import POISONS, golden, poisoned
from objective_support import DTYPES, MICRO_BATCHES, TOLERANCE, Gathered, tokens_of_one
from palestra.rl.aggregation import Aggregation, token_weights
from palestra.rl.corrections import Corrected, Mismatch
from palestra.rl.objective import Objective, loss_terms
from palestra.rl.surrogates import PPOClip, Step

AGG = golden("aggregation")
MODES = list(AGG["agg/modes"]["expected"])
ROWS = np.repeat(np.arange(4)[:, None], 7, axis=1).astype(np.int32)


def aggregation(mode: str, horizon: int = 16) -> Aggregation:
    return Aggregation(mode, horizon if mode.endswith("norm") else None)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Given:
    """A surrogate whose losses are known beforehand, with a gradient of 1 each."""

    losses: Tensor

    def per_token(self, step: Step) -> tuple[Tensor, dict[str, Tensor]]:
        return self.losses + (step.logprobs - step.logprobs.detach()), {}


@dataclass(frozen=True)
class Keeping:
    """A correction that keeps these."""

    kept: Tensor

    def of(self, mismatch: Mismatch) -> Corrected:
        return Corrected(torch.ones_like(mismatch.log_rho), self.kept)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_has_the_golden_weights(mode: str, poison: float, dtype: torch.dtype) -> None:
    case = AGG["agg/modes"]
    mask = np.array(case["inputs"]["mask"], bool)
    weights = token_weights(aggregation(mode), ROWS[mask], ROWS[mask], (ROWS // 2)[mask])
    np.testing.assert_allclose(weights, np.array(case["expected"][mode]["weights"])[mask], rtol=1e-12)
    losses = torch.tensor(poisoned(case["inputs"]["per_token_loss"], poison)[mask], dtype=dtype)
    found = float((torch.tensor(weights, dtype=dtype) * losses).sum())
    assert found == pytest.approx(case["expected"][mode]["loss"], rel=TOLERANCE[dtype])


def test_rows_without_a_trainable_token_are_not_counted() -> None:
    case, live = AGG["agg/modes_counting_masked_rows"], AGG["agg/modes"]
    for mode, with_masked in case["expected"].items():
        # the other convention divides by four rows where there are three
        assert with_masked * 4 / 3 == pytest.approx(live["expected"][mode]["loss"])


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_ranks_and_micro_batches_sum_to_the_step(mode: str) -> None:
    case = AGG[f"agg/data_parallel_{mode}"]
    mask = np.array(case["inputs"]["mask"], bool)
    weights = np.zeros(mask.shape)
    weights[mask] = token_weights(aggregation(mode), ROWS[mask], ROWS[mask], (ROWS // 2)[mask])
    for poison in POISONS:
        losses = np.where(mask, poisoned(case["inputs"]["per_token_loss"], poison), 0.0)
        per_row = (weights * losses).sum(1)
        # the published numbers are scaled by the two ranks, whose gradients they average; here ranks are summed
        expected = case["expected"]["micro_batch_losses"]
        np.testing.assert_allclose(2 * per_row, [*expected["rank0"], *expected["rank1"]], rtol=1e-12)
        assert per_row.sum() == pytest.approx(case["expected"]["optimiser_step_loss"])
        assert abs(per_row.sum() - case["must_not_equal"]["optimiser_step_loss"]) > 1e-3


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_rejected_token_leaves_the_numerator_only(dtype: torch.dtype) -> None:
    case = AGG["agg/rejection_keeps_denominator"]
    mask, kept = np.array(case["inputs"]["mask"], bool), np.array(case["inputs"]["kept"], bool)[mask_of(case)]
    for poison in POISONS:
        losses = torch.tensor(poisoned(case["inputs"]["per_token_loss"], poison)[mask], dtype=dtype)
        logprobs = torch.zeros(13, dtype=dtype, requires_grad=True)
        tokens = tokens_of_one(torch.full((13,), 1 / 13, dtype=dtype), torch.ones(13, dtype=dtype), torch.zeros(13))
        terms = loss_terms(Objective(Given(losses), Keeping(torch.from_numpy(kept))), logprobs, tokens)
        terms.loss.backward()
        assert float(terms.loss.detach()) == pytest.approx(case["expected"]["loss"], rel=TOLERANCE[dtype])
        assert abs(float(terms.loss.detach()) - case["must_not_equal"]["loss"]) > 1e-3
        assert logprobs.grad is not None
        np.testing.assert_allclose(logprobs.grad, kept / 13, rtol=1e-6)
        assert float(terms.sums["rejected"]) == 13 - kept.sum()


def mask_of(case: dict[str, dict[str, list[list[int]]]]) -> np.ndarray:
    return np.array(case["inputs"]["mask"], bool)


def test_rejecting_a_poisoned_loss_leaves_no_trace() -> None:
    for poison in POISONS:
        logprobs = torch.tensor([-1.0, -1.0], requires_grad=True)
        tokens = tokens_of_one(torch.ones(2), torch.ones(2), torch.full((2,), -1.0))
        keeping = Objective(Given(torch.tensor([0.5, poison])), Keeping(torch.tensor([True, False])))
        terms = loss_terms(keeping, logprobs, tokens)
        terms.loss.backward()
        assert logprobs.grad is not None
        assert (float(terms.loss.detach()), logprobs.grad.tolist()) == (0.5, [1.0, 0.0])


@pytest.mark.parametrize("mode", MODES)
def test_the_kl_and_the_entropy_have_the_weights_of_the_surrogate(mode: str) -> None:
    how = aggregation(mode)
    plain, drifted = (
        Gathered(torch.float64, float("nan"), how).run(
            Objective(
                PPOClip(), None, aggregation=how, kl="k1" if coefficient == 0 else "k2", kl_coefficient=coefficient
            ),
            MICRO_BATCHES["row by row"],
        )
        for coefficient in (0.0, 0.5)
    )
    gathered = Gathered(torch.float64, float("nan"), how)
    x = gathered.part(gathered.new.detach() - gathered.ref, [0, 1, 2, 3])
    expected = 0.5 * float((gathered.part(gathered.weights, [0, 1, 2, 3]) * x.square() / 2).sum())
    assert drifted.loss - plain.loss == pytest.approx(expected, abs=1e-12)


def test_splitting_a_trajectory_into_rows_does_not_change_its_weight() -> None:
    whole = np.zeros(6, np.int32)
    split = np.array([0, 0, 0, 0, 1, 1], np.int32)
    other = np.full(3, 2, np.int32)
    trajectories = np.array([0] * 6 + [1] * 3, np.int32)
    for mode in MODES:
        if mode == "seq-mean-token-mean":  # it counts rows, as published
            continue
        one, two = (
            token_weights(aggregation(mode), np.concatenate([rows, other]), trajectories, np.zeros(9, np.int32))
            for rows in (whole, split)
        )
        assert np.array_equal(one, two)


@pytest.mark.parametrize(
    ("mode", "horizon", "loss"),
    [("seq-mean-token-mean", None, 0.0), ("token-mean", None, 0.6), ("seq-mean-token-sum-norm", 10, 0.3)],
)
def test_the_aggregation_decides_who_learns(mode: str, horizon: int | None, loss: float) -> None:
    rows = np.array([0] * 2 + [1] * 8, np.int32)
    weights = token_weights(Aggregation(mode, horizon), rows, rows, rows)  # type: ignore[arg-type]
    assert float((weights * np.array([-1.0] * 2 + [1.0] * 8)).sum()) == pytest.approx(loss)
