"""What the notes environment asks for: a notebook as it is, what is wanted, and how an expert does it.

A goal is the whole state at the end, so that whatever else was changed on the way counts against it.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from palestra.envs.types import JSON

Call = tuple[str, dict[str, JSON]]
"""A tool and its arguments."""
_SYLLABLES = tuple(consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou")
_TOPICS = ("garden", "travel", "budget", "music", "health", "repairs")
_TEST_SHARE = 5  # one word in so many is for testing only


@dataclass(frozen=True, slots=True)
class Goal:
    """What is asked, the notes before and after by name, the answer where one is asked for, and an expert's calls."""

    question: str
    before: Mapping[str, str]
    after: Mapping[str, str]
    answer: str | None
    calls: tuple[Call, ...]


def make_goal(split: str, rng: random.Random, num_notes: int) -> Goal:
    """One goal over a notebook of `num_notes` notes. Words of "train" and "test" are disjoint."""
    words = _words(split, rng)
    names = [f"inbox/{next(words)}" for _ in range(num_notes)]
    notes = {name: _note(rng, next(words)) for name in names}
    return rng.choice(KINDS)(notes, words, rng)


class _Words:
    """Words of one split that no other of this notebook is equal to."""

    def __init__(self, split: str, rng: random.Random) -> None:
        self._split = split
        self._rng = rng
        self._seen: set[str] = set()

    def __next__(self) -> str:
        while True:
            word = "".join(self._rng.choices(_SYLLABLES, k=4))
            testing = zlib.crc32(word.encode()) % _TEST_SHARE == 0
            if testing == (self._split == "test") and word not in self._seen:
                self._seen.add(word)
                return word


def _words(split: str, rng: random.Random) -> _Words:
    return _Words(split, rng)


def _note(rng: random.Random, word: str) -> str:
    return f"about: {word}\ntopic: {rng.choice(_TOPICS)}\ncode: {rng.randint(1000, 9999)}\n"


def _topic(text: str) -> str:
    return text.split("topic: ")[1].split("\n")[0]


def _of_topic(notes: Mapping[str, str], topic: str) -> list[str]:
    return sorted(name for name, text in notes.items() if _topic(text) == topic)


def _find_code(notes: Mapping[str, str], words: _Words, rng: random.Random) -> Goal:
    """The code of a note that another one links to."""
    first, second = rng.sample(sorted(notes), 2)
    link = f"see: [[{second}]]\n"
    before = {**notes, first: notes[first] + link}
    about = notes[first].split("\n")[0]
    code = notes[second].split("code: ")[1].strip()
    question = f"One note says '{about}' and links to another with [[...]]. Answer with the code of that other note."
    calls: list[Call] = [
        ("search_notes", {"text": about}),
        ("read_note", {"name": first}),
        ("read_note", {"name": second}),
    ]
    return _goal(question, before, before, calls, code)


def _file_topic(notes: Mapping[str, str], words: _Words, rng: random.Random) -> Goal:
    """Every note of a topic into a folder of its own."""
    topic, folder = _topic(notes[rng.choice(sorted(notes))]), next(words)
    moves = {name: f"{folder}/{name.partition('/')[2]}" for name in _of_topic(notes, topic)}
    after = {moves.get(name, name): text for name, text in notes.items()}
    question = f"Move every note with 'topic: {topic}' into the folder {folder}, under the title that it has."
    calls: list[Call] = [("search_notes", {"text": f"topic: {topic}"})]
    calls += [("move_note", {"name": name, "to": to}) for name, to in moves.items()]
    return _goal(question, notes, after, calls)


def _mark_topic(notes: Mapping[str, str], words: _Words, rng: random.Random) -> Goal:
    """A line more in every note of a topic."""
    topic, line = _topic(notes[rng.choice(sorted(notes))]), f"seen: {next(words)}"
    marked = _of_topic(notes, topic)
    after = {name: text + (f"{line}\n" if name in marked else "") for name, text in notes.items()}
    question = f"Append the line '{line}' to every note with 'topic: {topic}', and to no other."
    calls: list[Call] = [("search_notes", {"text": f"topic: {topic}"})]
    calls += [("append_note", {"name": name, "text": line}) for name in marked]
    return _goal(question, notes, after, calls)


def _prune(notes: Mapping[str, str], words: _Words, rng: random.Random) -> Goal:
    """What is obsolete goes, unless another note links to it."""
    old = sorted(rng.sample(sorted(notes), max(2, len(notes) // 3)))
    kept, linking = old[0], rng.choice([name for name in sorted(notes) if name not in old])
    before = {name: text + ("status: obsolete\n" if name in old else "") for name, text in notes.items()}
    before[linking] += f"see: [[{kept}]]\n"
    after = {name: text for name, text in before.items() if name not in old or name == kept}
    question = "Delete every note with 'status: obsolete' that no other note links to with [[folder/title]]."
    calls: list[Call] = [("search_notes", {"text": "status: obsolete"}), ("search_notes", {"text": "[["})]
    calls += [("read_note", {"name": linking})]
    calls += [("delete_note", {"name": name}) for name in old if name != kept]
    return _goal(question, before, after, calls)


def _index(notes: Mapping[str, str], words: _Words, rng: random.Random) -> Goal:
    """A new note with a link to each note of a topic."""
    topic, name = _topic(notes[rng.choice(sorted(notes))]), f"index/{next(words)}"
    text = "".join(f"[[{each}]]\n" for each in _of_topic(notes, topic))
    question = (
        f"Create the note {name} with one line [[folder/title]] for each note with 'topic: {topic}', "
        "in the order of the alphabet, and nothing else."
    )
    calls: list[Call] = [("search_notes", {"text": f"topic: {topic}"}), ("create_note", {"name": name, "text": text})]
    return _goal(question, notes, {**notes, name: text}, calls)


KINDS: Sequence[Callable[[Mapping[str, str], _Words, random.Random], Goal]] = (
    _find_code,
    _file_topic,
    _mark_topic,
    _prune,
    _index,
)


def _goal(
    question: str, before: Mapping[str, str], after: Mapping[str, str], calls: Sequence[Call], answer: str | None = None
) -> Goal:
    """The goal, with the last call; what wants no answer is told to say that it is done."""
    asked = question if answer is not None else f"{question} Then answer with the word done."
    return Goal(asked, before, after, answer, (*calls, ("answer", {"text": answer or "done"})))
