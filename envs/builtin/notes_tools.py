"""The tools of the notes environment: a note is a text file below `notes/` in the box, named "folder/title"."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from palestra.envs.builtin.python_tool import cut
from palestra.envs.tools import Handler, Tool, ToolContext, ToolError
from palestra.envs.types import JSON

FOLDER = "notes"
MAX_TEXT = 4000  # characters of one argument
_SHOWN = 2000  # characters of an observation
_NAME: dict[str, JSON] = {"type": "string", "pattern": "^[a-z0-9-]{1,40}/[a-z0-9-]{1,40}$"}
_TEXT: dict[str, JSON] = {"type": "string", "minLength": 1, "maxLength": MAX_TEXT}

# what each ends with: 3 there is no such note, 4 there is one already; an empty folder is no part of the state
_LIST = "[ -d notes ] || exit 0; cd notes && find . -type f | sed 's,^./,,' | sort"
_SEARCH = "[ -d notes ] || exit 0; cd notes && grep -rlF -e \"$1\" . | sed 's,^./,,' | sort"
_READ = '[ -f "notes/$1" ] || exit 3; cat "notes/$1"'
_CREATE = '[ -e "notes/$1" ] && exit 4; mkdir -p "notes/${1%/*}" && cat > "notes/$1"'
_APPEND = '[ -f "notes/$1" ] || exit 3; cat >> "notes/$1"'
_DELETE = '[ -f "notes/$1" ] || exit 3; rm "notes/$1"; rmdir -p --ignore-fail-on-non-empty "notes/${1%/*}"'
_MOVE = (
    '[ -f "notes/$1" ] || exit 3; [ -e "notes/$2" ] && exit 4; mkdir -p "notes/${2%/*}" && mv "notes/$1" "notes/$2"; '
    'rmdir -p --ignore-fail-on-non-empty "notes/${1%/*}"'
)


def notes_tools() -> tuple[Tool, ...]:
    """list_notes(), search_notes(text), read_note(name), create_note(name, text), append_note(name, text),
    move_note(name, to), delete_note(name), answer(text)."""
    return (
        _tool("list_notes", "The names of all notes.", {}, _shell(_LIST)),
        _tool("search_notes", "The names of the notes that hold a text.", {"text": _TEXT}, _shell(_SEARCH, "text")),
        _tool("read_note", "The text of a note.", {"name": _NAME}, _shell(_READ, "name")),
        _tool("create_note", "A new note.", {"name": _NAME, "text": _TEXT}, _shell(_CREATE, "name", line="text")),
        _tool("append_note", "A line more.", {"name": _NAME, "text": _TEXT}, _shell(_APPEND, "name", line="text")),
        _tool("move_note", "Give a note another name.", {"name": _NAME, "to": _NAME}, _shell(_MOVE, "name", "to")),
        _tool("delete_note", "Remove a note.", {"name": _NAME}, _shell(_DELETE, "name")),
        _tool("answer", "Say the result, or that it is done; this ends the task.", {"text": _TEXT}, _answer, True),
    )


def _tool(name: str, description: str, properties: dict[str, JSON], handler: Handler, finishes: bool = False) -> Tool:
    required: list[JSON] = list(properties)
    whole: dict[str, JSON] = {"type": "object", "properties": properties, "required": required}
    return Tool(name, description, whole | {"additionalProperties": False}, handler, finishes=finishes)


def _shell(script: str, *words: str, line: str | None = None) -> Handler:
    """Runs `script` with the arguments `words` as $1 and so on, and the argument `line` as a line of its input."""

    async def handler(arguments: Mapping[str, JSON], context: ToolContext) -> str:
        given = [str(arguments[word]) for word in words]
        text = "" if line is None else str(arguments[line]).rstrip("\n") + "\n"
        # names and texts are data: they are never part of the program
        result = await context.run(["/bin/sh", "-c", script, "sh", *given], stdin=text.encode())
        if not result.ok:
            raise ToolError(_why(result.exit_code, given))
        return cut(result.stdout.decode(errors="replace").rstrip("\n"), _SHOWN) or _nothing(words, line)

    return handler


def _why(exit_code: int | None, given: Sequence[str]) -> str:
    if exit_code == 3:
        return f"there is no note {given[0]}"
    if exit_code == 4:
        return f"there is a note {given[-1]} already"
    return f"the notes could not be changed (status {exit_code}); the box may be full"


def _nothing(words: Sequence[str], line: str | None) -> str:
    return "done" if line is not None or "name" in words else "no notes"


async def _answer(arguments: Mapping[str, JSON], context: ToolContext) -> str:
    return "done"
