"""Intervals of success rates."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palestra.rl.statistics import clustered_interval


def test_one_sample_per_task_is_the_wilson_interval() -> None:
    interval = clustered_interval({f"t{i}": [float(i < 6)] for i in range(10)})
    assert (interval.mean, interval.tasks, interval.samples) == (0.6, 10, 10)
    # Wilson (1927) for 6 of 10
    assert interval.low == pytest.approx(0.3127, abs=0.02)
    assert interval.high == pytest.approx(0.8318, abs=0.02)


def test_repeating_the_same_answers_narrows_nothing() -> None:
    once = clustered_interval({f"t{i}": [float(i < 20)] for i in range(40)})
    thrice = clustered_interval({f"t{i}": [float(i < 20)] * 3 for i in range(40)})
    assert thrice.low == pytest.approx(once.low, abs=1e-9)
    assert thrice.high == pytest.approx(once.high, abs=1e-9)


def test_samples_that_disagree_within_a_task_do_narrow_it() -> None:
    once = clustered_interval({f"t{i}": [float(i < 20)] for i in range(40)})
    mixed = clustered_interval({f"t{i}": [0.0, 1.0, float(i < 20)] for i in range(40)})
    assert mixed.high - mixed.low < once.high - once.low


def test_all_or_nothing_never_has_zero_width() -> None:
    for value in (0.0, 1.0):
        interval = clustered_interval({f"t{i}": [value] * 4 for i in range(25)})
        assert interval.mean == value
        assert interval.high - interval.low > 0.05


def test_nothing_scored_is_an_error() -> None:
    with pytest.raises(ValueError, match="no scored episode"):
        clustered_interval({})


@given(st.dictionaries(st.text(max_size=3), st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=5), min_size=1))
def test_the_mean_lies_in_its_interval(values: dict[str, list[float]]) -> None:
    interval = clustered_interval(values)
    assert 0.0 <= interval.low <= interval.mean + 1e-12
    assert interval.mean - 1e-12 <= interval.high <= 1.0
