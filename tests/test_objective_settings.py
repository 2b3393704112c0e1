"""From [algorithm] to the objective: what each setting does, and what is refused at the start, with a reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
import torch

from objective_support import MICRO_BATCHES, Gathered
from palestra.envs.errors import ConfigError
from palestra.rl.aggregation import Aggregation
from palestra.rl.algorithms.make_objective import make_objective
from palestra.rl.corrections import (
    OPSM,
    GeometricMask,
    GeometricTIS,
    IcePop,
    ProductMask,
    ProductTIS,
    TokenClamp,
    TokenTIS,
)
from palestra.rl.objective import Objective
from palestra.rl.settings_objective import ObjectiveSettings
from palestra.rl.surrogates import (
    CISPOTwoSided,
    CISPOUpper,
    DPPOKl,
    DPPOTotalVariation,
    ImportanceSampling,
    PPOClip,
    Reinforce,
)

PAGE = Path(__file__).resolve().parents[1] / "docs" / "algorithms" / "objectives.md"


def made(**values: Any) -> Objective:
    return make_objective(ObjectiveSettings(**values))


def test_the_defaults_are_those_of_the_objective() -> None:
    assert made() == Objective()


@pytest.mark.parametrize(
    ("values", "surrogate"),
    [
        ({"clip_low": 0.1, "clip_high": 0.3, "dual_clip": None}, PPOClip(0.1, 0.3, None)),
        ({"dual_clip": "off"}, PPOClip(0.2, 0.28, None)),
        ({"surrogate": "cispo_two_sided", "clip_high": 0.5}, CISPOTwoSided(0.2, 0.5)),
        ({"surrogate": "cispo_upper", "cispo_max_ratio": 5.0}, CISPOUpper(5.0)),
        ({"surrogate": "reinforce"}, Reinforce()),
        ({"surrogate": "importance_sampling"}, ImportanceSampling()),
        ({"surrogate": "dppo_tv"}, DPPOTotalVariation(0.2, 0.2, 20.0)),
        ({"surrogate": "dppo_kl", "dppo_low": 0.1, "dppo_max_ratio": "off"}, DPPOKl(0.1, 0.05, None)),
    ],
)
def test_each_surrogate_can_be_chosen(values: dict[str, Any], surrogate: object) -> None:
    assert made(**values).surrogate == surrogate


BAND = {"correction_low": 0.5, "correction_high": 2.0}


@pytest.mark.parametrize(
    ("values", "correction"),
    [
        ({"correction": "none"}, None),
        ({"tis_cap": None}, None),
        ({"tis_cap": "off"}, None),
        ({"tis_cap": 3.0}, TokenTIS(3.0)),
        ({"correction": "token_clamp"} | BAND, TokenClamp(0.5, 2.0)),
        ({"correction": "icepop"} | BAND, IcePop(0.5, 2.0)),
        ({"correction": "turn_tis"}, ProductTIS("turn", 2.0)),
        ({"correction": "seq_tis", "tis_cap": 3.0}, ProductTIS("sequence", 3.0)),
        ({"correction": "turn_mask", "correction_high": 3.0}, ProductMask("turn", 3.0, 0.0)),
        ({"correction": "seq_mask"} | BAND, ProductMask("sequence", 2.0, 0.5)),
        ({"correction": "turn_geo_tis"}, GeometricTIS("turn", 2.0)),
        ({"correction": "seq_geo_tis"}, GeometricTIS("sequence", 2.0)),
        ({"correction": "turn_geo_mask"} | BAND, GeometricMask("turn", 0.5, 2.0, 2.0)),
        ({"correction": "seq_geo_mask", "tis_cap": "off"} | BAND, GeometricMask("sequence", 0.5, 2.0, None)),
        ({"correction": "opsm", "opsm_delta": 0.1}, OPSM(0.1)),
    ],
)
def test_each_correction_can_be_chosen(values: dict[str, Any], correction: object) -> None:
    assert made(**values).correction == correction


def test_the_other_settings_reach_the_objective() -> None:
    objective = made(ratio="turn", mode="decoupled", kl="k2", kl_coefficient=0.1, entropy_coefficient=0.2)
    assert (objective.ratio, objective.mode, objective.kl) == ("turn", "decoupled", "k2")
    assert (objective.kl_in_loss, objective.kl_in_reward, objective.learns_without_signal) == (True, False, True)
    in_reward = made(kl="reward_k1", kl_coefficient=0.1)
    assert (in_reward.kl_in_loss, in_reward.kl_in_reward, in_reward.learns_without_signal) == (False, True, False)
    off = made(kl="reward_k1")
    assert (off.kl_in_loss, off.kl_in_reward, off.learns_without_signal) == (False, False, False)
    constant = made(aggregation="seq-mean-token-sum-norm", length_norm_tokens=512, count_without_signal=True)
    assert constant.aggregation == Aggregation("seq-mean-token-sum-norm", 512, True)


def test_what_is_off_stays_off_through_a_file() -> None:
    off = ObjectiveSettings(dual_clip=None, tis_cap=None, dppo_max_ratio=None)
    written = {name: value for name, value in off.model_dump(mode="json").items() if value is not None}
    assert written["dual_clip"] == "off"
    assert ObjectiveSettings(**written) == off


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"mode": "bypass"}, "already corrects"),
    ({"mode": "bypass", "correction": "opsm", "opsm_delta": 0.1}, "already corrects"),
    ({"mode": "decoupled", "surrogate": "reinforce"}, "importance_sampling"),
    ({"mode": "bypass", "correction": "none", "surrogate": "reinforce"}, "importance_sampling"),
    ({"mode": "decoupled_loglinear", "surrogate": "reinforce"}, "importance_sampling"),
    ({"ratio": "sequence", "aggregation": "token-sum"}, "seq-mean-token-mean"),
    ({"ratio": "turn", "aggregation": "token-sum"}, "seq-mean-token-mean"),
    ({"ratio": "sequence", "surrogate": "reinforce"}, "has no ratio"),
    ({"ratio": "turn", "surrogate": "dppo_tv"}, "probability of a token"),
    ({"kl": "k1", "kl_coefficient": 0.1}, "zero expected gradient"),
    ({"kl_coefficient": 0.1}, "algorithm.kl is none"),
    ({"dual_clip": 1.0}, "dual_clip"),
    ({"clip_low": 1.2}, "clip_low"),
    ({"surrogate": "cispo_two_sided", "clip_low": 1.2}, "clip_low"),
    ({"surrogate": "cispo_upper"}, "needs algorithm.cispo_max_ratio"),
    ({"surrogate": "cispo_upper", "cispo_max_ratio": 0.28}, "caps the ratio itself"),
    ({"surrogate": "cispo_two_sided", "cispo_max_ratio": 5.0}, "for the surrogate cispo_upper"),
    ({"dppo_low": 0.2}, "of dppo_tv and dppo_kl"),
    ({"surrogate": "dppo_tv", "dppo_max_ratio": 0.5}, "caps the ratio itself"),
    ({"tis_cap": 0.5}, "TIS cap"),
    ({"correction": "seq_tis", "tis_cap": None}, "needs a cap"),
    ({"correction": "icepop"}, "needs algorithm.correction_low and correction_high"),
    ({"correction": "seq_mask"}, "needs algorithm.correction_high"),
    ({"correction": "turn_geo_mask", "correction_low": 1.1, "correction_high": 2.0}, "holds 1"),
    ({"correction": "token_tis", "correction_high": 2.0}, "leave them out"),
    ({"correction": "opsm"}, "needs one"),
    ({"opsm_delta": 0.1}, "no other correction"),
    ({"aggregation": "seq-mean-token-sum-norm"}, "horizon"),
]


@pytest.mark.parametrize(("values", "reason"), REFUSED)
def test_known_wrong_combinations_are_refused_in_a_sentence(values: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        made(**values)
    assert len(str(caught.value).splitlines()) == 1


def test_objectives_made_by_hand_are_refused_as_well() -> None:
    with pytest.raises(ConfigError, match="reinforce"):
        Objective(correction=None, mode="imitation")
    with pytest.raises(ConfigError, match="there is none"):
        Objective(Reinforce(), mode="imitation")
    with pytest.raises(ConfigError, match="off a reward"):
        Objective(Reinforce(), None, "imitation", kl="reward_k1", kl_coefficient=0.1)
    with pytest.raises(ConfigError, match="label_smoothing"):
        Objective(label_smoothing=0.1)
    for coefficient in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="coefficient"):
            Objective(entropy_coefficient=coefficient)
    with pytest.raises(ConfigError, match="horizon"):
        Aggregation("token-mean", 10)
    with pytest.raises(ConfigError, match="use one of"):
        Aggregation("mean")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="opsm_delta"):
        OPSM(0.0)
    with pytest.raises(ConfigError, match="above 0"):
        DPPOTotalVariation(0.0, 0.1)


def test_the_page_names_every_setting_and_every_value() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for name, field in ObjectiveSettings.model_fields.items():
        assert f"`{name}`" in page, name
        for value in get_args(field.annotation) if get_origin(field.annotation) is Literal else ():
            assert f"`{value}`" in page, f"{name} = {value}"


def test_the_page_explains_every_metric_of_an_update() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for values in ({}, {"surrogate": "cispo_upper", "cispo_max_ratio": 5.0}, {"kl": "k2", "kl_coefficient": 0.1}):
        found = Gathered(torch.float32, float("nan")).run(made(**values), MICRO_BATCHES["one"], version=1)  # type: ignore[arg-type]
        for metric in found.metrics:
            assert f"`{metric}`" in page, metric
