"""The three tools of the arithmetic environment. Two are commands in the box, in awk, which every image has."""

from __future__ import annotations

import re
from collections.abc import Mapping

from palestra.envs.sandboxes.contract import Exec
from palestra.envs.tools import Tool, ToolContext, ToolError
from palestra.envs.types import JSON

FACTS_FILE = "facts.txt"

_LOOKUP = """BEGIN { key = ENVIRON["KEY"] } ($1 "") == (key "") { print $2; found = 1; exit } END { exit !found }"""
_CALCULATE = """{
  gsub("-", "+-"); n = split($0, terms, "+")
  for (i = 1; i <= n; i++) { m = split(terms[i], f, "*"); p = 1; for (j = 1; j <= m; j++) p *= f[j]; s += (m ? p : 0) }
  if (s > 9007199254740991 || s < -9007199254740991) exit 3
  printf "%.0f\\n", s
}"""
_KEY = re.compile(r"[A-Za-z]{1,32}")
_EXPRESSION = re.compile(r"[0-9]{1,9}(?:[-+*][0-9]{1,9}){0,15}")


def arithmetic_tools() -> tuple[Tool, ...]:
    """lookup(key), calculate(expression), answer(value)."""
    return (
        Tool("lookup", "The number of a name.", _one("key", {"type": "string", "maxLength": 32}), _lookup),
        Tool(
            "calculate",
            "The value of whole numbers with + - *.",
            _one("expression", {"type": "string", "maxLength": 160}),
            _calculate,
        ),
        Tool(
            "answer",
            "Give the final number; this ends the task.",
            _one("value", {"type": ["integer", "string"], "maxLength": 32}),
            _answer,
            finishes=True,
        ),
    )


def _one(name: str, schema: dict[str, JSON]) -> dict[str, JSON]:
    return {"type": "object", "properties": {name: schema}, "required": [name], "additionalProperties": False}


async def _lookup(arguments: Mapping[str, JSON], context: ToolContext) -> str:
    key = str(arguments["key"])
    if not _KEY.fullmatch(key):
        raise ToolError("a key is letters only")
    # the key is data in the environment, never part of the program
    result = await context.run(["awk", _LOOKUP, FACTS_FILE], env={"KEY": key})
    return _printed(result, f"no fact named {key}")


async def _calculate(arguments: Mapping[str, JSON], context: ToolContext) -> str:
    expression = str(arguments["expression"]).replace(" ", "")
    if not _EXPRESSION.fullmatch(expression):
        raise ToolError("an expression is whole numbers with + - * between")
    result = await context.run(["awk", _CALCULATE], stdin=expression.encode() + b"\n")
    return _printed(result, "the result is too large")


async def _answer(arguments: Mapping[str, JSON], context: ToolContext) -> str:
    return "done"


def _printed(result: Exec, otherwise: str) -> str:
    if not result.ok:
        raise ToolError(otherwise)
    return result.stdout.decode(errors="replace").strip()
