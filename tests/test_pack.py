"""From groups to rows: what is kept, what is cut, and that every sampled token is somewhere."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from learning_support import POISONS, golden, group, random_groups, rewarded, sample, trajectory
from palestra.envs.errors import IntegrityError
from palestra.rl.aggregation import Aggregation
from palestra.rl.algorithms.base import Credit
from palestra.rl.algorithms.rloo import RLOO
from palestra.rl.batch import Batch, PackedRow, pack
from palestra.rl.members import Actions
from palestra.rl.objective import Objective
from palestra.rl.planning import Piece, plan_rows, row_cost
from palestra.rollout.types import Group


def packed(groups: list[Group], tokens: int = 64, objective: Objective | None = None, ranks: int = 1) -> Batch:
    return pack(groups, [RLOO().advantages(g) for g in groups], tokens, objective or Objective(), ranks=ranks)


def alone(lengths: list[int]) -> list[Piece]:
    """Trajectories of one sample each that have nothing in common."""
    return [Piece(length, length * (length + 1) // 2, group=0) for length in lengths]


def two(first: list[int], mask: list[int], **facts: object) -> Group:
    """A group of two one-row trajectories, so that there is signal."""
    rows = [sample(first, mask, **facts), sample([3, 4], [0, 1])]  # type: ignore[arg-type]
    return group("g", [trajectory(f"t{i}", [row], 1.0 - i) for i, row in enumerate(rows)])


def test_positions_restart_and_boundaries_part_the_members() -> None:
    case = golden("packing_tree")["packing/varlen"]
    # one observation-free row per sequence: all but the first token sampled, and one more, which is cut as it is input
    rows = [sample([*ids, 0], [0] + [1] * len(ids)) for ids in case["inputs"]["sequences"]]
    made = group("g", [trajectory(f"t{i}", [row], float(i == 0)) for i, row in enumerate(rows)])
    row = packed([made]).rows[0]
    order = [len(row) for row in sorted(case["inputs"]["sequences"], key=len, reverse=True)]
    assert np.diff(row.boundaries).tolist() == order
    assert row.positions.tolist() == [p for length in order for p in range(length)]
    assert sorted(row.ids.tolist()) == sorted(case["expected"]["packed"])


def test_no_target_is_predicted_across_a_boundary() -> None:
    batch = packed(random_groups(np.random.default_rng(0)), tokens=500)
    (row,) = batch.rows
    starts = row.boundaries[:-1]
    for predictor, target, member in zip(row.predictors, row.actions.targets, row.actions.sample, strict=True):
        inside = int(np.searchsorted(row.boundaries, predictor, side="right")) - 1
        assert starts[inside] <= predictor < row.boundaries[inside + 1]
        same_member = row.actions.sample[
            (row.predictors >= starts[inside]) & (row.predictors < row.boundaries[inside + 1])
        ]
        assert set(same_member.tolist()) == {int(member)}
        if predictor + 1 < row.boundaries[inside + 1]:
            assert row.ids[predictor + 1] == target


def test_what_follows_the_last_predictor_is_cut() -> None:
    batch = packed([two([10, 11, 12, 13, 14, 15], [0, 1, 0, 1, 0, 0])])
    assert batch.rows[0].ids.tolist()[:3] == [10, 11, 12]
    assert batch.num_tokens == 3 + 1
    assert batch.rows[0].predictors.tolist() == [0, 2, 3]
    assert batch.rows[0].actions.targets.tolist() == [11, 13, 4]


@pytest.mark.parametrize("poison", POISONS)
def test_poison_at_unsampled_places_reaches_nothing(poison: float) -> None:
    row = packed([two([10, 11, 12, 13], [0, 1, 0, 1], poison=poison)]).rows[0]
    for field in fields(Actions):
        if field.name in ("returns", "old_values"):
            continue  # NaN where no critic is asked
        assert np.isfinite(getattr(row.actions, field.name)).all(), field.name
    assert abs(row.actions.sampling_logprobs).max() < 10


def test_an_end_token_that_was_sampled_is_trained_whatever_its_id() -> None:
    end = 2
    batch = packed([two([5, 6, 7, end, end, 8, end], [0, 1, 1, 1, 0, 1, 1])])
    assert batch.rows[0].actions.targets.tolist()[:5] == [6, 7, end, 8, end]


def test_every_sampled_token_is_accounted_for() -> None:
    signal = rewarded("a", [1.0, 0.0, None], [3, 4, 5])
    flat = rewarded("b", [1.0, 1.0], [6, 7])
    batch = packed([signal, flat])
    account = batch.accounting
    assert (account.trained_tokens, account.tokens_without_signal, account.invalid_tokens) == (7, 13, 5)
    assert account.sampled_tokens == 7 + 13 + 5
    assert batch.num_actions == 7
    assert (account.groups, account.groups_without_signal) == (2, 1)
    assert (account.trained_trajectories, account.invalid_trajectories) == (2, 1)
    assert batch.trajectory_ids == ("a0", "a1")
    assert batch.group_ids == ("a",)


def test_groups_without_signal_count_in_no_denominator() -> None:
    signal, flat = rewarded("a", [1.0, 0.0]), rewarded("b", [1.0, 1.0])
    assert (
        packed([signal, flat]).actions().weights.tolist() == packed([signal]).actions().weights.tolist() == [0.25] * 4
    )


def test_groups_without_signal_count_when_asked_to() -> None:
    counting = Objective(aggregation=Aggregation(count_without_signal=True))
    batch = packed([rewarded("a", [1.0, 0.0]), rewarded("b", [1.0, 1.0], [3, 3])], objective=counting)
    assert batch.actions().weights.tolist() == [0.1] * 4
    assert batch.num_actions == batch.accounting.trained_tokens == 4


def test_groups_without_signal_stay_when_something_else_is_learned_from_them() -> None:
    batch = packed([rewarded("b", [1.0, 1.0])], objective=Objective(kl_coefficient=0.1))
    assert batch.num_actions == 4
    assert batch.actions().advantages.tolist() == [0.0] * 4


def test_a_step_without_any_signal_is_an_empty_batch() -> None:
    batch = packed([rewarded("b", [1.0, 1.0])])
    assert (batch.num_actions, batch.rows) == (0, ())
    assert batch.accounting.tokens_without_signal == batch.accounting.sampled_tokens == 4


def test_credit_goes_to_the_tokens_of_its_trajectory_however_rows_are_ordered() -> None:
    lengths = [9, 1, 7, 2, 8, 3]
    made = rewarded("g", [float(i) for i in range(6)], lengths)
    expected = {f"g{i}": value for i, value in enumerate((np.arange(6) - 2.5) * 6 / 5)}
    for tokens in (1, 9, 10, 64):
        batch = packed([made], tokens)
        for name, advantage in zip(batch.actions().trajectory, batch.actions().advantages, strict=True):
            assert advantage == pytest.approx(expected[batch.trajectory_ids[name]])
        assert len(batch.actions()) == sum(lengths)


def test_credit_per_token_follows_the_rows_of_its_trajectory() -> None:
    rows = [sample([1, 2, 3], [0, 1, 1]), sample([4, 5], [0, 0]), sample([6, 7, 8, 9], [0, 1, 0, 1])]
    made = group("g", [trajectory("t", rows, 1.0)])
    batch = pack([made], [Credit((np.array([1.0, 2.0, 3.0, 4.0]),))], 64, Objective())
    actions = batch.actions()
    found = dict(zip(actions.targets.tolist(), actions.advantages.tolist(), strict=True))
    assert found == {2: 1.0, 3: 2.0, 7: 3.0, 9: 4.0}
    assert len(set(actions.sample.tolist())) == 2
    assert set(actions.trajectory.tolist()) == {0}


def test_credit_of_the_wrong_length_is_found_out() -> None:
    made = group("g", [trajectory("t", [sample([1, 2, 3], [0, 1, 1])], 1.0)])
    with pytest.raises(IntegrityError, match="credit for 3 tokens"):
        pack([made], [Credit((np.ones(3),))], 64, Objective())


@pytest.mark.parametrize(
    ("logprob", "temperature"), [(float("nan"), 1.0), (float("-inf"), 1.0), (-1.0, 0.0), (-1.0, float("nan"))]
)
def test_a_sampled_token_without_a_usable_log_probability_stops_the_step(logprob: float, temperature: float) -> None:
    made = two([10, 11, 12], [0, 1, 1], logprobs=[0.0, -1.0, logprob], temperature=temperature)
    with pytest.raises(IntegrityError, match=r"trajectory t0, sample 0, token"):
        packed([made])


def test_a_sampled_first_token_has_nothing_that_predicts_it() -> None:
    with pytest.raises(IntegrityError, match="token 0 is sampled"):
        packed([two([10, 11], [1, 1])])


def test_a_member_longer_than_the_budget_gets_its_own_row() -> None:
    assert plan_rows(alone([3, 20, 4, 2]), 8)[0] == [1]
    with pytest.raises(ValueError, match="at least one"):
        plan_rows(alone([1]), 0)


@settings(max_examples=200, deadline=None)
@given(lengths=st.lists(st.integers(1, 60), max_size=40), tokens=st.integers(1, 100), ranks=st.integers(1, 4))
def test_a_plan_holds_every_member_once_within_its_budget(lengths: list[int], tokens: int, ranks: int) -> None:
    plan = plan_rows(alone(lengths), tokens, multiple_of=ranks)
    assert sorted(i for row in plan for i in row) == list(range(len(lengths)))
    assert all(len(row) == 1 or sum(lengths[i] for i in row) <= tokens for row in plan)
    assert len(plan) % ranks == 0
    assert ranks > 1 or all(plan)


def test_ranks_get_even_shares_of_the_work() -> None:
    pieces = alone([int(100 * (1 - (i + 0.5) / 64) ** -0.7) for i in range(64)])
    plan = plan_rows(pieces, 1000, multiple_of=4)
    work = [sum(row_cost(pieces[i].tokens, pieces[i].pairs) for row in plan[rank::4] for i in row) for rank in range(4)]
    assert max(work) < 1.15 * min(work)


def test_attention_makes_long_trajectories_cost_more_than_their_length() -> None:
    long, short = alone([20_000, 1_000])
    assert row_cost(long.tokens, long.pairs) > 2 * 10 * row_cost(short.tokens, short.pairs)


def test_a_group_stays_together_where_it_fits_so_that_its_prompt_stands_once() -> None:
    pieces = [Piece(150, 150 * 151 // 2, group=i % 2, shared=100) for i in range(8)]
    assert sorted(map(sorted, plan_rows(pieces, 300))) == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert len(plan_rows(pieces, 250)) == 4  # three of a group, or one more row for the fourth
    assert [len(row) for row in plan_rows([Piece(100, 5050, 0, 90)] * 8, 10_000)] == [8]


def test_a_group_is_parted_when_its_ranks_would_wait() -> None:
    pieces = [Piece(1000, 500_500, group=0, shared=100) for _ in range(8)]
    plan = plan_rows(pieces, 100_000, multiple_of=4)
    assert sorted(len(row) for row in plan) == [2, 2, 2, 2]


def rows_equal(a: PackedRow, b: PackedRow) -> bool:
    return bool(np.array_equal(a.ids, b.ids)) and bool(np.array_equal(a.predictors, b.predictors))


def test_packing_is_deterministic() -> None:
    a, b = (packed(random_groups(np.random.default_rng(3)), 40) for _ in range(2))
    assert all(rows_equal(x, y) for x, y in zip(a.rows, b.rows, strict=True))
