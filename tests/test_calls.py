"""The JSON-in-tags call format: what it reads, what it refuses, and that no text breaks or stalls it."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from palestra.envs.calls import JsonInTags
from palestra.envs.tools import Tool, ToolContext, openai_schema

FORMAT = JsonInTags()


def wrapped(text: str) -> str:
    return f"<tool_call>{text}</tool_call>"


def test_a_call_between_words_is_read_and_the_words_are_free() -> None:
    action = FORMAT.parse(
        'I look it up.\n<tool_call> {"name": "lookup", "arguments": {"key": "oak"}} </tool_call> Fine.'
    )
    assert [(c.id, c.name, c.arguments) for c in action.calls] == [("c1", "lookup", {"key": "oak"})]
    assert action.errors == ()


def test_words_without_tags_are_neither_call_nor_error() -> None:
    action = FORMAT.parse('{"name": "lookup", "arguments": {"key": "oak"}} submit DONE')
    assert action.calls == ()
    assert action.errors == ()


def test_arguments_as_a_string_and_as_an_object_are_the_same_call() -> None:
    as_object = FORMAT.parse(wrapped('{"name": "search", "arguments": {"q": "x", "n": 1.0}}'))
    as_string = FORMAT.parse(wrapped('{"name": "search", "arguments": "{\\"q\\": \\"x\\", \\"n\\": 1.0}"}'))
    assert as_object.calls == as_string.calls


def test_several_calls_and_errors_are_kept_apart_and_in_order() -> None:
    good, bad = wrapped('{"name": "a", "arguments": {}}'), wrapped("{")
    action = FORMAT.parse(good + bad + good.replace('"a"', '"b"'))
    assert [(c.id, c.name) for c in action.calls] == [("c1", "a"), ("c2", "b")]
    assert len(action.errors) == 1


def test_a_string_may_hold_the_tags_themselves() -> None:
    code = "print('</tool_call><tool_call>')"
    action = FORMAT.parse(FORMAT.render_call("python", {"code": code}))
    assert action.calls[0].arguments == {"code": code}
    assert action.errors == ()


REFUSED = {
    "a duplicate key": '{"name": "a", "arguments": {"x": 1, "x": 2}}',
    "a duplicate key in the call itself": '{"name": "a", "name": "b", "arguments": {}}',
    "NaN": '{"name": "a", "arguments": {"x": NaN}}',
    "minus infinity": '{"name": "a", "arguments": {"x": -Infinity}}',
    "a float beyond double precision": '{"name": "a", "arguments": {"x": 1e999}}',
    "an integer beyond 64 bits": '{"name": "a", "arguments": {"x": 9223372036854775809}}',
    "an integer of five thousand digits": '{"name": "a", "arguments": {"x": %s}}' % ("9" * 5000),
    "a trailing comma": '{"name": "a", "arguments": {"x": 1,}}',
    "a comment": '{"name": "a", /* hi */ "arguments": {}}',
    "single quotes": "{'name': 'a', 'arguments': {}}",
    "a lone surrogate": '{"name": "a", "arguments": {"x": "\\ud800"}}',
    "a raw line break in a string": '{"name": "a", "arguments": {"x": "1\n2"}}',
    "arguments as an array": '{"name": "a", "arguments": [1]}',
    "arguments as a number in a string": '{"name": "a", "arguments": "1"}',
    "arguments as a string of no JSON": '{"name": "a", "arguments": "x=1"}',
    "arguments as a string with a duplicate key": '{"name": "a", "arguments": "{\\"x\\": 1, \\"x\\": 2}"}',
    "no arguments": '{"name": "a"}',
    "no name": '{"arguments": {}}',
    "a name that is a number": '{"name": 7, "arguments": {}}',
    "an empty name": '{"name": "", "arguments": {}}',
    "a third key": '{"name": "a", "arguments": {}, "id": "c1"}',
    "an array": '[{"name": "a", "arguments": {}}]',
    "two values": '{"name": "a", "arguments": {}} {}',
    "thirty-three levels": '{"name": "a", "arguments": {"x": %s}}' % ("[" * 31 + "]" * 31),
    "ten thousand levels": '{"name": "a", "arguments": {"x": %s}}' % ("[" * 10_000 + "]" * 10_000),
    "nothing": "",
}


@pytest.mark.parametrize("body", REFUSED.values(), ids=REFUSED.keys())
def test_what_is_no_call_is_refused_with_position_and_expected_form(body: str) -> None:
    action = FORMAT.parse("So: " + wrapped(body))
    assert action.calls == ()
    assert len(action.errors) == 1
    assert "call at character 4 not read" in action.errors[0].message
    assert FORMAT.form in action.errors[0].message
    assert len(action.errors[0].message) < 300


def test_a_syntax_error_names_its_own_position() -> None:
    text = wrapped('{"name": "a", "arguments": {"x": 1,}}')
    [error] = FORMAT.parse(text).errors
    assert f"character {text.index('}}')}" in error.message or f"character {text.index(',}')}" in error.message


@pytest.mark.parametrize("text", ['<tool_call>{"name": "a", "arguments": {}}', "<tool_call>", "x </tool_call>"])
def test_a_tag_without_its_partner_is_an_error(text: str) -> None:
    action = FORMAT.parse(text)
    assert action.calls == ()
    assert len(action.errors) == 1


def test_a_call_of_too_many_characters_is_refused() -> None:
    action = FORMAT.parse(FORMAT.render_call("python", {"code": "x" * 40_000}))
    assert action.calls == ()
    assert "at most 32768" in action.errors[0].message


def test_a_thousand_calls_in_one_turn_are_cut_and_said() -> None:
    action = FORMAT.parse(FORMAT.render_call("a", {}) * 1000)
    assert len(action.calls) == 32
    assert "more than 32 calls" in action.errors[0].message


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8")),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=20,
)


@given(st.text(min_size=1), st.dictionaries(st.text(), JSON_VALUES, max_size=5))
def test_a_rendered_call_is_read_back(name: str, arguments: dict[str, object]) -> None:
    action = FORMAT.parse("before " + FORMAT.render_call(name, arguments) + " after")  # type: ignore[arg-type]
    assert [(call.name, call.arguments) for call in action.calls] == [(name, arguments)]
    assert action.errors == ()


PIECES = st.sampled_from(
    ["<tool_call>", "</tool_call>", '{"name": "a", "arguments": ', "{", "}", "[", "]", '"', "\\", ",", ":", "1e5",
     "NaN", '"x"', '{"name": "a", "arguments": {}}', "\\u", "d800", "\n", "\0", "\ud800", "<tool_call", "é", " "]
)  # fmt: skip


@settings(max_examples=2000, deadline=None)
@given(st.lists(PIECES | st.text(max_size=5), max_size=60).map("".join))
def test_no_text_raises_and_every_call_read_is_well_formed(text: str) -> None:
    action = FORMAT.parse(text)
    assert action.text == text
    for call in action.calls:
        assert call.name
        assert isinstance(call.arguments, dict)
        json.dumps(call.arguments, allow_nan=False).encode()


ADVERSARIAL = {
    "opened tags": "<tool_call>",
    "closed tags": "</tool_call>",
    "empty calls": "<tool_call></tool_call>",
    "strings never closed": '<tool_call>{"</tool_call>',
    "escaped quotes": '<tool_call>{"\\"',
    "open objects": '<tool_call>{"a":',
    "open arrays": "[",
    "spaces": "<tool_call> ",
    "digits": "9",
    "keys": '"k":1,',
}


@pytest.mark.parametrize("unit", ADVERSARIAL.values(), ids=ADVERSARIAL.keys())
@pytest.mark.parametrize("start", ["", '<tool_call>{"name": "a", "arguments": {"x": ', '<tool_call>{"'])
def test_two_million_hostile_characters_are_answered_at_once(start: str, unit: str) -> None:
    text = start + unit * (2_000_000 // len(unit))
    began = time.perf_counter()
    FORMAT.parse(text)
    assert time.perf_counter() - began < 2.0


async def _nothing(arguments: object, context: ToolContext) -> str:
    return ""


LOOKUP = Tool(
    "lookup",
    "The number of a name.",
    {"type": "object", "properties": {"key": {"type": "string"}, "n": {"type": "integer"}}, "required": ["key"]},
    _nothing,
)


def test_tools_are_declared_in_one_line_each_with_the_form() -> None:
    assert FORMAT.declare([LOOKUP]) == (
        "Tools:\nlookup(key, n?): The number of a name.\n"
        'To call one, write <tool_call>{"name": "...", "arguments": {...}}</tool_call>'
    )


def test_tools_are_declared_as_an_openai_request_carries_them() -> None:
    [entry] = openai_schema([LOOKUP])
    assert entry["type"] == "function"
    assert entry["function"]["name"] == "lookup"  # type: ignore[index,call-overload]
    json.dumps(entry)
