"""Declarations as people write them: read as JSON Schema, or refused with a reason that can be acted on."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from palestra.envs.builtin.data import json_lines
from palestra.envs.formats.accepted_calls import AcceptedCall, accept, matched, trouble
from palestra.envs.formats.tool_schema import DeclarationError, read_declaration
from palestra.envs.schemas import validator
from palestra.envs.types import JSON
from tests_support import data_folder, require


def declared(properties: JSON, **more: JSON) -> dict[str, JSON]:
    return {"name": "f", "description": "", "parameters": {"type": "dict", "properties": properties, **more}}


@pytest.mark.parametrize(
    ("written", "read", "good", "bad"),
    [
        ({"type": "float"}, "number", 1.5, "1.5"),
        ({"type": "Integer"}, "integer", 3, 3.5),
        ({"type": "tuple", "items": {"type": "float"}}, "array", [1, 2.5], ["a"]),
        ({"type": "bool"}, "boolean", True, 1),
        ({"type": ["str", "null"]}, ["string", "null"], None, 1),
        ({"type": "dict", "properties": {"w": {"type": "int"}}}, "object", {"w": 1}, {"h": 1}),
        (
            {"type": "array", "items": {"type": "dict", "properties": {"w": {"type": "int"}}}},
            "array",
            [{"w": 1}],
            [{}, 1],
        ),
    ],
)
def test_a_type_in_everyday_words_is_translated(written: Mapping[str, JSON], read: JSON, good: JSON, bad: JSON) -> None:
    declaration = read_declaration(declared({"x": dict(written)}, required=["x"]))
    properties = declaration.tool.parameters["properties"]
    assert isinstance(properties, Mapping)
    assert isinstance(properties["x"], Mapping)
    assert properties["x"]["type"] == read
    check = validator(declaration.tool.parameters)
    assert check.is_valid({"x": good})
    assert not check.is_valid({"x": bad})


def test_any_is_no_type_and_what_was_changed_is_said() -> None:
    declaration = read_declaration(declared({"x": {"type": "any", "default": 3}}))
    check = validator(declaration.tool.parameters)
    assert all(check.is_valid({"x": value}) for value in (1, "a", [None], {"k": 1}))
    assert any("x: type any" in change for change in declaration.changes)


def test_an_object_whose_properties_nobody_declared_takes_any() -> None:
    check = validator(read_declaration(declared({"x": {"type": "dict"}})).tool.parameters)
    assert check.is_valid({"x": {"whatever": [1]}})
    assert not check.is_valid({"x": "text"})
    assert not check.is_valid({"y": {}})


@pytest.mark.parametrize("parameters", [None, {}, {"type": "dict"}, {"properties": {}}])
def test_a_function_without_parameters_takes_none(parameters: JSON) -> None:
    check = validator(read_declaration({"name": "now", "parameters": parameters}).tool.parameters)
    assert check.is_valid({})


def test_a_name_may_have_dots_and_openai_s_wrapping_is_read_alike() -> None:
    bare = {**declared({"x": {"type": "int"}}), "name": "math.hypot"}
    assert read_declaration({"type": "function", "function": bare}) == read_declaration(bare)
    assert read_declaration(bare).tool.name == "math.hypot"


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ("f", "an object with name and parameters"),
        ({"parameters": {}}, "name is null"),
        ({"name": "two words"}, "two words"),
        (declared({"x": {"type": "matrix"}}), 'parameters.properties.x: type is "matrix"'),
        (declared({"x": "string"}), "parameters.properties.x is"),
        (declared({"x": {"type": "int"}}, required=["y"]), 'required names "y", which is no property. Have: x'),
        (declared({"x": {"type": "int"}}, required="x"), "expected a list of names"),
        (declared([]), "expected an object of schemas"),
        (declared({"x": {"type": "string", "enum": "a"}}), "schema"),
        ({"name": "f", "parameters": {"type": "array", "items": {}}}, "arguments are always an object"),
    ],
)
def test_a_declaration_that_means_nothing_certain_is_refused_with_the_place(raw: JSON, words: str) -> None:
    with pytest.raises(DeclarationError, match=r".") as caught:
        read_declaration(raw)
    assert words in str(caught.value)


def test_every_declaration_of_the_data_is_read() -> None:
    require("data")
    names = [
        read_declaration(row).name
        for path in sorted((data_folder() / "bfcl" / "func_doc").glob("*.jsonl"))
        for row in json_lines(path)
    ]
    assert len(names) > 100


HYPOT = read_declaration(
    declared({"x": {"type": "int"}, "unit": {"type": "str"}, "z": {"type": "int"}}, required=["x"])
)
WANTED = accept(HYPOT, {"x": [4, 5], "unit": ["m per s", ""], "z": ["", 0]})


@pytest.mark.parametrize(
    "arguments",
    [{"x": 4}, {"x": 5.0, "z": 0}, {"x": 4, "unit": "M/per s"}, {"x": 5, "unit": "m per s", "z": 0}],
)
def test_an_accepted_call_is_right(arguments: Mapping[str, JSON]) -> None:
    assert trouble(WANTED, "f", arguments) is None


@pytest.mark.parametrize(
    ("name", "arguments", "named"),
    [
        ("g", {"x": 4}, '"g" is called'),
        ("f", {}, "x: left out"),
        ("f", {"x": 6}, "x: 6 is none"),
        ("f", {"x": True}, "x: true is none"),
        ("f", {"x": 4, "unit": "ft"}, 'unit: "ft" is none'),
        ("f", {"x": 4, "z": 1}, "z: 1 is none"),
        ("f", {"x": 4, "w": 1}, "w: not expected"),
    ],
)
def test_another_call_is_wrong_and_the_argument_is_named(name: str, arguments: Mapping[str, JSON], named: str) -> None:
    assert named in (trouble(WANTED, name, arguments) or "right")


def test_an_object_has_accepted_values_for_each_key() -> None:
    accepted = AcceptedCall("f", {"o": ({"name": ["Ann"], "age": [3, ""]},)})
    assert trouble(accepted, "f", {"o": {"name": "ann"}}) is None
    assert trouble(accepted, "f", {"o": {"name": "Ann", "age": 3}}) is None
    for wrong in ({"name": "Bob"}, {"age": 3}, {"name": "Ann", "age": 4}, {"name": "Ann", "more": 1}, [], None):
        assert trouble(accepted, "f", {"o": wrong}) is not None


def test_calls_match_in_any_order_and_each_counts_once() -> None:
    wide, narrow = AcceptedCall("f", {"x": (1, 2)}), AcceptedCall("f", {"x": (1,)})
    assert matched([wide, narrow], [("f", {"x": 1}), ("f", {"x": 2})]) == 2
    assert matched([wide, narrow], [("f", {"x": 2}), ("f", {"x": 2})]) == 1
    assert matched([wide, narrow], [("f", {"x": 1}), ("f", {"x": 1}), ("f", {"x": 1})]) == 2
    assert matched([], [("f", {})]) == 0


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"x": ["four"]}, "f.x: of"),
        ({"unit": ["m"]}, "no accepted value for x"),
        ({"x": [4], "w": [1]}, "not declared"),
        ({"x": 4}, "expected a list"),
    ],
)
def test_answers_that_no_call_can_satisfy_are_refused(values: JSON, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        accept(HYPOT, values)
