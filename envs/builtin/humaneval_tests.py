"""The tests of a HumanEval problem: the hidden ones taken apart, and the visible ones that its docstring shows."""

from __future__ import annotations

import ast
import re

from palestra.envs.errors import ConfigError

_PROMPTED = re.compile(r"^[ \t]*>>>[ \t]*(?P<call>.+?)[ \t]*\n[ \t]*(?P<value>\S.*?)[ \t]*$", re.MULTILINE)
_ARROW = r"(?:➞|=>|->|==>|==|=|should return|returns|return)"
_MAX_EXAMPLES = 8
_RUNNER = """

if __name__ == "__main__":
    for name, test in list(globals().items()):
        if name.startswith("test_"):
            test()
    print("all visible tests pass")
"""


def hidden_cases(id: str, solution: str, entry_point: str, test: str) -> tuple[tuple[str, str], ...]:
    """(id, source) of each hidden test. The source calls `candidate` and raises where it is wrong.

    `check` is taken apart into its assertions where it is nothing but assertions, else it stays whole. What stands in
    the solution beside the function (imports, helpers) stands before each, and the function too where the test names
    it. Raises ConfigError.
    """
    try:
        tree = ast.parse(test)
        before = _given(solution, None if entry_point in _names(tree) else entry_point)
    except SyntaxError as error:
        raise ConfigError(f"{id}: no Python ({error}); expected the solution and the test of HumanEval") from error
    check = next((node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "check"), None)
    if check is None:
        raise ConfigError(f"{id}: its test defines no function `check`")
    asserts = [node for node in check.body if isinstance(node, ast.Assert)]
    others = [node for node in check.body if not isinstance(node, ast.Assert | ast.Expr)]
    if others:
        return (("all", f"{before}{test}\n\ncheck(candidate)\n"),)
    calling = [node for node in asserts if "candidate" in _names(node)]
    if not calling:
        raise ConfigError(f"{id}: its `check` asserts nothing about the function")
    return tuple((str(number), f"{before}assert {ast.unparse(node.test)}\n") for number, node in enumerate(calling))


def visible_examples(prompt: str, entry_point: str) -> tuple[tuple[str, str], ...]:
    """(call, value) of the docstring's examples whose two sides are plain Python: `>>> f(1)` or `f(1) ➞ 2`."""
    arrow = re.compile(rf"(?P<call>\b{re.escape(entry_point)}\(.*?\))\s*{_ARROW}\s*(?P<value>\S.*?)\.?[ \t]*$", re.M)
    found: dict[tuple[str, str], None] = {}
    for pattern in (_PROMPTED, arrow):
        for match in pattern.finditer(prompt):
            call, value = match["call"], match["value"]
            if _is_call(call, entry_point) and _is_plain(value):
                found[call, value] = None
    return tuple(found)[:_MAX_EXAMPLES]


def visible_tests(examples: tuple[tuple[str, str], ...], entry_point: str) -> str:
    """A file of tests over `solution.py`, for pytest or to be run by itself."""
    shown = [
        f"\n\ndef test_{number}():\n    result = {call}\n    assert result == {value}, result\n"
        for number, (call, value) in enumerate(examples, 1)
    ]
    return "".join([f"from solution import {entry_point}\n", *shown, _RUNNER])


def _given(solution: str, but: str | None) -> str:
    """The statements of the solution without the function `but`."""
    nodes = [node for node in ast.parse(solution).body if but is None or getattr(node, "name", None) != but]
    return "".join(f"{ast.unparse(node)}\n" for node in nodes)


def _names(tree: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def _is_call(text: str, entry_point: str) -> bool:
    """Whether it calls the function with plain values."""
    try:
        call = ast.parse(text, mode="eval").body
    except SyntaxError:
        return False
    if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == entry_point):
        return False
    return not call.keywords and all(_is_plain(ast.unparse(argument)) for argument in call.args)


def _is_plain(text: str) -> bool:
    try:
        ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return False
    return True
