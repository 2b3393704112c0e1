"""From messages to ids that only ever grow.

The ids that the policy sampled are kept as they are; what the template puts between turns is worked out once per shape
of turn, from the template itself, and appended. Nothing is decoded and encoded again, so what is trained is what was
sampled. Where a template rewrites history and the run asks to follow it, the conversation goes on in a new row.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

from palestra.envs.errors import ConfigError
from palestra.envs.types import Message
from palestra.rollout.habits import MARK, habits_of
from palestra.rollout.tokens import ChatTokenizer, Encoder, Piece

History = Literal["append", "template"]

_MARK_CHARACTERS = re.compile("([" + re.escape(MARK.format("")) + "])")
_TOOL_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")
_MAX_SHAPES = 512
"""Shapes of turns that are remembered; an environment that makes up names must not fill the memory."""

OPENINGS = 64  # kept at most


class Renderer:
    """Renders one model's conversations. Shared by episodes: it keeps no state of any.

    history "append" (default): earlier turns stay as they were sampled, whatever the template would do to them.
    history "template": when the template would render earlier turns differently, a new row begins.

    `end_ids`: what ends a turn. The token that the template itself closes a turn with is one, and the first.
    """

    def __init__(self, tokenizer: ChatTokenizer, end_ids: Sequence[int], *, history: History = "append") -> None:
        if not tokenizer.chat_template:
            raise ConfigError("the tokenizer has no chat template; set model.chat_template to a Jinja file")
        self.encoder = Encoder(tokenizer)
        self.history = history
        self._tokenizer = tokenizer
        self._opened: dict[tuple[Message, ...], tuple[int, ...]] = {}
        self._tails: dict[tuple[tuple[str, str | None], ...], list[str]] = {}
        self.habits = habits_of(lambda conversation, generation: self.render(conversation, generation=generation))
        closing = self.encoder.opening_control(self.habits.tail)
        self._closing = None if closing is None else self.encoder.control_ids[closing]
        ends = end_ids if self._closing is None else (self._closing, *end_ids)
        self.end_ids = tuple(dict.fromkeys(ends))

    def open(self, messages: Sequence[Message]) -> list[int]:
        """Ids of a conversation up to where the policy speaks. Contents never become control tokens.

        The latest openings are kept: the episodes of a group begin with the same one.
        """
        key = tuple(messages)
        ids = self._opened.get(key)
        if ids is None:
            if len(self._opened) >= OPENINGS:
                self._opened.pop(next(iter(self._opened)))
            ids = self._opened[key] = tuple(self._encode_opening(key))
        return list(ids)

    def _encode_opening(self, messages: Sequence[Message]) -> list[int]:
        return self.encoder.glue(self._pieces(messages), begins=True)

    def extend(self, last_id: int | None, observations: Sequence[Message]) -> list[int]:
        """Ids that follow the policy's turn: its end, the observations, and the header of its next turn.

        `last_id` is the end token that the policy sampled itself, or None when the turn was cut: only then does the
        template's end token belong to what is appended.
        """
        shape = tuple((message.role, _name(message)) for message in observations)
        tail = self._tails.get(shape)
        if tail is None:
            if len(self._tails) >= _MAX_SHAPES:
                self._tails.clear()
            tail = self._tails[shape] = self._tail(observations)
        ids = self.encoder.glue(_filled(tail, [self.habits.shown(m.role, m.content) for m in observations]))
        return ids if last_id is None else ids[self._ended(last_id, tail[0], ids) :]

    def continues(self, messages: Sequence[Message], observations: Sequence[Message]) -> bool:
        """Whether the conversation stays in its row. False: the template rewrites history and is to be followed."""
        if self.history == "append":
            return True
        before = self.render(self.dicts(messages), generation=False).removesuffix(self.habits.tail)
        return self.render(self.dicts((*messages, *observations)), generation=True).startswith(before)

    def text(self, ids: Sequence[int]) -> str:
        """What a parser or a person reads, tags included; an end token at the end is left out."""
        return self.encoder.text(ids[:-1] if len(ids) and ids[-1] in self.end_ids else ids)

    def cap(self, text: str, max_tokens: int) -> str:
        """`text`, or its head and tail with a note of what was cut, in at most `max_tokens` tokens.

        Encodes at most 32 characters per allowed token, so the cost does not grow with the text.
        """
        if self.encoder.most_ids(len(text)) <= max_tokens:
            return text
        window = 16 * max_tokens
        near = text if len(text) <= 2 * window else text[:window] + text[-window:]
        if len(near) == len(text) and len(self.encoder.data(near)) <= max_tokens:
            return text
        spans = self.encoder.offsets(near)
        keep = min(len(spans), max_tokens) - len(self.encoder.data(_cut_note(len(text), len(text))))
        while keep > 1:
            head, tail = near[: spans[(keep + 1) // 2 - 1][1]], near[spans[-(keep // 2)][0] :]
            short = head + _cut_note(max(0, len(text) - len(head) - len(tail)), len(text)) + tail
            over = len(self.encoder.data(short)) - max_tokens
            if over <= 0:
                return short
            keep -= max(over, 1)
        return self._head(near, spans, max_tokens)

    def dicts(self, messages: Sequence[Message]) -> list[dict[str, object]]:
        """Messages as this chat template takes them."""
        plain: list[dict[str, object]] = []
        for message in messages:
            plain.append({"role": message.role, "content": message.content})
            if name := _name(message):
                plain[-1]["name"] = name
        return self.habits.fitted(plain)

    def render(self, conversation: list[dict[str, object]], *, generation: bool) -> str:
        """The template's text, with the header of the policy's next turn when `generation`."""
        return str(self._tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=generation))

    def _head(self, text: str, spans: Sequence[tuple[int, int]], max_tokens: int) -> str:
        """The beginning alone: for caps that have no room for a note."""
        for keep in range(min(max_tokens, len(spans)), 0, -1):
            head = text[: spans[keep - 1][1]]
            if len(self.encoder.data(head)) <= max_tokens:
                return head
        return ""

    def _ended(self, last_id: int, glue: str, ids: Sequence[int]) -> int:
        """How much of what would follow a cut turn the policy's own end token makes superfluous."""
        opening = self.encoder.opening_control(glue)
        known = opening is not None and self.encoder.control_ids[opening] in (last_id, self._closing)
        return self.encoder.first_control(ids) + 1 if known else 0

    def _tail(self, observations: Sequence[Message]) -> list[str]:
        """The template's pieces after an assistant turn, with marks where the observations' contents go."""
        marked = [Message(m.role, MARK.format(i), name=m.name, call_id=m.call_id) for i, m in enumerate(observations)]
        spoken = Message("assistant", MARK.format("said"))
        conversation = (Message("user", "?"), spoken, *marked)
        text = self.render(self.dicts(conversation), generation=True)
        _, found, after = text.partition(spoken.content)
        if not found:
            raise ConfigError("the chat template leaves out the assistant's words; it cannot be used for training")
        return _split_marks(after, len(observations))

    def _pieces(self, messages: Sequence[Message]) -> list[str]:
        """The template's text of a conversation, with what others wrote as data.

        The policy's own words go through the template as they are, since it may rewrite them; only control tokens
        and marks that they spell out are data.
        """
        fills: list[str] = []
        marked = []
        needed: dict[int, str] = {}
        for message in messages:
            if message.role == "assistant":
                shown = self._policy_words(message.content, fills)
            else:
                needed[len(fills)] = message.role
                shown = MARK.format(len(fills))
                fills.append(self.habits.shown(message.role, message.content))
            marked.append(Message(message.role, shown, name=message.name, call_id=message.call_id))
        text = self.render(self.dicts(marked), generation=True)
        kept = [index for index in range(len(fills)) if MARK.format(index) in text]
        lost = [role for index, role in needed.items() if index not in kept]
        if lost:
            raise ConfigError(f"the chat template leaves out a message of role {lost[0]!r}")
        return _filled(_split_marks(text, kept), [fills[index] for index in kept])

    def _policy_words(self, content: str, fills: list[str]) -> str:
        """The policy's words with marks where they spell a control token or a mark, which are added to `fills`."""
        shown = ""
        for index, part in enumerate(self.encoder.special.split(content)):
            for inner, word in enumerate(_MARK_CHARACTERS.split(part)):
                if index % 2 or inner % 2:
                    shown += MARK.format(len(fills))
                    fills.append(word)
                else:
                    shown += word
        return shown


def _name(message: Message) -> str | None:
    """A tool's name for the template, which prints it as its own words: nothing that a policy made up."""
    known = message.role == "tool" and message.name is not None and _TOOL_NAME.fullmatch(message.name)
    return message.name if known else None


def _split_marks(text: str, marks: int | Sequence[int]) -> list[str]:
    """Text between marks, one piece more than marks: what mark i stands for belongs between pieces i and i + 1."""
    pieces = []
    for index in range(marks) if isinstance(marks, int) else marks:
        before, found, text = text.partition(MARK.format(index))
        if not found:
            raise ConfigError(f"the chat template leaves out, repeats or reorders messages (part {index + 1})")
        pieces.append(before)
    return [*pieces, text]


def _filled(pieces: Sequence[str], fills: Sequence[str]) -> list[str]:
    filled: list[str] = []
    for piece, fill in zip(pieces[:-1], fills, strict=True):
        filled += [piece, Piece(fill)]
    return [*filled, pieces[-1]]


def _cut_note(cut: int, total: int) -> str:
    return f"\n[... {cut} of {total} characters cut ...]\n"
