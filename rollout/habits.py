"""What a chat template does with messages beyond printing them, found out by asking it.

Families differ: some know no system message, no tool message or no two user messages in a row, some strip contents or
write them as JSON. What a template cannot take is brought into a form that it can; what it does to contents is done to
them as well, so that grown ids are those of the template.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from palestra.envs.errors import ConfigError

Dicts = list[dict[str, object]]
Render = Callable[[Dicts, bool], str]
"""(conversation, with the header of the policy's next turn) -> text. Raises whatever a template's author chose."""

MARK = "\ue000{}\ue001"  # private-use characters: no template has a reason to touch them
_BEGIN, _END, _BETWEEN = MARK.format("begin"), MARK.format("end"), 'a"b\n\\'
SEPARATOR = "\n\n"  # between messages that are told as one


@dataclass(frozen=True, slots=True)
class Habits:
    """What was found."""

    tool_role: str  # "tool" when the template knows it, else "user"
    tells_system: bool  # False: what the system says goes in front of the first user message
    repeats_user: bool  # False: user messages in a row are told as one
    strips: frozenset[str]  # roles whose contents lose the space around them
    quotes: frozenset[str]  # roles whose contents are written as JSON strings
    tail: str  # what follows the policy's words when nothing comes after them

    def shown(self, role: str, content: str) -> str:
        """A message's content as the template would print it."""
        role = self.tool_role if role == "tool" else role
        if role == "system" and not self.tells_system:
            role = "user"
        if role in self.quotes:
            return json.dumps(content, ensure_ascii=False)[1:-1]
        return content.strip() if role in self.strips else content

    def fitted(self, messages: Dicts) -> Dicts:
        """Messages that the template can take."""
        fitted: Dicts = []
        for message in messages:
            message = dict(message)
            if message["role"] == "tool" and self.tool_role == "user":
                message = {"role": "user", "content": message["content"]}
            if message["role"] == "system" and not self.tells_system:
                message["role"] = "user"
            last = fitted[-1] if fitted else None
            folded = not self.repeats_user or (len(fitted) == 1 and not self.tells_system)
            if last is not None and folded and last["role"] == message["role"] == "user":
                last["content"] = f"{last['content']}{SEPARATOR}{message['content']}"
            else:
                fitted.append(message)
        return fitted


def habits_of(render: Render) -> Habits:
    """Ask a template. Raises ConfigError when it cannot tell a question and an answer."""
    question, answer = _message("user", "?"), _message("assistant", _BEGIN)
    try:
        text = render([question, answer], False)
    except Exception as error:  # a template raises whatever its author chose
        raise ConfigError(f"the chat template cannot render a question and an answer: {error}") from error
    _, found, tail = text.partition(_BEGIN)
    if not found:
        raise ConfigError("the chat template leaves out the assistant's words; it cannot be used for training")
    spoken = [question, _message("assistant", "!")]
    tool = {**_message("tool", _BEGIN), "name": "t"}
    tool_role = "tool" if _tells(render, [*spoken, tool]) else "user"
    tells_system = _tells(render, [_message("system", _BEGIN), question])
    places: dict[str, tuple[Dicts, Dicts]] = {"user": ([], []), "assistant": ([question], [question])}
    if tells_system:
        places["system"] = ([], [question])
    if tool_role == "tool":
        places["tool"] = (spoken, [])
    treated = {role: _treatment(render, role, *around) for role, around in places.items()}
    return Habits(
        tool_role=tool_role,
        tells_system=tells_system,
        repeats_user=_tells(render, [*spoken, question, _message("user", _BEGIN)]),
        strips=frozenset(role for role, (strips, _) in treated.items() if strips),
        quotes=frozenset(role for role, (_, quotes) in treated.items() if quotes),
        tail=tail,
    )


def _message(role: str, content: str) -> dict[str, object]:
    return {"role": role, "content": content}


def _tells(render: Render, conversation: Dicts) -> bool:
    """Whether the template takes the conversation and prints what is marked in it."""
    try:
        return _BEGIN in render(conversation, True)
    except Exception:  # noqa: BLE001 - a template raises whatever its author chose
        return False


def _treatment(render: Render, role: str, before: Sequence[dict[str, object]], after: Dicts) -> tuple[bool, bool]:
    """Whether a role's contents are stripped, and whether they are written as JSON strings."""

    def around(content: str) -> str:
        message = _message(role, content) | ({"name": "t"} if role == "tool" else {})
        return render([*before, message, *after], role != "assistant")

    plain = around(_BEGIN + _BETWEEN + _END)
    _, _, inside = plain.partition(_BEGIN)
    quotes = inside.startswith(json.dumps(_BETWEEN)[1:-1])
    return around(f" \n{_BEGIN}{_BETWEEN}{_END}\n ") == plain, quotes
