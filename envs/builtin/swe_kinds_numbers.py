"""Repositories about numbers: intervals and dates."""

from __future__ import annotations

from palestra.envs.builtin.swe_kinds import Fault, Kind

INTERVALS = Kind(
    "intervals",
    {
        "intervals/__init__.py": "from intervals.sets import gaps, merge, total\n\n"
        "__all__ = ['gaps', 'merge', 'total']\n",
        "intervals/checks.py": '''"""What an interval is: (start, end), the end not in it."""


def checked(intervals):
    """The intervals that hold something, in order. Raises ValueError for one that ends before it starts."""
    for start, end in intervals:
        if end < start:
            raise ValueError(f"({start}, {end}) ends before it starts")
    return sorted((start, end) for start, end in intervals if start < end)
''',
        "intervals/sets.py": '''"""Sets of intervals."""

from intervals.checks import checked


def merge(intervals):
    """The same points in as few intervals as will do."""
    merged = []
    for start, end in checked(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def total(intervals):
    """How long they are together; a point counts once."""
    return sum(end - start for start, end in merge(intervals))


def gaps(intervals):
    """What lies between them."""
    merged = merge(intervals)
    return [(left[1], right[0]) for left, right in zip(merged, merged[1:])]
''',
    },
    """from intervals import merge, total


def test_one_interval():
    assert merge([(1, 3)]) == [(1, 3)]


def test_total_of_two_apart():
    assert total([(0, 1), (5, 7)]) == 3
""",
    """import pytest

from intervals import gaps, merge, total


def test_neighbours_become_one():
    assert merge([(0, 2), (2, 4)]) == [(0, 4)]


def test_one_inside_another():
    assert merge([(0, 9), (2, 4)]) == [(0, 9)]


def test_a_point_counts_once():
    assert total([(0, 4), (3, 6)]) == 6


def test_empty_intervals_are_left_out():
    assert merge([(5, 5), (1, 2)]) == [(1, 2)]


def test_gaps_lie_between():
    assert gaps([(6, 8), (0, 2), (3, 4)]) == [(2, 3), (4, 6)]


def test_a_wrong_interval_is_refused():
    with pytest.raises(ValueError):
        merge([(2, 1)])
""",
    (
        Fault(
            "intervals/sets.py",
            "start <= merged[-1][1]",
            "start < merged[-1][1]",
            "`merge` leaves intervals apart that touch: (0, 2) and (2, 4) should become (0, 4).",
            ("test_neighbours_become_one",),
        ),
        Fault(
            "intervals/sets.py",
            "max(end, merged[-1][1])",
            "end",
            "Merging an interval with one that lies inside it makes it shorter.",
            ("test_one_inside_another",),
        ),
        Fault(
            "intervals/checks.py",
            "if start < end)",
            "if start <= end)",
            "Intervals that hold nothing, such as (5, 5), show up in the result of `merge`.",
            ("test_empty_intervals_are_left_out",),
        ),
    ),
)

DATES = Kind(
    "dates",
    {
        "dates/__init__.py": "from dates.months import add_months, days_in_month\n"
        "from dates.weeks import workdays\n\n__all__ = ['add_months', 'days_in_month', 'workdays']\n",
        "dates/months.py": '''"""Months, whose lengths differ."""

from datetime import date

LENGTHS = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)


def is_leap(year):
    """Whether the year has a 29 February."""
    return year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)


def days_in_month(year, month):
    """28 to 31."""
    return 29 if month == 2 and is_leap(year) else LENGTHS[month - 1]


def add_months(day, months):
    """The same day of another month, or its last day where there is no such day."""
    year, month = divmod(day.year * 12 + day.month - 1 + months, 12)
    return date(year, month + 1, min(day.day, days_in_month(year, month + 1)))
''',
        "dates/weeks.py": '''"""Weeks and the days on which people work."""

from datetime import timedelta


def workdays(start, end):
    """Mondays to Fridays from `start` up to `end`, both counted."""
    count = 0
    day = start
    while day <= end:
        if day.weekday() < 5:
            count += 1
        day += timedelta(days=1)
    return count
''',
    },
    """from datetime import date

from dates import add_months, days_in_month


def test_a_common_month():
    assert days_in_month(2023, 4) == 30


def test_the_next_month():
    assert add_months(date(2023, 4, 10), 1) == date(2023, 5, 10)
""",
    """from datetime import date

from dates import add_months, days_in_month, workdays


def test_centuries_are_no_leap_years():
    assert days_in_month(1900, 2) == 28


def test_every_fourth_century_is():
    assert days_in_month(2000, 2) == 29


def test_the_last_day_of_a_shorter_month():
    assert add_months(date(2023, 1, 31), 1) == date(2023, 2, 28)


def test_back_over_the_year():
    assert add_months(date(2023, 1, 15), -2) == date(2022, 11, 15)


def test_december_is_a_month():
    assert add_months(date(2023, 11, 5), 1) == date(2023, 12, 5)


def test_the_last_day_counts():
    assert workdays(date(2024, 1, 1), date(2024, 1, 5)) == 5


def test_weekends_do_not():
    assert workdays(date(2024, 1, 6), date(2024, 1, 7)) == 0
""",
    (
        Fault(
            "dates/months.py",
            "year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)",
            "year % 4 == 0",
            "February 1900 is given 29 days.",
            ("test_centuries_are_no_leap_years",),
        ),
        Fault(
            "dates/months.py",
            "min(day.day, days_in_month(year, month + 1))",
            "day.day",
            "Adding a month to 31 January raises ValueError; the last day of February was expected.",
            ("test_the_last_day_of_a_shorter_month",),
        ),
        Fault(
            "dates/weeks.py",
            "while day <= end",
            "while day < end",
            "`workdays` leaves the last day out, though both ends should count.",
            ("test_the_last_day_counts",),
        ),
    ),
)

KINDS = (INTERVALS, DATES)
