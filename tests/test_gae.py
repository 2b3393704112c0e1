"""Generalised advantage estimation on actions alone: published numbers, other orders, and what must not leak in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from learning_support import POISONS, golden, group, poisoned, sample, trajectory
from palestra.envs.errors import ConfigError, IntegrityError
from palestra.rl.algorithms.base import Measured
from palestra.rl.algorithms.ppo import PPO
from palestra.rl.algorithms.turn_gae import TurnGAE
from palestra.rl.algorithms.vapo import VAPO
from palestra.rl.critic import value_loss
from palestra.rl.gae import adaptive_lambda, conserve, decoupled_gae, gae, onto_actions, turn_discounts
from palestra.rl.returns import whiten
from palestra.rollout.types import TerminatedBy
from turn_support import of_mask, played, turn

CASES = golden("gae")
PRECISIONS = ((np.float64, 1e-9), (np.float32, 1e-6))
in_both = pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS)
poison_in = pytest.mark.parametrize("poison", POISONS)


def gathered(rows: Sequence[Sequence[float | None]], mask: Any, poison: float, dtype: type) -> list[np.ndarray]:
    """The entries at actions, row by row, as they are in `dtype`."""
    table, where = poisoned(rows, poison), np.array(mask, bool)
    return [row[live].astype(dtype).astype(np.float64) for row, live in zip(table, where, strict=True)]


def close(found: Sequence[np.ndarray], expected: Any, mask: Any, tolerance: float) -> None:
    for mine, row, live in zip(found, expected, np.array(mask, bool), strict=True):
        np.testing.assert_allclose(mine, np.array(row)[live], rtol=tolerance, atol=tolerance)


def far(found: Sequence[np.ndarray], wrong: Any, mask: Any) -> None:
    wrongs = [np.array(row)[live] for row, live in zip(wrong, np.array(mask, bool), strict=True)]
    assert max(np.abs(mine - row).max() for mine, row in zip(found, wrongs, strict=True)) > 1e-3


def cut_or_done(bootstrap: float | None) -> TerminatedBy:
    return TerminatedBy.DONE if bootstrap is None else TerminatedBy.STEPS


@in_both
@poison_in
@pytest.mark.parametrize("name", ["tokens_gamma0.99_lambda0.95", "tokens_gamma1_lambda0", "truncated_with_bootstrap"])
def test_published_advantages_skip_observations(name: str, poison: float, dtype: type, tolerance: float) -> None:
    case = CASES[f"gae/{name}"]
    inputs, how = case["inputs"], case["conventions"]
    values = gathered(inputs["values"], inputs["mask"], poison, dtype)
    ahead = inputs.get("bootstrap_value", [None] * len(values))
    episodes = [
        of_mask(f"t{i}", mask, reward, cut_or_done(ahead[i]))
        for i, (mask, reward) in enumerate(zip(inputs["mask"], inputs["terminal_reward"], strict=True))
    ]
    measured = Measured(values=(tuple(values),), last_values=(tuple(9.0 if a is None else a for a in ahead),))
    credit = PPO(gamma=how["gamma"], lam=how["lambda"]).credit([group("g", episodes)], measured)[0]
    assert credit.returns is not None
    close(credit.returns, case["expected"]["returns"], inputs["mask"], tolerance)  # type: ignore[arg-type]
    plain = [mine - value for mine, value in zip(credit.returns, values, strict=True)]  # type: ignore[operator]
    close(plain, case["expected"]["advantages"], inputs["mask"], tolerance)
    white = whiten(np.concatenate(plain), 1, 1e-8, "add")
    np.testing.assert_allclose(np.concatenate(credit.advantages), white, atol=1e-9)  # type: ignore[arg-type]
    for wrong in case.get("must_not_equal", {}).values():
        far(plain, wrong, inputs["mask"])


@in_both
@poison_in
def test_published_vapo_has_one_lambda_for_the_policy_and_one_for_the_critic(
    poison: float, dtype: type, tolerance: float
) -> None:
    case = CASES["gae/vapo_decoupled"]
    inputs, how = case["inputs"], case["conventions"]
    values = gathered(inputs["values"], inputs["mask"], poison, dtype)
    advantages, returns = [], []
    for mine, reward in zip(values, inputs["terminal_reward"], strict=True):
        rewards = np.zeros(mine.size)
        rewards[-1] = reward
        lam = adaptive_lambda(how["alpha"], mine.size)
        found = decoupled_gae(rewards, mine, gamma=how["gamma"], lam=lam, critic_lam=how["lambda_critic"])
        advantages.append(found[0])
        returns.append(found[1])
    close(advantages, case["expected"]["advantages"], inputs["mask"], tolerance)
    close(returns, case["expected"]["returns"], inputs["mask"], tolerance)
    rows = zip(inputs["mask"], inputs["terminal_reward"], strict=True)
    episodes = [of_mask(f"t{i}", mask, reward) for i, (mask, reward) in enumerate(rows)]
    measured = Measured(values=(tuple(values),), last_values=((0.0,) * len(values),))
    credit = VAPO(alpha=how["alpha"], gamma=how["gamma"]).credit([group("g", episodes)], measured)[0]
    close(credit.returns, case["expected"]["returns"], inputs["mask"], tolerance)  # type: ignore[arg-type]
    white = whiten(np.concatenate(advantages), 1, 1e-8, "add")
    np.testing.assert_allclose(np.concatenate(credit.advantages), white, atol=1e-9)  # type: ignore[arg-type]


@in_both
@poison_in
def test_published_kl_in_the_reward_flows_through_the_advantages(poison: float, dtype: type, tolerance: float) -> None:
    case = CASES["gae/kl_in_reward_k1"]
    inputs, how, mask = case["inputs"], case["conventions"], case["inputs"]["mask"]
    values = gathered(inputs["values"], mask, poison, dtype)
    policy, reference = (gathered(inputs[key], mask, poison, dtype) for key in ("old_logp", "ref_logp"))
    penalties = tuple(how["beta"] * (mine - theirs) for mine, theirs in zip(policy, reference, strict=True))
    episodes = [of_mask(f"t{i}", m, r) for i, (m, r) in enumerate(zip(mask, inputs["terminal_reward"], strict=True))]
    measured = Measured(values=(tuple(values),), last_values=((0.0,) * 3,), penalties=(penalties,))
    credit = PPO(gamma=how["gamma"], lam=how["lambda"]).credit([group("g", episodes)], measured)[0]
    assert credit.returns is not None
    close(credit.returns, case["expected"]["returns"], mask, tolerance)  # type: ignore[arg-type]
    plain = [mine - value for mine, value in zip(credit.returns, values, strict=True)]  # type: ignore[operator]
    close(plain, case["expected"]["advantages"], mask, tolerance)


@in_both
@poison_in
def test_published_rewards_at_observations_belong_to_the_action_before(
    poison: float, dtype: type, tolerance: float
) -> None:
    case = CASES["gae/reward_on_observation_token"]
    inputs, how, mask = case["inputs"], case["conventions"], case["inputs"]["mask"]
    values = gathered(inputs["values"], mask, poison, dtype)[0]
    rewards = onto_actions(inputs["raw_token_rewards"][0], mask[0])
    np.testing.assert_allclose(rewards.sum(), case["expected"]["reward_mass"])
    close([rewards], case["expected"]["token_rewards_after_move"], mask, tolerance)
    advantages, returns = gae(rewards, values, gamma=how["gamma"], lam=how["lambda"])
    close([advantages], case["expected"]["advantages"], mask, tolerance)
    close([returns], case["expected"]["returns"], mask, tolerance)
    far([advantages], case["must_not_equal"]["advantages"], mask)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-6)])
@poison_in
@pytest.mark.parametrize("batching", ["whole", "rows", "pieces"])
def test_published_value_loss_is_clipped_and_counts_over_the_step(
    batching: str, poison: float, dtype: torch.dtype, tolerance: float
) -> None:
    case = CASES["gae/value_loss_clipped"]
    inputs, mask = case["inputs"], torch.tensor(case["inputs"]["mask"], dtype=torch.bool)
    new, old, returns = (
        torch.tensor(poisoned(inputs[key], poison), dtype=dtype) for key in ("values_new", "values_old", "returns")
    )
    new.requires_grad_()
    where = mask.nonzero()
    parts = {
        "whole": [where],
        "rows": [where[where[:, 0] == row] for row in range(len(mask))],
        "pieces": list(where.flip(0).split(4)),
    }[batching]
    loss, clipped = torch.zeros((), dtype=dtype), torch.zeros(())
    for part in parts:
        at = (part[:, 0], part[:, 1])
        weights = torch.full((len(part),), 1.0 / len(where), dtype=dtype)
        found, active = value_loss(new[at], returns[at], old[at], weights, case["conventions"]["value_clip"])
        loss, clipped = loss + found, clipped + active
    loss.backward()
    expected = case["expected"]
    torch.testing.assert_close(loss.item(), expected["loss"], rtol=tolerance, atol=tolerance)
    wanted = torch.tensor(expected["grad_values_new"], dtype=dtype)
    torch.testing.assert_close(new.grad, wanted, rtol=10 * tolerance, atol=tolerance)
    assert (new.grad[~mask] == 0).all()  # type: ignore[index]
    assert clipped.item() / len(where) == pytest.approx(expected["clip_frac"])
    at = (where[:, 0], where[:, 1])
    plain, _ = value_loss(new[at], returns[at], old[at], torch.full((13,), 1 / 13, dtype=dtype), None)
    torch.testing.assert_close(plain.item(), expected["unclipped_loss"], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("lam", [0.0, 0.5, 0.95, 1.0])
def test_with_an_exact_critic_skipping_observations_is_the_policy_gradient_for_every_lambda(lam: float) -> None:
    """One decision for 0.5, or for an observation and a second decision between 1 and 0: three episodes, all listed."""
    case = golden("oracles")["oracle/gae_exact_critic"]
    first, second = (np.exp(case["inputs"][key]) / np.exp(case["inputs"][key]).sum() for key in ("theta", "phi"))
    at_first, at_second = case["inputs"]["V_turn1"], case["inputs"]["V_turn2_after_y"]
    episodes = [of_mask("x", [1], 0.5), of_mask("ya", [1, 0, 0, 1], 1.0), of_mask("yb", [1, 0, 0, 1], 0.0)]
    values = (np.array([at_first]), np.array([at_first, at_second]), np.array([at_first, at_second]))
    measured = Measured(values=(values,), last_values=((0.0,) * 3,))
    credit = PPO(lam=lam).credit([group("g", episodes)], measured)[0]
    chances = (first[0], first[1] * second[0], first[1] * second[1])
    gradient = np.zeros(4)
    for chance, returns, value, choices in zip(
        chances, credit.returns or (), values, ((0,), (1, 0), (1, 1)), strict=True
    ):
        assert returns is not None
        for k, choice in enumerate(choices):
            score = np.eye(2)[choice] - (first, second)[k]
            gradient[2 * k : 2 * k + 2] += chance * (returns[k] - value[k]) * score
    np.testing.assert_allclose(gradient, case["expected"]["exact_gradient"], atol=1e-9)
    wrong = case["must_not_equal"]["not_skipped"].get(f"lambda={lam:g}")
    assert wrong is None or np.abs(gradient - wrong).max() > 1e-3


def test_a_penalty_is_discounted_by_actions_and_none_stands_at_an_observation() -> None:
    episode = of_mask("t", [1, 0, 0, 1], 0.0)
    measured = Measured(values=((np.zeros(2),),), last_values=((0.0,),), penalties=((np.ones(2),),))
    for gamma, first in ((1.0, -2.0), (0.9, -1.9)):
        returns = PPO(gamma=gamma, lam=1.0).credit([group("g", [episode])], measured)[0].returns
        np.testing.assert_allclose(returns[0], [first, -1.0])  # type: ignore[index,arg-type]


def brute_force(rewards: np.ndarray, values: np.ndarray, gamma: float, lam: float, ahead: float) -> np.ndarray:
    """The sum of the definition, term by term."""
    following = np.append(values[1:], ahead)
    deltas = rewards + gamma * following - values
    n = len(values)
    return np.array([sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, n)) for t in range(n)])


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.floats(0.1, 1.0), st.floats(0.0, 1.0))
def test_the_scan_is_the_sum_of_the_definition(seed: int, gamma: float, lam: float) -> None:
    rng = np.random.default_rng(seed)
    n = int(rng.integers(0, 12))
    rewards, values, ahead = rng.normal(size=n), rng.normal(size=n), float(rng.normal())
    found, returns = gae(rewards, values, gamma=gamma, lam=lam, bootstrap=ahead)
    np.testing.assert_allclose(found, brute_force(rewards, values, gamma, lam, ahead), atol=1e-12)
    np.testing.assert_array_equal(returns, found + values)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_lambda_one_is_the_return_and_an_exact_critic_has_no_advantage(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rewards = rng.normal(size=7)
    to_come = np.cumsum(rewards[::-1])[::-1]
    _, returns = gae(rewards, rng.normal(size=7), gamma=1.0, lam=1.0)
    np.testing.assert_allclose(returns, to_come, atol=1e-12)
    advantages, _ = gae(rewards, to_come, gamma=1.0, lam=float(rng.random()))
    np.testing.assert_allclose(advantages, 0.0, atol=1e-12)


def test_a_discount_per_turn_does_not_count_tokens() -> None:
    turns = np.array([0, 0, 0, 1, 2, 2])
    np.testing.assert_array_equal(turn_discounts(turns, 0.5), [1, 1, 0.5, 0.5, 1, 0.5])
    rewards = np.array([0, 0, 0, 0, 0, 1.0])
    _, returns = gae(rewards, np.zeros(6), gamma=turn_discounts(turns, 0.5), lam=1.0)
    np.testing.assert_allclose(returns, [0.25, 0.25, 0.25, 0.5, 1, 1])
    episode = played("t", [3, 1, 2], 1.0)
    measured = Measured(values=((np.zeros(6),),), last_values=((0.0,),))
    credit = PPO(gamma=0.5, lam=1.0, discount_per="turn").credit([group("g", [episode])], measured)[0]
    np.testing.assert_allclose(credit.returns[0], [0.25, 0.25, 0.25, 0.5, 1, 1])  # type: ignore[index,arg-type]


def test_vapos_lambda_grows_with_the_length_and_is_never_negative() -> None:
    assert adaptive_lambda(0.5, 4) == 0.5
    assert adaptive_lambda(0.5, 1) == 0.0
    assert adaptive_lambda(0.05, 20_000) == pytest.approx(0.999)
    assert adaptive_lambda(0.05, 0) == 0.0


def test_a_turns_own_reward_is_on_its_last_token_and_no_reward_is_lost() -> None:
    episode = played("t", [2, 3], 1.0, rewards=[0.5, -0.25])
    measured = Measured(values=((np.zeros(5),),), last_values=((0.0,),))
    credit = PPO(lam=1.0).credit([group("g", [episode])], measured)[0]
    np.testing.assert_allclose(credit.returns[0], [1.25, 1.25, 0.75, 0.75, 0.75])  # type: ignore[index,arg-type]
    with pytest.raises(IntegrityError, match=r"add up to 1, but it earned 1\.25"):
        conserve(np.array([0.0, 1.0]), 1.25, "trajectory t")
    with pytest.raises(IntegrityError, match="before the policy did anything"):
        onto_actions([0.5, 0.0], [0, 1])
    broken = replace(episode, turns=(turn(0, 5, 0.5),))
    with pytest.raises(IntegrityError, match="its turns tell of"):
        PPO().credit([group("g", [broken])], measured)


@pytest.mark.parametrize("ended", list(TerminatedBy))
@pytest.mark.parametrize("make", [PPO, VAPO, TurnGAE])
def test_only_what_a_budget_cut_goes_on_with_the_value_of_its_last_state(ended: TerminatedBy, make: Any) -> None:
    budgets = {TerminatedBy.STEPS, TerminatedBy.TOKENS, TerminatedBy.WALL_CLOCK, TerminatedBy.CONTEXT}
    episode = played("t", [1, 1], 0.0, ended=ended)
    measured = Measured(values=((np.zeros(2),),), last_values=((0.5,),))
    for bootstrap, expected in (("budgets", 0.5 if ended in budgets else 0.0), ("none", 0.0)):
        credit = make(gamma=1.0, lam=1.0, bootstrap=bootstrap).credit([group("g", [episode])], measured)[0]
        np.testing.assert_allclose(credit.returns[0], [expected, expected])


def test_turns_in_another_order_in_the_rows_are_credited_in_the_order_of_time() -> None:
    late, early = sample([5, 5, 5], [0, 1, 1], turn=[-1, 1, 1]), sample([5, 5], [0, 1], turn=[-1, 0])
    episode = trajectory("t", [late, early], 1.0)
    measured = Measured(values=((np.array([0.3, 0.2, 0.1]),),), last_values=((0.0,),))
    credit = PPO(gamma=0.5, lam=0.0).credit([group("g", [episode])], measured)[0]
    np.testing.assert_allclose(credit.returns[0], [0.1, 1.0, 0.15])  # type: ignore[index,arg-type]


def test_equal_advantages_are_whitened_to_exactly_nothing_and_returns_are_left_alone() -> None:
    episodes = [played(f"t{i}", [2], 0.7) for i in range(3)]
    measured = Measured(values=((np.full(2, 0.1),) * 3,), last_values=((0.0,) * 3,))
    credit = PPO(lam=1.0).credit([group("g", episodes)], measured)[0]
    assert all((stream == 0.0).all() for stream in credit.advantages if stream is not None)
    np.testing.assert_allclose(credit.returns[0], 0.7)  # type: ignore[index,arg-type]
    assert credit.signal, "a critic still has something to learn"


def test_a_trajectory_without_a_verdict_is_in_nothing() -> None:
    episodes = [played("a", [2], 1.0), played("b", [3], None), played("c", [1], 0.0)]
    measured = Measured(values=((np.zeros(2), None, np.zeros(1)),), last_values=((0.0, None, 0.0),))
    credit = PPO().credit([group("g", episodes)], measured)[0]
    assert (credit.advantages[1], credit.returns[1], credit.values[1]) == (None, None, None)  # type: ignore[index]
    assert np.concatenate([credit.advantages[0], credit.advantages[2]]).std(ddof=1) == pytest.approx(1.0)  # type: ignore[list-item]


def test_what_is_not_finite_or_not_measured_is_refused() -> None:
    episode = group("g", [played("t", [2], 1.0)])
    with pytest.raises(ValueError, match="measure them first"):
        PPO().credit([episode], None)
    with pytest.raises(IntegrityError, match="not finite"):
        PPO().credit([episode], Measured(values=((np.array([0.0, np.nan]),),), last_values=((0.0,),)))
    with pytest.raises(IntegrityError, match="values for 3 tokens"):
        PPO().credit([episode], Measured(values=((np.zeros(3),),), last_values=((0.0,),)))
    for wrong in ({"gamma": 0.0}, {"gamma": 1.5}, {"lam": -0.1}, {"value_learning_rate": 0.0}, {"ddof": 2}):
        with pytest.raises(ConfigError):
            PPO(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError):
        VAPO(alpha=0.0)
