"""Credit: what each trajectory of a group is told, and when it is told nothing."""

from __future__ import annotations

import numpy as np
import pytest

from learning_support import golden, group, rewarded, sample, trajectory
from palestra.envs.errors import ConfigError
from palestra.rl.algorithms.base import Credit, rewards_of
from palestra.rl.algorithms.dr_grpo import DrGRPO
from palestra.rl.algorithms.grpo import GRPO, grpo_advantages
from palestra.rl.algorithms.rloo import RLOO, rloo_advantages

CASES = golden("advantages")


def by_group(rewards: list[float], names: list[str], advantages_of: object) -> list[float]:
    """Apply a function of one group's rewards to a table of several groups."""
    result = np.zeros(len(rewards))
    for name in dict.fromkeys(names):
        where = [i for i, other in enumerate(names) if other == name]
        result[where] = advantages_of(np.array(rewards, np.float64)[where])  # type: ignore[operator]
    return result.tolist()


def grpo(rewards: np.ndarray) -> np.ndarray:
    return grpo_advantages(rewards, "group", 1, 1e-6)


def centred(rewards: np.ndarray) -> np.ndarray:
    return grpo_advantages(rewards, "none", 1, 0.0)


def values(credit: Credit) -> list[float | None]:
    """One number per trajectory; credit is the same on all its tokens here."""
    return [None if stream is None else float(stream[0]) for stream in credit.advantages]


@pytest.mark.parametrize(
    ("case", "key", "function"),
    [
        ("advantage/grpo_ddof1_eps1e-6", "advantages", grpo),
        ("advantage/dr_grpo", "advantages", centred),
        ("advantage/singleton_conventions", "advantages", rloo_advantages),
        ("advantage/singleton_conventions", "advantages", grpo),
        ("advantage/one_success_in_eight", "grpo", grpo),
        ("advantage/one_success_in_eight", "dr_grpo", centred),
        ("advantage/one_success_in_eight", "rloo", rloo_advantages),
        ("advantage/float32_residue_leave_one_out", "grpo", grpo),
        ("advantage/length_weighted_baseline", "group_mean", centred),
        ("advantage/rloo_is_per_trajectory", "advantages", rloo_advantages),
    ],
)
def test_credit_has_the_golden_values(case: str, key: str, function: object) -> None:
    inputs = CASES[case]["inputs"]
    found = by_group(inputs["rewards"], inputs["group"], function)
    assert found == pytest.approx(CASES[case]["expected"][key], abs=1e-9)
    wrong = CASES[case].get("must_not_equal", {}).get(key)
    assert wrong is None or max(abs(a - b) for a, b in zip(found, wrong, strict=True)) > 1e-3


@pytest.mark.parametrize("eps", [0.0, 1e-9, 1e-8, 1e-6])
def test_constant_groups_are_exactly_zero_whatever_eps(eps: float) -> None:
    inputs = CASES["advantage/float32_constant_group"]["inputs"]
    rewards = np.array(inputs["rewards"], np.float32).astype(np.float64).tolist()
    for function in (rloo_advantages, centred, lambda r: grpo_advantages(r, "group", 1, eps)):
        assert by_group(rewards, inputs["group"], function) == [0.0] * len(rewards)


def test_rewards_that_differ_by_rounding_alone_have_no_signal() -> None:
    credit = RLOO().advantages(rewarded("g", [0.1 + 0.2, 0.3, 0.3]))
    assert values(credit) == [0.0, 0.0, 0.0]
    assert not credit.signal


def test_a_trajectory_of_several_rows_counts_once() -> None:
    row = sample([5, 6, 7], [0, 1, 1])
    inputs = CASES["advantage/multi_sample_trajectory"]
    rows = {name: inputs["inputs"]["trajectory"].count(name) for name in ("t0", "t1", "t2")}
    made = [
        trajectory(name, [row] * count, inputs["inputs"]["reward_per_trajectory"][name]) for name, count in rows.items()
    ]
    credit = GRPO(std="none").advantages(group("g", made))
    per_row = [value for value, count in zip(values(credit), rows.values(), strict=True) for _ in range(count)]
    assert per_row == pytest.approx(inputs["expected"]["advantages"], abs=1e-12)
    assert [len(stream) for stream in credit.advantages if stream is not None] == [6, 2, 4]


def test_a_missing_verdict_is_in_no_statistic_and_no_loss() -> None:
    made = rewarded("g", [1.0, 0.0, None, 1.0])
    assert values(GRPO(std="none").advantages(made)) == pytest.approx([1 / 3, -2 / 3, None, 1 / 3], abs=1e-12)
    assert values(GRPO(eps=0.0).advantages(made)) == pytest.approx([0.577350, -1.154701, None, 0.577350], abs=1e-6)
    assert values(GRPO(std="none").advantages(rewarded("g", [1.0, 3.0, 2.0, None]))) == [-1.0, 1.0, 0.0, None]


def test_one_valid_member_left_gets_zero_and_not_its_reward() -> None:
    for algorithm in (RLOO(), GRPO(), DrGRPO.with_horizon(16)):
        credit = algorithm.advantages(rewarded("g", [None, 5.0, None]))
        assert values(credit) == [None, 0.0, None]
        assert not credit.signal


def test_a_group_without_any_verdict_has_no_signal() -> None:
    credit = RLOO().advantages(rewarded("g", [None, None]))
    assert credit.advantages == (None, None)
    assert not credit.signal


def test_groups_are_normalised_by_themselves_whatever_their_sizes() -> None:
    found = [values(GRPO(std="none").advantages(rewarded("g", r))) for r in ([1.0, 0.0], [1.0, 0.0, 0.0])]
    assert found[0] == [0.5, -0.5]
    assert found[1] == pytest.approx([2 / 3, -1 / 3, -1 / 3])


def test_rloo_does_not_depend_on_the_order_of_trajectories() -> None:
    rewards = np.array([0.2, 0.9, np.nan, 0.4, 0.7])
    order = [3, 0, 4, 2, 1]
    assert np.array_equal(rloo_advantages(rewards)[order], rloo_advantages(rewards[order]), equal_nan=True)


def test_rewards_are_kept_in_float64() -> None:
    rewards = rewards_of(rewarded("g", [0.9985, 0.999, 1.0]))
    assert rewards.dtype == np.float64
    assert len(set(rewards.tolist())) == 3


@pytest.mark.parametrize("algorithm", [RLOO(), GRPO(), DrGRPO.with_horizon(16)])
def test_groups_of_one_are_a_wrong_setting(algorithm: RLOO | GRPO | DrGRPO) -> None:
    algorithm.check(2)
    with pytest.raises(ConfigError, match="group_size is 1"):
        algorithm.check(1)


def test_dr_grpo_divides_by_its_horizon() -> None:
    how = DrGRPO.with_horizon(512).objective.aggregation
    assert (how.mode, how.horizon) == ("seq-mean-token-sum-norm", 512)


def test_wrong_grpo_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="ddof"):
        GRPO(ddof=2)
    with pytest.raises(ConfigError, match="eps"):
        GRPO(eps=-1.0)
