"""What a step does with its groups: who is used, for which reward, in how many updates, and where every token went."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from learning_support import group, random_groups, rewarded, sample, tiny_llama, trajectory
from palestra.envs.errors import ConfigError, IntegrityError
from palestra.envs.types import Scored
from palestra.rl.accounting import consumed, token_counts
from palestra.rl.algorithms.base import Measured
from palestra.rl.algorithms.gdpo import GDPO
from palestra.rl.algorithms.grpo import GRPO
from palestra.rl.algorithms.make import KNOWN, make_algorithm
from palestra.rl.algorithms.rloo import RLOO
from palestra.rl.counted import Counting, counted, credited, reductions
from palestra.rl.gap_watch import GapWatch
from palestra.rl.gather import Gathered
from palestra.rl.learner import Learner, LearnerSettings, UpdateStats
from palestra.rl.load_config import parse_config
from palestra.rl.lora import LoraSettings
from palestra.rl.objective import Objective
from palestra.rl.optimizer import OptimizerSettings
from palestra.rl.penalties import as_streams, everything, measure_penalties
from palestra.rl.settings_algorithm import AlgorithmSettings
from palestra.rl.step import Practice, deal, learn
from palestra.rl.step_metrics import learning_metrics, rollout_metrics
from palestra.rl.summary import Summary
from palestra.rl.tracking import Metrics
from palestra.rl.turn_rewards import OUTCOME_ONLY, check_turn_rewards
from palestra.rollout.types import Group, TerminatedBy
from turn_support import played

BAND = {"correction_low": 0.5, "correction_high": 2.0}

PLAIN = Practice(4096)


def learner(rate: float = 1e-2, seed: int = 0) -> Learner:
    settings = LearnerSettings(
        lora=LoraSettings(4, 4.0), optimizer=OptimizerSettings(learning_rate=rate, warmup_steps=0)
    )
    return Learner(tiny_llama(dtype=torch.float32), settings, seed=seed)


def sampled_by(teacher: Learner, groups: Sequence[Group]) -> list[Group]:
    """The groups as if `teacher` had sampled them: with its log-probabilities."""
    batch = everything(groups, 4096)
    streams = as_streams(groups, batch, teacher.sampled_logprobs(batch).astype(np.float64))
    made = []
    for one, of_group in zip(groups, streams, strict=True):
        trajectories = []
        for t, stream in zip(one.trajectories, of_group, strict=True):
            parts = (
                np.split(stream, np.cumsum([int(s.sampled.sum()) for s in t.samples])[:-1])
                if stream is not None
                else []
            )
            rows = []
            for row, part in zip(t.samples, parts, strict=True):
                logprobs = row.logprobs.copy()
                logprobs[row.sampled] = part
                rows.append(replace(row, logprobs=logprobs))
            trajectories.append(replace(t, samples=tuple(rows)))
        made.append(replace(one, trajectories=tuple(trajectories)))
    return made


# -- rewards and truncation --------------------------------------------------------------------------------------------


def cut(name: str, rewards: Sequence[float | None], which: int, how: TerminatedBy = TerminatedBy.TOKENS) -> Group:
    whole = rewarded(name, rewards)
    return replace(
        whole,
        trajectories=tuple(
            replace(t, terminated_by=how) if i == which else t for i, t in enumerate(whole.trajectories)
        ),
    )


def test_the_punishment_for_length_is_of_sampled_tokens_alone_and_saturates() -> None:
    counting = Counting(overlong_tokens=100, overlong_cache=20)
    made = [trajectory("t", [sample([5] * (1 + n + 300), [0] + [1] * n + [0] * 300)], 1.0) for n in (80, 90, 100, 400)]
    assert [reductions(t, counting)["overlong"] for t in made] == pytest.approx([0.0, 0.5, 1.0, 1.0])


def test_what_is_taken_off_is_recorded_beside_the_outcome_which_stays() -> None:
    counting = Counting(step_cost=0.1, token_cost=0.01)
    (before,) = rewarded("g", [1.0], [5]).trajectories
    (after,) = credited(Group("g", "task", (before,)), counting).trajectories
    assert isinstance(after.verdict, Scored)
    assert after.verdict.parts == pytest.approx({"step_cost": 0.0, "token_cost": -0.05})  # it has no turns
    assert (before.reward, after.reward) == (1.0, pytest.approx(0.95))
    gdpo = GDPO(objectives={"token_cost": 1.0})
    (credit,) = gdpo.credit([credited(rewarded("g", [1.0, 1.0], [5, 9]), counting)])
    assert credit.advantages[0] is not None
    assert credit.advantages[0][0] > 0  # the short one is better


def test_the_metrics_know_the_outcome_and_the_credited_reward_apart() -> None:
    counting = Counting(token_cost=0.1)
    found = rollout_metrics(Gathered((rewarded("g0", [1.0, 0.0], [1, 3]),), ("used",)), counting, 0)
    assert found["rollout/reward_mean"] == found["rollout/success"] == 0.5
    assert found["rollout/token_cost_mean"] == pytest.approx(0.2)
    assert found["rollout/credited_reward_mean"] == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("truncated", "advantages"),
    [
        ("keep", [2 / 3, 2 / 3, -2 / 3, -2 / 3]),
        ("mask", [2 / 3, 2 / 3, -2 / 3, None]),  # the baseline still knows it
        ("exclude", [0.5, 0.5, -1.0, None]),
    ],
)
def test_an_episode_that_a_budget_cut_counts_as_the_settings_say(
    truncated: str, advantages: list[float | None]
) -> None:
    counting = Counting(truncated)  # type: ignore[arg-type]
    groups = [cut("g0", [1.0, 1.0, 0.0, 0.0], 3)]
    learned = learn(learner(), RLOO(), groups, counting, PLAIN)
    found = [None if s is None else float(s[0]) for s in learned.credits[0].advantages]
    assert found == [None if a is None else pytest.approx(a) for a in advantages]
    assert learned.action_tokens == (8 if truncated == "keep" else 6)
    (row,) = consumed(Gathered(tuple(groups), ("used",)), learned, RLOO(), counting)
    assert row.truncated_tokens == (0 if truncated == "keep" else 2)


def test_only_a_budget_cuts_an_episode() -> None:
    excluding = Counting("exclude")
    for how in (TerminatedBy.STEPS, TerminatedBy.TOKENS, TerminatedBy.WALL_CLOCK, TerminatedBy.CONTEXT):
        assert not counted(cut("g", [1.0], 0, how), excluding).trajectories[0].valid
    for how in (TerminatedBy.DONE, TerminatedBy.PARSE_ERRORS):  # what the policy did itself
        assert counted(cut("g", [1.0], 0, how), excluding).trajectories[0].valid


# -- accounting --------------------------------------------------------------------------------------------------------


def test_every_sampled_token_is_in_one_place_also_those_of_dropped_groups() -> None:
    groups = (
        rewarded("g0", [1.0, 0.0, None], [3, 4, 50]),
        rewarded("g1", [1.0, 1.0], [5, 6]),  # filtered
        rewarded("g2", [1.0, None], [7, 8]),  # too few verdicts
        cut("g3", [1.0, 0.0], 1),
    )
    counting = Counting("mask")
    found = Gathered(groups, ("used", "filtered", "invalid", "used"))
    learned = learn(learner(), RLOO(), found.used, counting, PLAIN)
    rows = consumed(found, learned, RLOO(), counting)
    assert [row.outcome for row in rows] == ["trained", "filtered", "invalid", "trained"]
    counts = token_counts(rows)
    assert counts == {"trained": 9, "without_signal": 0, "filtered": 11, "invalid": 65, "truncated": 2}
    assert sum(counts.values()) == sum(t.sampled_tokens for g in groups for t in g.trajectories)
    metrics = learning_metrics(learned, rows) | rollout_metrics(found, counting, 0)
    assert metrics["update/tokens_filtered"] == 11
    assert metrics["update/action_tokens"] == 9
    assert (metrics["rollout/groups"], metrics["rollout/groups_filtered"], metrics["rollout/groups_too_small"]) == (
        4,
        1,
        1,
    )


# -- several updates per batch -----------------------------------------------------------------------------------------


def test_groups_are_dealt_whole_each_into_one_part() -> None:
    rng = np.random.default_rng(0)
    groups = [*random_groups(rng, groups=7), rewarded("flat", [1.0, 1.0])]
    credits = RLOO().credit(groups)
    parts = deal(credits, Objective(), 3, random.Random(0))
    assert sorted(i for part in parts for i in part) == list(range(7))  # the last one teaches nothing
    assert sorted(len(part) for part in parts) == [2, 2, 3]
    assert deal(credits, Objective(), 1, random.Random(0)) == [list(range(7))]
    assert len(deal(credits[:2], Objective(), 5, random.Random(0))) == 2
    assert deal(credits[7:], Objective(), 2, random.Random(0)) == []


def test_credit_stays_with_its_trajectory_however_rows_are_dealt_and_packed() -> None:
    lengths = [9, 1, 7, 2, 8, 3]
    groups = [rewarded(f"g{i}", [float(i), 0.0, 2.0 * i], [n, 12 - n, 5]) for i, n in enumerate(lengths, start=1)]
    plain = RLOO().credit(groups)
    expected = {
        t.id: float(stream[0])
        for g, credit in zip(groups, plain, strict=True)
        for t, stream in zip(g.trajectories, credit.advantages, strict=True)
        if stream is not None
    }
    for practice in (Practice(4096), Practice(16), Practice(16, updates_per_batch=4, epochs=2, seed=3)):
        found: dict[str, float] = {}
        for batch in learn(learner(), RLOO(), groups, Counting(), practice).batches:
            actions = batch.actions()
            for index, advantage in zip(actions.trajectory.tolist(), actions.advantages.tolist(), strict=True):
                assert found.setdefault(batch.trajectory_ids[index], advantage) == advantage
        assert found == expected


def test_one_update_per_batch_is_exactly_the_update_without_a_frozen_policy() -> None:
    groups = random_groups(np.random.default_rng(1))
    plain, once = learner(), learner()
    learned = learn(once, RLOO(), groups, Counting(), PLAIN)
    plain.update(learned.batches[0], RLOO())
    assert once.adapter().digest() == plain.adapter().digest()
    assert learned.updates[0].metrics["ratio_mean"] == 1.0
    recomputed = learner()
    learn(recomputed, RLOO(Objective(mode="decoupled")), groups, Counting(), PLAIN)
    one, two = once.adapter().factors, recomputed.adapter().factors
    assert all(np.allclose(one[name].b, two[name].b, atol=1e-6) for name in one)


@pytest.mark.parametrize("mode", ["on_policy", "decoupled"])
def test_later_updates_are_measured_against_the_policy_that_the_batch_was_frozen_with(mode: str) -> None:
    """Old log-probabilities taken anew in each update would leave every ratio at 1, and nothing to clip."""
    groups = sampled_by(learner(), random_groups(np.random.default_rng(2), groups=4))
    algorithm = RLOO(Objective(mode=mode))  # type: ignore[arg-type]
    learned = learn(learner(0.05), algorithm, groups, Counting(), Practice(4096, updates_per_batch=2, epochs=3))
    assert len(learned.updates) == 6
    assert [stats.step for stats in learned.updates] == [1, 2, 3, 4, 5, 6]
    first, later = learned.updates[0].metrics, learned.updates[3:]
    assert first["ratio_mean"] == pytest.approx(1.0, abs=1e-6)
    assert all(abs(stats.metrics["ratio_max"] - 1) > 0.05 for stats in later)
    assert any(stats.metrics["clip_high_fraction"] + stats.metrics["clip_low_fraction"] > 0 for stats in later)
    # the engine is compared with the frozen policy, which it sampled from, however far the policy has gone
    assert learned.fresh == 2
    assert all(stats.metrics["log_rho_abs_max"] < 1e-5 for stats in learned.updates)


def test_in_bypass_only_the_first_update_compares_the_engine_with_what_it_serves() -> None:
    groups = sampled_by(learner(), random_groups(np.random.default_rng(2), groups=4))
    algorithm = RLOO(Objective(mode="bypass", correction=None))
    learned = learn(learner(0.05), algorithm, groups, Counting(), Practice(4096, updates_per_batch=2))
    assert learned.fresh == 1
    assert learned.updates[0].metrics["log_rho_abs_max"] < 1e-5
    assert learned.updates[1].metrics["log_rho_abs_max"] > 1e-3


def test_each_update_counts_its_denominators_over_its_own_part() -> None:
    groups = random_groups(np.random.default_rng(3), groups=6)
    learned = learn(learner(), RLOO(), groups, Counting(), Practice(4096, updates_per_batch=3))
    assert [batch.actions().weights.sum() for batch in learned.batches] == pytest.approx([1.0] * 3)
    assert learned.action_tokens == sum(t.sampled_tokens for g in groups for t in g.trajectories)


def test_the_order_of_parts_is_the_same_in_every_life_of_a_run_and_another_at_another_step() -> None:
    groups = random_groups(np.random.default_rng(4), groups=6)
    practice = Practice(4096, updates_per_batch=3, epochs=2, seed=7)
    one, two = learner(), learner()
    first = learn(one, RLOO(), groups, Counting(), practice)
    again = learn(two, RLOO(), groups, Counting(), practice)
    assert [b.group_ids for b in first.batches] == [b.group_ids for b in again.batches]
    assert one.adapter().digest() == two.adapter().digest()
    later = [learn(one, RLOO(), groups, Counting(), practice) for _ in range(3)]
    assert any([b.group_ids for b in one_of.batches] != [b.group_ids for b in first.batches] for one_of in later)


# -- a KL in the reward ------------------------------------------------------------------------------------------------


def test_penalties_are_of_sampled_tokens_in_their_order_and_none_at_the_start() -> None:
    groups = random_groups(np.random.default_rng(5))
    fresh, moved = learner(), learner(0.05)
    assert all(
        not stream.any()
        for of_group in measure_penalties(fresh, groups, 0.1, 64)
        for stream in of_group
        if stream is not None
    )
    learn(moved, RLOO(), groups, Counting(), PLAIN)
    whole, pieces = measure_penalties(moved, groups, 0.1, 4096), measure_penalties(moved, groups, 0.1, 30)
    for one, two, of_group in zip(whole, pieces, groups, strict=True):
        for a, b, t in zip(one, two, of_group.trajectories, strict=True):
            assert a is not None
            assert b is not None
            assert a.shape == (t.sampled_tokens,)
            assert np.abs(a).max() > 1e-4
            assert np.allclose(a, b, atol=1e-6)
    (alone,) = measure_penalties(moved, groups[1:], 0.1, 4096)
    assert all(
        np.allclose(a, b, atol=1e-6) for a, b in zip(alone, whole[1], strict=True) if a is not None and b is not None
    )


def test_a_kl_in_the_reward_pulls_back_to_the_reference_though_all_outcomes_are_the_same() -> None:
    objective = Objective(kl="reward_k1", kl_coefficient=0.5, correction=None)
    mixed = random_groups(np.random.default_rng(6), groups=3)
    moved = learner(0.02)
    for _ in range(3):
        learn(moved, RLOO(), sampled_by(moved, mixed), Counting(), PLAIN)
    same = [replace(g, trajectories=tuple(replace(t, verdict=Scored(1.0)) for t in g.trajectories)) for g in mixed]
    learned = learn(moved, RLOO(objective), sampled_by(moved, same), Counting(), PLAIN)
    assert learned.updates
    assert all(credit.signal for credit in learned.credits)
    assert not learn(moved, RLOO(), same, Counting(), PLAIN).updates


# -- what is written down ----------------------------------------------------------------------------------------------


def test_a_figure_that_is_no_number_is_null_in_the_metrics_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    metrics = Metrics(tmp_path / "metrics.jsonl")
    metrics.log(3, {"update/ratio_max": float("inf"), "a": float("nan"), "b": 1.5})
    metrics.close()
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line, parse_constant=pytest.fail) == {"step": 3, "update/ratio_max": None, "a": None, "b": 1.5}
    assert "a, update/ratio_max not finite" in caplog.text


def stats(gap: float) -> UpdateStats:
    return UpdateStats(1, 0.0, 0.0, 0.0, 10, 10, 1, 0.0, {"log_rho_abs_mean": gap, "log_rho_abs_max": gap})


def test_a_run_stops_when_engine_and_trainer_disagree_for_too_long() -> None:
    watch, summary = GapWatch(True, 0.01, patience=2), Summary("e", "s", 0)
    for gap in (0.02, 0.001, 0.02):
        watch.note([stats(gap)], summary)
    with pytest.raises(IntegrityError, match=r"2 steps in a row .* 0\.03 on average"):
        watch.note([stats(0.02), stats(0.04)], summary)
    assert summary.gap_count == 50
    for quiet in (GapWatch(False, 0.01, 1), GapWatch(True, None, 1)):
        quiet.note([stats(5.0)], summary)


def test_a_group_of_no_verdicts_is_learned_from_by_nobody() -> None:
    learned = learn(learner(), RLOO(), [rewarded("g0", [None, None])], Counting(), Practice(64, updates_per_batch=2))
    assert (learned.updates, learned.action_tokens, learned.fresh) == ((), 0, 0)
    assert learn(learner(), RLOO(), [], Counting(), PLAIN).updates == ()


@pytest.mark.parametrize("name", KNOWN)
def test_a_step_in_which_no_group_is_used_learns_nothing_whatever_the_algorithm(name: str) -> None:
    spreads = [{}, {"std": "none"}, {"std": "batch"}] if KNOWN[name].algorithm is GRPO else [{}]
    for extra in [spread | ({"objectives": {"x": 1.0}} if name == "gdpo" else {}) for spread in spreads]:
        algorithm = make_algorithm(AlgorithmSettings(name=name, **extra), 100)  # type: ignore[arg-type]
        assert algorithm.credit([], Measured((), ())) == []


def test_the_age_of_tokens_is_counted_from_when_the_batch_was_frozen_in_each_of_its_updates() -> None:
    """The policy's own tokens: in every update `old` is what sampled them, so the ratio and the drift are one."""
    made = learner(rate=2e-2)
    groups = sampled_by(made, random_groups(np.random.default_rng(3), groups=1, per_group=4))
    algorithm = RLOO(Objective(mode="decoupled_loglinear"))
    learned = learn(made, algorithm, groups, Counting(), Practice(4096, epochs=4))
    found = [update.metrics for update in learned.updates]
    assert len({metrics["staleness_max"] for metrics in found}) == 1
    known = learner(rate=2e-2)
    decoupled = learn(known, RLOO(Objective(mode="decoupled")), groups, Counting(), Practice(4096, epochs=4))
    for metrics, update in zip(found, decoupled.updates, strict=True):
        assert metrics["ratio_max"] == pytest.approx(update.metrics["ratio_max"], rel=1e-3)


STATES = ["begun", "went on"]
EARNED = group(
    "g",
    [
        played("a", [2, 2], 0.0, rewards=[1.0, 0.0], states=STATES),
        played("b", [2, 2], 0.0, states=STATES),
    ],
)


@pytest.mark.parametrize("name", KNOWN)
def test_what_turns_earn_is_learned_from_or_refused_and_never_lost(name: str) -> None:
    extra = {"objectives": {"x": 1.0}} if name == "gdpo" else {}
    algorithm = make_algorithm(AlgorithmSettings(name=name, **extra), 100)  # type: ignore[arg-type]
    if type(algorithm) in OUTCOME_ONLY:
        with pytest.raises(ConfigError, match=r"turn 0 of trajectory a earned 1, but .* learns from outcomes alone"):
            learn(learner(), algorithm, [EARNED], Counting(), Practice(100))
        return
    check_turn_rewards(algorithm, [EARNED])
    zeros = tuple(np.zeros(t.sampled_tokens) for t in EARNED.trajectories)
    measured = Measured(values=(zeros,), last_values=((0.0, 0.0),))
    assert algorithm.credit([EARNED], measured)[0].signal


def test_settings_that_cannot_be_right_together_are_refused() -> None:
    for wrong, said in (
        ({"algorithm": {"name": "reinforce", "epochs": 2}}, "one step"),
        ({"algorithm": {"updates_per_batch": 9}}, "dealt whole"),
        ({"run": {"max_lag": 1}, "algorithm": {"correction": "none"}}, "nothing makes up for it"),
        ({"run": {"min_group_size": 9}}, "no group would ever be used"),
        ({"algorithm": {"dynamic_sampling": True, "name": "ppo"}, "rollout": {"group_size": 1}}, "use 2 or more"),
        ({"algorithm": {"overlong_tokens": 4000}}, "never allows"),
        ({"algorithm": {"overlong_cache": 5}}, "both or neither"),
        ({"run": {"max_lag": 1}, "algorithm": {"tis_cap": "off"}}, "and tis_cap off nothing makes up for it"),
        ({"run": {"max_lag": 1}, "algorithm": {"correction": "opsm", "opsm_delta": 0.1}}, "nothing makes up for it"),
        (
            {"run": {"max_lag": 1}, "algorithm": {"correction": "turn_geo_mask", "tis_cap": "off"} | BAND},
            "nothing makes up for it",
        ),
        ({"run": {"max_lag": 1}, "rollout": {"max_sampled_gap": 0.1}}, "max_lag to 0"),
        ({"algorithm": {"name": "gdpo", "objectives": {"a": 1.0}, "token_cost": 0.1}}, "add token_cost"),
    ):
        with pytest.raises(ConfigError, match=said):
            parse_config(wrong, "test")
