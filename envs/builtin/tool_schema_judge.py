"""Are these the right calls? As many as expected, each an accepted one, in any order."""

from __future__ import annotations

from collections.abc import Mapping

from palestra.envs.formats.accepted_calls import from_plain, matched
from palestra.envs.types import JSON


def judge(truth: JSON, answer: JSON) -> dict[str, float]:
    """1 when the calls are the accepted ones and no other was made, else 0.

    `truth` is {"calls": [AcceptedCall.plain(), ...]}; `answer` is what the environment exports, {"calls": [{"name":
    ..., "arguments": {...}}] or None, "turns": n}.
    """
    assert isinstance(truth, Mapping)
    assert isinstance(answer, Mapping)
    wanted, made = truth["calls"], answer["calls"] or []
    assert isinstance(wanted, list)
    assert isinstance(made, list)
    accepted = [from_plain(call) for call in wanted]
    right = matched(accepted, [_call(call) for call in made])
    return {
        "reward": float(right == len(accepted) == len(made)),
        "right_calls": float(right),
        "expected_calls": float(len(accepted)),
        "made_calls": float(len(made)),
    }


def _call(raw: JSON) -> tuple[str, Mapping[str, JSON]]:
    assert isinstance(raw, Mapping)
    arguments = raw["arguments"]
    assert isinstance(arguments, Mapping)
    return str(raw["name"]), arguments
