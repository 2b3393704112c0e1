"""Text to ids in two ways: glue, in which control tokens are meant, and data, in which none may arise.

A tool's output can hold the very characters of a control token. Encoded as glue they would close the turn and forge
another; encoded as data they stay characters. Both encoders come from one tokenizer file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from tokenizers import Tokenizer

_REPLACEMENT = "\ufffd"
_MOST_BYTES = 4  # of one character
_MOST_NORMALISED = 18  # characters that compatibility forms make of one (U+FDFA)


class ChatTokenizer(Protocol):
    """The part of a Hugging Face fast tokenizer that the renderer uses."""

    chat_template: str | None

    @property
    def backend_tokenizer(self) -> Tokenizer: ...

    def apply_chat_template(self, conversation: list[dict[str, object]], **kwargs: object) -> object: ...


class Piece(str):
    """Plain text inside glue: encoded as data, joined with what stands beside it."""

    __slots__ = ()


class Encoder:
    """Both encodings of one tokenizer, and the way back."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        full = json.loads(tokenizer.backend_tokenizer.to_str())
        added = full["added_tokens"]
        self.control_ids: dict[str, int] = {token["content"]: token["id"] for token in added}
        self.num_ids = tokenizer.backend_tokenizer.get_vocab_size(with_added_tokens=True)
        self._left = frozenset(token["content"] for token in added if token["lstrip"])
        self._right = frozenset(token["content"] for token in added if token["rstrip"])
        self._control = _one_of({token["content"]: token["single_word"] for token in added})
        # added words that are not special, such as the tags of a call, are the policy's to write
        self.special = _one_of({token["content"]: False for token in added if token["special"]})
        # what data may not hold; an unknown character forges nothing, though its id is listed as special
        self.reserved = frozenset(self.control_ids.values()) - {_unknown_id(full["model"])}
        self._ids_per_character = _MOST_BYTES * (_MOST_NORMALISED if full["normalizer"] else 1)
        # truncation and padding would change ids silently; the post-processor is never used
        full.update(added_tokens=[], truncation=None, padding=None)
        begin = Tokenizer.from_str(json.dumps(full))
        differs = _unmark_beginnings(full["pre_tokenizer"])
        self._first, self._data = begin, Tokenizer.from_str(json.dumps(full)) if differs else begin
        self._decoder = tokenizer.backend_tokenizer

    def data(self, text: str) -> list[int]:
        """Ids of text that nobody may take for control tokens, within a conversation. O(len)."""
        return self._plain(text, self._data)

    def glue(self, pieces: Sequence[str], *, begins: bool = False) -> list[int]:
        """Ids of a template's text: control tokens in a `str` are meant, a `Piece` is data.

        Plain text between two control tokens is encoded in one go across the border of glue and data, as the
        tokenizer would encode the whole conversation. `begins`: nothing stands before it.
        """
        ids: list[int] = []
        plain, after_right = "", False
        for piece in pieces:
            for part in [piece] if isinstance(piece, Piece) else self._control.split(piece):
                control = None if isinstance(piece, Piece) else self.control_ids.get(part)
                if control is None:
                    plain += part.lstrip() if after_right and not plain else part
                    continue
                ids += self._segment(plain.rstrip() if part in self._left else plain, begins and not ids)
                ids.append(control)
                plain, after_right = "", part in self._right
        return ids + self._segment(plain, begins and not ids)

    def words(self, text: str) -> list[int]:
        """Ids of a turn that someone else wrote for the policy: tags are the tokens that it would sample, and what
        spells a special token is data."""
        parts = self.special.split(text)
        return self.glue([Piece(part) if index % 2 else part for index, part in enumerate(parts)])

    def text(self, ids: Sequence[int]) -> str:
        """The characters of ids, control tokens included. Invalid bytes become the replacement character."""
        return str(self._decoder.decode(list(ids), skip_special_tokens=False))

    def most_ids(self, characters: int) -> int:
        """No text of so many characters has more ids."""
        return self._ids_per_character * (characters + 1)  # 1: a prefix that some tokenizers put

    def offsets(self, text: str) -> list[tuple[int, int]]:
        """Where each id of the text begins and ends, in characters; those of controls that it spells are whole."""
        found: list[tuple[int, int]] = self._data.encode(_encodable(text), add_special_tokens=False).offsets
        return found

    def opening_control(self, text: str) -> str | None:
        """The control token that `text` begins with behind any space, or None."""
        match = self._control.match(text.lstrip())
        return match.group() if match and match.group() else None

    def first_control(self, ids: Sequence[int]) -> int:
        """Where the first control token stands, or -1."""
        return next((index for index, token in enumerate(ids) if token in self.reserved), -1)

    def _segment(self, text: str, begins: bool) -> list[int]:
        return self._plain(text, self._first if begins else self._data)

    def _plain(self, text: str, tokenizer: Tokenizer) -> list[int]:
        if not text:
            return []
        encoding = tokenizer.encode(_encodable(text), add_special_tokens=False)
        ids: list[int] = encoding.ids
        if self.reserved.isdisjoint(ids):
            return ids
        parts = _cut(text, [span for span, token in zip(encoding.offsets, ids, strict=True) if token in self.reserved])
        return [token for part in parts for token in self._plain(part, self._data)]


def _cut(text: str, spans: Sequence[tuple[int, int]]) -> list[str]:
    """The text in parts, cut inside each span: for vocabularies that hold a control token as an ordinary word.

    A span of one character cannot be cut; the replacement character stands for it.
    """
    parts, done = [], 0
    for start, end in spans:
        whole = end - start > 1
        parts.append(text[done : start + 1] if whole else text[done:start] + _stand_in(text[start:end]))
        done = start + 1 if whole else end
    return [part for part in [*parts, text[done:]] if part]


def _stand_in(character: str) -> str:
    return "" if character in ("", _REPLACEMENT) else _REPLACEMENT


def _one_of(words: Mapping[str, bool]) -> re.Pattern[str]:
    """Matches any of the words, the longest first; nothing when there are none. True: only as a word by itself."""
    ordered = sorted(words.items(), key=lambda word: len(word[0]), reverse=True)
    found = (rf"(?<!\w){re.escape(word)}(?!\w)" if alone else re.escape(word) for word, alone in ordered)
    return re.compile("(" + "|".join(found) + ")" if ordered else "((?!))")


def _unknown_id(model: Mapping[str, Any]) -> int | None:
    """The id that a vocabulary gives to characters it does not have."""
    if model.get("unk_id") is not None:
        return int(model["unk_id"])
    vocabulary, unknown = model.get("vocab"), model.get("unk_token")
    return vocabulary.get(unknown) if isinstance(vocabulary, dict) and unknown is not None else None


def _unmark_beginnings(step: dict[str, Any] | None) -> bool:
    """Switch off, in place, a mark that is set where a conversation begins and nowhere else, since every text that is
    encoded by itself would pass for a beginning. Whether there was one."""
    steps: Iterable[dict[str, Any]] = [] if step is None else step.get("pretokenizers", [step])
    found = [each for each in steps if each["type"] == "Metaspace" and each.get("prepend_scheme") == "first"]
    for each in found:
        each["prepend_scheme"] = "never"
    return bool(found)


def _encodable(text: str) -> str:
    """Lone surrogates cannot be encoded as UTF-8; a question mark stands for each."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8", "replace")
