"""Credit that looks at a whole step or at tokens, and the rules around credit: filter, overlong, KL in the reward."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from learning_support import POISONS, golden, group, poisoned, rewarded, sample, shared_batch, trajectory
from palestra.envs.errors import ConfigError, IntegrityError
from palestra.envs.types import Scored
from palestra.rl.algorithms.base import Algorithm, Credit, Measured
from palestra.rl.algorithms.gdpo import GDPO, gdpo_advantages
from palestra.rl.algorithms.grpo import GRPO, grpo_advantages, grpo_step
from palestra.rl.algorithms.loo_std import LooStd, loo_std_advantages
from palestra.rl.algorithms.make import KNOWN
from palestra.rl.algorithms.maxrl import MaxRL, maxrl_advantages
from palestra.rl.algorithms.opo import OPO, opo_advantages
from palestra.rl.algorithms.reinforce_pp import ReinforcePP
from palestra.rl.algorithms.rloo import RLOO, rloo_advantages
from palestra.rl.algorithms.rpp_baseline import RPPBaseline
from palestra.rl.dynamic_sampling import informative
from palestra.rl.objective import Objective
from palestra.rl.returns import reward_to_go, token_rewards, whiten
from palestra.rl.shaping import soft_overlong
from palestra.rollout.types import Group

CASES = golden("advantages")
COMPARE = ("rloo", "center", "grpo", "dr_grpo", "loo_std", "opo", "maxrl", "gdpo", "rpp_baseline")
"""Names of algorithms in which a group of equal outcomes says nothing."""


def made(name: str) -> Algorithm:
    extra = {"objectives": {"value": 1.0}} if name == "gdpo" else {}
    return KNOWN[name].algorithm(Objective(), **extra)


def with_parts(of: Group) -> Group:
    """Each verdict's value is also a part of it, so that every algorithm can be tried."""

    def one(t):  # type: ignore[no-untyped-def]
        return replace(t, verdict=Scored(t.verdict.value, {"value": t.verdict.value})) if t.valid else t

    return replace(of, trajectories=tuple(map(one, of.trajectories)))


def flat(credits: list[Credit]) -> list[float]:
    return [x for credit in credits for stream in credit.advantages if stream is not None for x in stream.tolist()]


def masked_groups(
    mask: list[list[int]], rewards: list[float], names: list[str], poison: float = float("nan")
) -> list[Group]:
    """Groups of one-row trajectories in which these tokens were sampled; what was not sampled is poisoned."""
    rows = [
        trajectory(str(i), [sample([5] * 8, [0, *row], poison=poison)], r)
        for i, (row, r) in enumerate(zip(mask, rewards, strict=True))
    ]
    return [group(n, [rows[i] for i, other in enumerate(names) if other == n]) for n in dict.fromkeys(names)]


def laid_out(credits: list[Credit], mask: list[list[int]]) -> list[list[float]]:
    """Credit as a golden table: 0 where nothing was sampled."""
    streams = [stream for credit in credits for stream in credit.advantages]
    table = np.zeros((len(mask), len(mask[0])))
    for row, where, stream in zip(table, np.array(mask, bool), streams, strict=True):
        assert stream is not None
        row[where] = stream
    return table.tolist()


@pytest.mark.parametrize("case", ["advantage/one_success_in_eight", "advantage/float32_residue_leave_one_out"])
def test_leave_one_out_spread_has_the_golden_values(case: str) -> None:
    rewards = np.array(CASES[case]["inputs"]["rewards"], np.float32).astype(np.float64)
    found = loo_std_advantages(rewards, 1, 1e-6)
    assert found == pytest.approx(CASES[case]["expected"]["loo_std"], abs=1e-6)


def test_leave_one_out_spread_is_exact_on_exact_rewards() -> None:
    case = CASES["advantage/one_success_in_eight"]
    found = loo_std_advantages(np.array(case["inputs"]["rewards"]), 1, 1e-6)
    assert found == pytest.approx(case["expected"]["loo_std"], abs=1e-9)


def test_maxrl_has_the_golden_values_and_nothing_without_a_positive_mean() -> None:
    case = CASES["advantage/one_success_in_eight"]
    assert maxrl_advantages(np.array(case["inputs"]["rewards"])).tolist() == case["expected"]["maxrl"]
    assert maxrl_advantages(np.array([1.0, 0.0, 0.0, 0.0])).tolist() == [3.0, -1.0, -1.0, -1.0]
    assert maxrl_advantages(np.array([0.5, -0.5, -1.0])).tolist() == [0.0] * 3
    assert maxrl_advantages(np.array([np.nan, np.nan])).tolist() == pytest.approx([np.nan] * 2, nan_ok=True)


def test_opo_weighs_its_baseline_by_sampled_tokens() -> None:
    case = CASES["advantage/length_weighted_baseline"]
    rewards, lengths = case["inputs"]["rewards"], case["inputs"]["lengths"]
    found = opo_advantages(np.array(rewards), np.array(lengths, np.float64))
    assert found == pytest.approx(case["expected"]["length_weighted"], abs=1e-12)
    streams = OPO().advantages(rewarded("g", rewards, lengths)).advantages
    assert [float(s[0]) for s in streams if s is not None] == pytest.approx(found.tolist())


def test_a_spread_of_the_step_divides_all_groups_alike() -> None:
    easy, hard = np.array([1.0, 1.0, 0.8, 0.8]), np.array([0.2, 0.0, 0.0, np.nan])
    everything = np.array([1.0, 1.0, 0.8, 0.8, 0.2, 0.0, 0.0])
    spread = float(everything.std(ddof=1)) + 1e-6
    first, second = grpo_step([easy, hard], "batch", 1, 1e-6)
    assert first == pytest.approx((easy - 0.9) / spread)
    assert second[:3] == pytest.approx((hard[:3] - 0.2 / 3) / spread)
    assert np.isnan(second[3])
    assert grpo_step([easy], "group", 1, 1e-6)[0] == pytest.approx(grpo_advantages(easy, "group", 1, 1e-6))


def test_a_step_of_constant_groups_is_exactly_zero_though_their_outcomes_differ() -> None:
    for name in COMPARE:
        credits = made(name).credit([with_parts(rewarded("a", [0.7] * 8)), with_parts(rewarded("b", [0.9] * 3))])
        assert set(flat(credits)) == {0.0}, name
        assert not any(credit.signal for credit in credits), name


@pytest.mark.parametrize("name", COMPARE)
def test_a_constant_group_and_a_single_verdict_are_exactly_zero_beside_groups_that_differ(name: str) -> None:
    groups = [
        rewarded("a", [0.7] * 7, [1, 2, 3, 4, 5, 6, 7]),
        rewarded("b", [1.0, 0.0, 0.3], [5, 1, 1]),
        rewarded("c", [None, 5.0, None]),
    ]
    constant, other, single = made(name).credit([with_parts(g) for g in groups])
    assert set(flat([constant])) == {0.0}
    assert set(flat([single])) == {0.0}
    assert single.advantages[0] is None
    assert other.signal


@pytest.mark.parametrize("eps", [0.0, 1e-9, 1e-4])
def test_no_eps_makes_a_residue(eps: float) -> None:
    groups = [rewarded("x", [0.7] * 8), rewarded("y", [0.9] * 8), rewarded("z", [0.1] * 7)]
    for algorithm in (LooStd(eps=eps), GRPO(eps=eps), GRPO(std="batch", eps=eps), RPPBaseline(eps=eps)):
        assert set(flat(algorithm.credit(groups))) == {0.0}


@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("gamma", ["1", "0.9"])
def test_reinforce_pp_has_the_golden_values(gamma: str, poison: float) -> None:
    case, batch = CASES[f"advantage/reinforce_pp_gamma{gamma}"], shared_batch()
    mask = case["inputs"]["mask"]
    groups = masked_groups(mask, case["inputs"]["terminal_reward"], ["a", "b", "c", "d"], poison)
    where = np.array(mask, bool)
    new, reference = poisoned(batch["new_logp"], poison), poisoned(batch["ref_logp"], poison)
    penalties = tuple(
        (case["conventions"]["beta"] * (new_row[sampled] - reference_row[sampled]),)
        for new_row, reference_row, sampled in zip(new, reference, where, strict=True)
    )
    algorithm = ReinforcePP(gamma=float(gamma), ddof=0, eps=1e-8, eps_form="floor")
    found = laid_out(algorithm.credit(groups, Measured(penalties=penalties)), mask)
    assert np.array(found) == pytest.approx(np.array(case["expected"]["advantages"]), abs=1e-9)
    for row, penalty, reward, sampled in zip(
        range(4), penalties, case["inputs"]["terminal_reward"], where, strict=True
    ):
        rewards = token_rewards(int(sampled.sum()), reward, penalty[0])
        assert rewards == pytest.approx(np.array(case["expected"]["token_rewards"][row])[sampled], abs=1e-12)
        returns = reward_to_go(rewards, float(gamma))
        assert returns == pytest.approx(np.array(case["expected"]["returns"][row])[sampled], abs=1e-12)


def test_rpp_baseline_has_the_golden_values() -> None:
    case = CASES["advantage/reinforce_pp_baseline_ddof1_plus1e-8"]
    mask, rewards = case["inputs"]["mask"], case["inputs"]["rewards"]
    credits = RPPBaseline().credit(masked_groups(mask, rewards, case["inputs"]["group"]))
    assert np.array(laid_out(credits, mask)) == pytest.approx(np.array(case["expected"]["advantages"]), abs=1e-9)


def test_the_two_forms_of_eps_differ_and_both_are_reached() -> None:
    values = np.array([0.0, 1e-5, 2e-5])
    variance = float(values.var())
    assert whiten(values, 0, 1e-8, "add")[2] == pytest.approx(1e-5 / np.sqrt(variance + 1e-8))
    assert whiten(values, 0, 1e-8, "floor")[2] == pytest.approx(1e-5 / np.sqrt(1e-8))


def test_an_observation_neither_ends_nor_discounts_a_return() -> None:
    """Sampled, observed, sampled, at 0.5 each: one discount lies between the two sampled tokens."""
    mask = [[1, 0, 1, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0, 0]]
    plain = ReinforcePP(gamma=0.5, ddof=0, eps=0.0)
    found = flat(plain.credit(masked_groups(mask, [1.0, 0.0], ["a", "b"])))
    before = np.array([0.5, 1.0, 0.0])
    assert found == pytest.approx((before - 0.5) / before.std())


def test_the_penalty_of_each_sampled_token_is_in_the_returns_before_it() -> None:
    assert reward_to_go(token_rewards(2, 0.0, np.array([1.0, 1.0])), 1.0).tolist() == [-2.0, -1.0]
    assert reward_to_go(token_rewards(2, 0.0, np.array([1.0, 1.0])), 0.9).tolist() == pytest.approx([-1.9, -1.0])


def test_returns_follow_the_order_of_sampling_and_not_of_rows() -> None:
    late, early = sample([5, 6], [0, 1], turn=[0, 1]), sample([5, 6], [0, 1], turn=[0, 0])
    in_order = group("g", [trajectory("t", [early, late], 1.0)])
    swapped = group("g", [trajectory("t", [late, early], 1.0)])
    algorithm = ReinforcePP(gamma=0.5, ddof=0, eps=0.0)
    assert flat(algorithm.credit([in_order])) == flat(algorithm.credit([swapped]))[::-1] == [-1.0, 1.0]


def test_gdpo_and_the_sum_of_objectives_have_the_golden_values() -> None:
    case = CASES["advantage/multi_objective"]
    parts, weights = np.array(case["inputs"]["rewards"]), case["conventions"]["weights"]
    found = gdpo_advantages([parts], weights, 1, 1e-4)[0]
    assert found == pytest.approx(case["expected"]["gdpo"], abs=1e-9)
    summed = grpo_advantages(parts @ np.array(weights), "group", 1, 1e-4)
    assert summed == pytest.approx(case["expected"]["sum_then_normalise"], abs=1e-9)
    algorithm = GDPO(objectives={"correct": 1.0, "brief": 0.5})
    rows = [sample([5, 6], [0, 1])] * len(parts)
    scored = [
        replace(trajectory(str(i), [row], 0.0), verdict=Scored(0.0, {"brief": b, "other": 9.0, "correct": c}))
        for i, (row, (c, b)) in enumerate(zip(rows, parts.tolist(), strict=True))
    ]
    assert flat(algorithm.credit([group("g", scored)])) == pytest.approx(case["expected"]["gdpo"], abs=1e-9)


def test_gdpo_says_which_objective_a_verdict_lacks() -> None:
    with pytest.raises(ConfigError, match="gdpo needs the parts"):
        GDPO()
    algorithm = GDPO(objectives={"corect": 1.0})
    with pytest.raises(ConfigError, match="names 'corect', but the verdict of trajectory g0 has value"):
        algorithm.credit([with_parts(rewarded("g", [1.0, 0.0]))])
    broken = rewarded("g", [1.0, 0.0])
    broken = replace(
        broken, trajectories=tuple(replace(t, verdict=Scored(1.0, {"corect": np.nan})) for t in broken.trajectories)
    )
    with pytest.raises(IntegrityError, match="finite"):
        algorithm.credit([broken])


def test_a_kl_in_the_reward_goes_through_the_baseline() -> None:
    groups = [rewarded("g", [1.0, 0.0, None, 1.0], [2, 1, 1, 3])]
    penalties = ((np.array([0.1, 0.2]), np.array([0.5]), None, np.array([-0.1, 0.0, 0.2])),)
    credits = RLOO().credit(groups, Measured(penalties=penalties))
    expected = rloo_advantages(np.array([0.7, -0.5, 0.9]))
    assert [float(s[0]) for s in credits[0].advantages if s is not None] == pytest.approx(expected.tolist())
    constant = RLOO().credit([rewarded("g", [1.0, 1.0], [1, 1])], Measured(penalties=((np.array([0.1]), np.zeros(1)),)))
    assert constant[0].signal  # equal outcomes, but one has drifted further


def test_a_kl_in_the_reward_is_refused_where_rewards_are_not_added_up() -> None:
    objective = Objective(kl="reward_k1", kl_coefficient=0.1)
    for name in ("maxrl", "gdpo"):
        with pytest.raises(ConfigError, match=f"{name} has no place"):
            KNOWN[name].algorithm(objective, **({"objectives": {"value": 1.0}} if name == "gdpo" else {}))


def test_dynamic_sampling_looks_at_the_outcome_alone() -> None:
    case = CASES["filter/dynamic_sampling"]
    inputs = case["inputs"]
    for column, key in (("raw_outcome", "kept_groups"), ("shaped_reward", "kept_groups_if_tested_on_shaped")):
        kept = [
            name
            for name in dict.fromkeys(inputs["group"])
            if informative(
                rewarded(name, [r for r, n in zip(inputs[column], inputs["group"], strict=True) if n == name])
            )
        ]
        assert kept == case["expected"][key]
    assert not informative(rewarded("g", [1.0, None, None]))
    assert informative(rewarded("g", [1.0, None, 0.0]))


def test_the_overlong_punishment_has_the_golden_values_and_saturates() -> None:
    case = CASES["reward/overlong_soft_punishment"]
    longest, cache = case["conventions"]["L_max"], case["conventions"]["L_cache"]
    found = [
        soft_overlong(length, longest, cache, case["conventions"]["factor"]) for length in case["inputs"]["lengths"]
    ]
    assert found == pytest.approx(case["expected"]["penalty"], abs=1e-12)
    assert soft_overlong(10**9, 100, 20, 0.5) == -0.5
    assert (soft_overlong(99, 100, 0), soft_overlong(100, 100, 0)) == (0.0, -1.0)
    with pytest.raises(ConfigError, match="last 200 of 100"):
        soft_overlong(1, 100, 200)


REWARDS = st.lists(st.one_of(st.none(), st.floats(-5, 5, width=16)), min_size=1, max_size=6)
STEPS = st.lists(REWARDS, min_size=1, max_size=4)


@settings(max_examples=60, deadline=None)
@given(steps=STEPS, data=st.data())
def test_no_order_of_groups_or_trajectories_and_no_missing_verdict_changes_anyones_credit(
    steps: list[list[float | None]], data: st.DataObject
) -> None:
    names = [*COMPARE, "reinforce_pp"]
    lengths = [[1 + (7 * i + 3 * j) % 5 for j in range(len(rewards))] for i, rewards in enumerate(steps)]
    plain = [with_parts(rewarded(f"g{i}", r, n)) for i, (r, n) in enumerate(zip(steps, lengths, strict=True))]
    order = data.draw(st.permutations(range(len(plain))))
    lost = trajectory("lost", [sample([5, 6], [0, 1])], None)
    mixed = [replace(plain[i], trajectories=(lost, *data.draw(st.permutations(plain[i].trajectories)))) for i in order]
    for name in names:
        before = by_trajectory(plain, made(name).credit(plain))
        after = by_trajectory(mixed, made(name).credit(mixed))
        assert after.pop("lost") is None
        assert before.keys() == after.keys()
        for key, stream in before.items():
            other = after[key]
            assert (stream is None) == (other is None)
            assert stream is None or other is None or stream == pytest.approx(other, abs=1e-7, rel=1e-7), name


def by_trajectory(groups: list[Group], credits: list[Credit]) -> dict[str, np.ndarray | None]:
    return {
        t.id: stream
        for g, credit in zip(groups, credits, strict=True)
        for t, stream in zip(g.trajectories, credit.advantages, strict=True)
    }


@settings(max_examples=60, deadline=None)
@given(rewards=st.lists(st.floats(0, 1, width=16), min_size=2, max_size=8), shift=st.floats(-3, 3, width=16))
def test_a_reward_that_everyone_gets_changes_nothing(rewards: list[float], shift: float) -> None:
    for name in ("rloo", "center", "grpo", "loo_std", "opo", "rpp_baseline", "reinforce_pp"):
        before = flat(made(name).credit([rewarded("g", rewards)]))
        after = flat(made(name).credit([rewarded("g", [r + shift for r in rewards])]))
        assert after == pytest.approx(before, abs=1e-4), name


@pytest.mark.parametrize("name", [*COMPARE, "reinforce_pp"])
def test_splitting_a_trajectory_into_rows_changes_no_credit(name: str) -> None:
    whole, half = sample([5] * 7, [0] + [1] * 6), sample([5] * 4, [0, 1, 1, 1])
    short = sample([5, 6], [0, 1])
    credits = [
        made(name).credit([with_parts(group("g", [trajectory("a", rows, 1.0), trajectory("b", [short], 0.0)]))])
        for rows in ([whole], [half, half])
    ]
    assert flat(credits[0]) == flat(credits[1])


@pytest.mark.parametrize("algorithm", [LooStd(), MaxRL(), OPO(), RPPBaseline(), GRPO(std="batch")])
def test_a_step_without_any_verdict_has_no_signal(algorithm: Algorithm) -> None:
    credits = algorithm.credit([rewarded("g", [None, None])])
    assert credits[0].advantages == (None, None)
    assert not credits[0].signal


def test_settings_of_credit_are_checked_when_made() -> None:
    for wrong in (lambda: ReinforcePP(gamma=0.0), lambda: ReinforcePP(gamma=1.1)):
        with pytest.raises(ConfigError, match="gamma"):
            wrong()
    for kind in (LooStd, RPPBaseline, ReinforcePP, GRPO):
        with pytest.raises(ConfigError, match="ddof"):
            kind(ddof=2)
        with pytest.raises(ConfigError, match="eps"):
            kind(eps=float("nan"))
