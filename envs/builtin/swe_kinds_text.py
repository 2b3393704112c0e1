"""Repositories about text: a calculator's parser, wrapping, settings files."""

from __future__ import annotations

from palestra.envs.builtin.swe_kinds import Fault, Kind

PARSER = Kind(
    "calculator",
    {
        "calculator/__init__.py": "from calculator.parser import evaluate\n\n__all__ = ['evaluate']\n",
        "calculator/tokens.py": '''"""From text to tokens."""

import re

TOKEN = re.compile(r"\\s*(?:(\\d+)|(.))")


def tokens(text):
    """Numbers as int, everything else as one character."""
    found = []
    for number, other in TOKEN.findall(text.rstrip()):
        found.append(int(number) if number else other)
    return found
''',
        "calculator/parser.py": '''"""From tokens to a value, by recursive descent."""

from calculator.tokens import tokens


def evaluate(text):
    """The value of an expression of integers with + - * / and parentheses."""
    rest = tokens(text)
    value = _sum(rest)
    if rest:
        raise ValueError(f"unexpected {rest[0]!r}")
    return value


def _sum(rest):
    value = _product(rest)
    while rest and rest[0] in ("+", "-"):
        sign = rest.pop(0)
        right = _product(rest)
        value = value + right if sign == "+" else value - right
    return value


def _product(rest):
    value = _factor(rest)
    while rest and rest[0] in ("*", "/"):
        sign = rest.pop(0)
        right = _factor(rest)
        value = value * right if sign == "*" else value / right
    return value


def _factor(rest):
    if not rest:
        raise ValueError("unexpected end")
    first = rest.pop(0)
    if first == "-":
        return -_factor(rest)
    if first == "(":
        value = _sum(rest)
        if not rest or rest.pop(0) != ")":
            raise ValueError("a parenthesis is not closed")
        return value
    if isinstance(first, int):
        return first
    raise ValueError(f"unexpected {first!r}")
''',
    },
    """from calculator import evaluate


def test_one_number():
    assert evaluate("7") == 7


def test_a_sum():
    assert evaluate("1 + 2") == 3
""",
    """import pytest

from calculator import evaluate


def test_sums_run_from_left_to_right():
    assert evaluate("10 - 3 - 2") == 5


def test_products_bind_tighter():
    assert evaluate("2 + 3 * 4") == 14


def test_a_sign_before_a_parenthesis():
    assert evaluate("-(2 + 3)") == -5


def test_two_signs():
    assert evaluate("4 - -1") == 5


def test_what_is_left_over_is_refused():
    with pytest.raises(ValueError):
        evaluate("(1) 2")


def test_an_open_parenthesis_is_refused():
    with pytest.raises(ValueError):
        evaluate("(1 + 2")
""",
    (
        Fault(
            "calculator/parser.py",
            "        right = _product(rest)\n",
            "        right = _sum(rest)\n",
            "`10 - 3 - 2` gives 9. Differences should be worked out from left to right.",
            ("test_sums_run_from_left_to_right",),
        ),
        Fault(
            "calculator/parser.py",
            "        return -_factor(rest)\n",
            "        return -rest.pop(0)\n",
            "A minus before a parenthesis or another minus, as in `-(2 + 3)`, ends in a TypeError.",
            ("test_a_sign_before_a_parenthesis",),
        ),
        Fault(
            "calculator/parser.py",
            "    if rest:\n",
            "    if rest and not isinstance(rest[0], int):\n",
            "`(1) 2` is accepted and gives 1; text left over after an expression should raise ValueError.",
            ("test_what_is_left_over_is_refused",),
        ),
    ),
)

WRAPPING = Kind(
    "wrapping",
    {
        "wrapping/__init__.py": "from wrapping.lines import indent, wrap\n\n__all__ = ['indent', 'wrap']\n",
        "wrapping/words.py": '''"""Words of a text."""


def words(text, width):
    """The words, those longer than `width` cut into pieces of it."""
    for word in text.split():
        while len(word) > width:
            yield word[:width]
            word = word[width:]
        yield word
''',
        "wrapping/lines.py": '''"""Lines of a width."""

from wrapping.words import words


def wrap(text, width):
    """Lines of at most `width` characters; none for a text without words."""
    if width < 1:
        raise ValueError("width must be 1 or more")
    lines = []
    line = ""
    for word in words(text, width):
        longer = f"{line} {word}" if line else word
        if len(longer) <= width:
            line = longer
        else:
            lines.append(line)
            line = word
    return lines + [line] if line else lines


def indent(lines, by):
    """The lines moved to the right; empty ones stay empty."""
    return [" " * by + line if line else line for line in lines]
''',
    },
    """from wrapping import wrap


def test_a_short_text_is_one_line():
    assert wrap("a b", 10) == ["a b"]


def test_a_long_text_is_several():
    assert wrap("aaa bbb", 4) == ["aaa", "bbb"]
""",
    """import pytest

from wrapping import indent, wrap


def test_a_line_may_fill_the_width():
    assert wrap("aa bb cc", 5) == ["aa bb", "cc"]


def test_a_word_longer_than_the_width_is_cut():
    assert wrap("abcdefgh", 3) == ["abc", "def", "gh"]


def test_no_words_no_lines():
    assert wrap("   ", 4) == []


def test_a_width_of_none_is_refused():
    with pytest.raises(ValueError):
        wrap("a", 0)


def test_empty_lines_stay_empty():
    assert indent(["a", "", "b"], 2) == ["  a", "", "  b"]
""",
    (
        Fault(
            "wrapping/lines.py",
            "len(longer) <= width",
            "len(longer) < width",
            "`wrap` never fills a line: `wrap('aa bb cc', 5)` puts each word on its own line.",
            ("test_a_line_may_fill_the_width", "test_a_word_longer_than_the_width_is_cut"),
        ),
        Fault(
            "wrapping/words.py",
            "            word = word[width:]\n",
            "            word = word[width + 1 :]\n",
            "Long words lose a character at each place where they are cut.",
            ("test_a_word_longer_than_the_width_is_cut",),
        ),
        Fault(
            "wrapping/lines.py",
            '" " * by + line if line else line',
            '" " * by + line',
            "`indent` leaves spaces at the end of lines that were empty.",
            ("test_empty_lines_stay_empty",),
        ),
    ),
)

SETTINGS = Kind(
    "settings",
    {
        "settings/__init__.py": "from settings.reader import read\n\n__all__ = ['read']\n",
        "settings/values.py": '''"""Values of settings."""


def value(text):
    """True, False, an integer, or the text without its quotes."""
    if text in ("yes", "no"):
        return text == "yes"
    if text.lstrip("-").isdigit():
        return int(text)
    if len(text) >= 2 and text[0] == text[-1] == '"':
        return text[1:-1]
    return text
''',
        "settings/reader.py": '''"""Files of settings: sections, keys, comments."""

from settings.values import value


def read(text):
    """{section: {key: value}}; what stands before the first section is in section ''."""
    sections = {}
    current = ""
    for line in text.splitlines():
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        if line.startswith("[") and line.endswith("]"):
            current = line[1:-1].strip()
            sections.setdefault(current, {})
            continue
        key, equals, rest = line.partition("=")
        if not equals:
            raise ValueError(f"no '=' in {line!r}")
        sections.setdefault(current, {})[key.strip()] = value(rest.strip())
    return sections
''',
    },
    """from settings import read


def test_a_key():
    assert read("[a]\\nname = oak") == {"a": {"name": "oak"}}


def test_a_comment():
    assert read("# nothing") == {}
""",
    """import pytest

from settings import read


def test_a_value_may_hold_an_equals_sign():
    assert read("[a]\\nrule = x=y") == {"a": {"rule": "x=y"}}


def test_numbers_may_be_negative():
    assert read("[a]\\nn = -3") == {"a": {"n": -3}}


def test_a_section_may_be_continued():
    assert read("[a]\\nx = 1\\n[b]\\n[a]\\ny = 2") == {"a": {"x": 1, "y": 2}, "b": {}}


def test_words_for_true_and_false():
    assert read("on = yes\\noff = no") == {"": {"on": True, "off": False}}


def test_quotes_are_taken_off():
    assert read('a = "7"') == {"": {"a": "7"}}


def test_a_line_without_equals_is_refused():
    with pytest.raises(ValueError):
        read("nonsense")
""",
    (
        Fault(
            "settings/reader.py",
            'line.partition("=")',
            'line.rpartition("=")',
            "A value with an equals sign in it is read wrongly: `rule = x=y` becomes a key `rule = x`.",
            ("test_a_value_may_hold_an_equals_sign",),
        ),
        Fault(
            "settings/values.py",
            'text.lstrip("-").isdigit()',
            "text.isdigit()",
            "Negative numbers come back as text.",
            ("test_numbers_may_be_negative",),
        ),
        Fault(
            "settings/reader.py",
            "            sections.setdefault(current, {})\n",
            "            sections[current] = {}\n",
            "A section that is opened a second time loses the keys that it had.",
            ("test_a_section_may_be_continued",),
        ),
    ),
)

KINDS = (PARSER, WRAPPING, SETTINGS)
