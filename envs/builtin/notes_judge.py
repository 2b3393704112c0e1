"""Are the notes as they were to be, and is the answer right?"""

from __future__ import annotations

from collections.abc import Mapping

from palestra.envs.types import JSON


def judge(truth: JSON, answer: JSON) -> dict[str, float]:
    """1 when the task was ended with the wanted notes, no note more or less, and with the wanted answer; else 0.

    `truth` is {"notes": {name: text}, "answer": text or None}, `answer` is {"notes": {name: text}, "final": {"text":
    ...} or None, ...}. Space at the ends of a text does not count.
    """
    assert isinstance(truth, Mapping)
    assert isinstance(answer, Mapping)
    wanted, found, final = truth["notes"], answer["notes"], answer["final"]
    assert isinstance(wanted, Mapping)
    assert isinstance(found, Mapping)
    right = sum(name in found and _same(found[name], text) for name, text in wanted.items())
    ended = isinstance(final, Mapping)
    said = isinstance(final, Mapping) and (truth["answer"] is None or _same(final["text"], truth["answer"]))
    return {
        "reward": float(said and right == len(wanted) == len(found)),
        "right_notes": right / max(1, len(wanted)),
        "other_notes": float(sum(name not in wanted for name in found)),
        "answered": float(ended),
    }


def _same(found: JSON, wanted: JSON) -> bool:
    return isinstance(found, str) and isinstance(wanted, str) and found.strip() == wanted.strip()
