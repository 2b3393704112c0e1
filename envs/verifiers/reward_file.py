"""Reading the reward that a test script wrote: one finite number, in one strict way, or no verdict with its cause."""

from __future__ import annotations

import json
import re

from palestra.envs.types import JSON, NoVerdict, Verdict
from palestra.envs.verifiers.verdict import REWARD, Bounds, read_verdict

BAD = "bad_reward_artifact"
_NUMBER = re.compile(rb"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")


def read_reward_text(data: bytes, bounds: Bounds) -> Verdict:
    """The content of a reward.txt: a decimal number, with white space around it."""
    text = data.strip()
    if not _NUMBER.fullmatch(text):
        return NoVerdict(f"{BAD}: reward.txt holds {text[:40]!r}; expected one decimal number")
    return _told(read_verdict(float(text), bounds), "reward.txt")


def read_reward_json(data: bytes, bounds: Bounds) -> Verdict:
    """The content of a reward.json: an object of numbers with the key "reward"; the others are for logs only."""
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_no_key_twice, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        return NoVerdict(f"{BAD}: reward.json cannot be read: {type(error).__name__}: {str(error)[:200]}")
    if not isinstance(value, dict):
        return NoVerdict(f"{BAD}: reward.json is {str(value)[:40]}; expected an object with the key {REWARD!r}")
    return _told(read_verdict(value, bounds), "reward.json")


def _told(verdict: Verdict, name: str) -> Verdict:
    return NoVerdict(f"{BAD}: {name}: {verdict.cause}") if isinstance(verdict, NoVerdict) else verdict


def _no_key_twice(pairs: list[tuple[str, JSON]]) -> dict[str, JSON]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("the same key twice in one object")
    return found


def _no_constant(name: str) -> JSON:
    raise ValueError(f"{name} is no JSON number")
