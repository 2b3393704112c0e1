"""An environment of one's own: in a few lines through the helpers, or written out; both are the same."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, cast

import pydantic
import pytest

import palestra.envs
from palestra.envs import Message, Task, Tool, ToolContext, ToolTaskset, answer, tool
from palestra.envs.calls import JsonInTags
from palestra.envs.environment import Taskset
from palestra.envs.errors import ConfigError
from palestra.envs.sandboxes.contract import Exec
from palestra.envs.sandboxes.scripted import Command, ScriptedBoxes
from palestra.envs.tool_environment import ToolEnvironment
from palestra.envs.tool_functions import ToolFunction
from palestra.envs.types import JSON, CallStatus, Scored, StepResult, Verdict

ROOT = Path(__file__).resolve().parents[1]


def shown(page: str, fence: str) -> dict[str, object]:
    """What the program in a fenced block of a page defines."""
    (source,) = re.findall(rf"```{fence}\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    space: dict[str, object] = {"__name__": "shown", "__source__": source}
    exec(compile(source, page, "exec"), space)
    return space


@pytest.fixture(scope="module")
def short() -> Taskset:
    """The taskset of the README."""
    space = shown("README.md", "python logs.py")
    assert len([line for line in str(space["__source__"]).splitlines() if line.strip()]) <= 20
    return cast(Taskset, space["Logs"]())  # type: ignore[operator]


@pytest.fixture(scope="module")
def long() -> Taskset:
    """The same, written out."""
    return cast(Taskset, shown("docs/environments.md", "python explicit")["Logs"]())  # type: ignore[operator]


def counting(command: Command, files: dict[str, bytes]) -> Exec:
    """What grep says."""
    assert command.argv == ("sh", "-c", "grep -c ERROR app.log")
    return Exec(exit_code=0, stdout=f"{files['/workspace/app.log'].count(b'ERROR')}\n".encode())


def played(taskset: Taskset, task: Task, turns: Sequence[str]) -> tuple[list[StepResult], Verdict]:
    async def body() -> tuple[list[StepResult], Verdict]:
        environment, verifier = taskset.environment(task, ScriptedBoxes(counting)), taskset.verifier()
        await environment.start()
        results = [await environment.step(JsonInTags().parse(turn)) for turn in turns]
        verdict = await verifier.verify(task, await environment.export())
        await environment.close()
        await verifier.close()
        return results, verdict

    return asyncio.run(body())


def test_the_few_lines_and_the_written_out_form_are_the_same_environment(short: Taskset, long: Taskset) -> None:
    for split in ("train", "test"):
        assert list(short.split(split)) == list(long.split(split))
    for task in (short.split("test")[3], short.split("train")[11]):
        turns = short.demonstration(task, 0)
        assert turns == long.demonstration(task, 0)
        wrong = [JsonInTags().render_call("answer", {"value": -1})]
        for said, reward in ((turns, 1.0), (wrong, 0.0)):
            (one, verdict), (other, same) = (played(taskset, task, said) for taskset in (short, long))
            assert [plain(step) for step in one] == [plain(step) for step in other]
            assert verdict == same
            assert isinstance(verdict, Scored)
            assert verdict.value == reward


def plain(step: StepResult) -> list[tuple[CallStatus, str, object]]:
    """A step without its clock."""
    return [(result.status, result.content, result.arguments) for result in step.results]


def test_the_schemas_of_both_forms_are_the_same(short: Taskset, long: Taskset) -> None:
    ours, theirs = (
        [(t.name, t.description, dict(t.parameters), t.timeout_s, t.finishes) for t in environment.tools]
        for environment in (taskset.environment(taskset.split("test")[0], ScriptedBoxes()) for taskset in (short, long))
    )
    assert ours == theirs


def test_a_base_without_a_demonstration_has_none_and_without_make_is_none() -> None:
    class Quiet(ToolTaskset):
        tools = (answer,)
        train_tasks = 3

        def make(self, split: str, n: int) -> Task:
            return Task(f"{split}/{n}", self.ask("?"))

    quiet = Quiet()
    assert quiet.demonstration(quiet.split("train")[0], 0) == ()
    assert (len(quiet.split("train")), len(quiet.split("test"))) == (3, 200)
    assert quiet.split("train")[2] == quiet.make("train", 2)
    with pytest.raises(ConfigError, match="no split 'dev'"):
        quiet.split("dev")
    with pytest.raises(TypeError, match="abstract"):
        ToolTaskset()  # type: ignore[abstract]


def test_an_environment_has_defaults_and_takes_the_image_of_the_task() -> None:
    boxes = ScriptedBoxes()
    environment = ToolEnvironment(Task("t", (Message("user", "?"),), image="mine"), (answer,), boxes)
    assert asyncio.run(environment.start()) == (Message("user", "?"),)
    assert environment._spec.image == "mine"


# tools from functions


@dataclass
class Place:
    x: int
    y: int = 0


@tool(timeout_s=3.0)
async def many(
    context: ToolContext,
    word: Annotated[str, pydantic.Field(max_length=5, description="What to look for.")],
    places: list[Place],
    *,
    mode: Literal["all", "first"] = "all",
    limit: int | None = None,
) -> dict[str, object]:
    """Finds words
    in places.

    More that nobody is told.
    """
    return {"word": word, "x": [place.x for place in places], "mode": mode, "limit": limit, "box": context.box.id}


def even(value: int) -> int:
    if value % 2:
        raise ValueError("an even number, please")
    return value


@tool
async def half(number: Annotated[int, pydantic.AfterValidator(even)]) -> str:
    """Halves."""
    return str(number // 2)


async def asked(one: Tool, arguments: dict[str, JSON]) -> tuple[CallStatus, str]:
    environment = ToolEnvironment(Task("t", (Message("user", "?"),)), (one, answer), ScriptedBoxes())
    await environment.start()
    step = await environment.step(JsonInTags().parse(JsonInTags().render_call(one.name, arguments)))
    await environment.close()
    return step.results[0].status, step.results[0].content


def test_name_docstring_and_annotations_are_the_declaration() -> None:
    assert (many.name, many.description, many.timeout_s, many.finishes) == (
        "many",
        "Finds words in places.",
        3.0,
        False,
    )
    parameters = dict(many.parameters)
    assert parameters["required"] == ["word", "places"]
    assert parameters["additionalProperties"] is False
    assert list(parameters["properties"]) == ["word", "places", "mode", "limit"]  # type: ignore[arg-type]
    assert parameters["properties"]["word"] == {  # type: ignore[index, call-overload]
        "description": "What to look for.",
        "maxLength": 5,
        "type": "string",
    }
    assert parameters["properties"]["limit"] == {"type": ["integer", "null"]}  # type: ignore[index, call-overload]


def test_arguments_reach_the_function_as_its_types_and_defaults_are_its_own() -> None:
    status, content = asyncio.run(asked(many, {"word": "oak", "places": [{"x": 1}, {"x": 2, "y": 3}]}))
    assert status is CallStatus.OK
    told = json.loads(content)
    assert (told["word"], told["x"], told["mode"], told["limit"]) == ("oak", [1, 2], "all", None)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"word": "oak"}, "places is missing"),
        ({"word": "oak", "places": [], "more": 1}, "not known"),
        ({"word": "oak", "places": [{"x": "one"}]}, "expected integer"),
        ({"word": "longer", "places": []}, "longer"),
        ({"word": "oak", "places": [], "mode": "some"}, "expected one of"),
    ],
)
def test_a_wrong_argument_is_an_observation(arguments: dict[str, JSON], said: str) -> None:
    status, content = asyncio.run(asked(many, arguments))
    assert status is CallStatus.INVALID_ARGUMENTS
    assert said in content


def test_what_a_schema_cannot_say_is_an_observation_too() -> None:
    assert asyncio.run(asked(half, {"number": 6})) == (CallStatus.OK, "3")
    status, content = asyncio.run(asked(half, {"number": 7}))
    assert status is CallStatus.ERROR
    assert "number: Value error, an even number, please" in content


def test_a_function_that_declares_no_tool_is_refused() -> None:
    async def bare(word: str) -> str:
        return word

    async def untyped(word) -> str:  # type: ignore[no-untyped-def]
        """Says it."""
        return str(word)

    async def odd(file: ToolTaskset) -> str:
        """Reads."""
        return ""

    async def starred(*words: str) -> str:
        """Says them."""
        return ""

    def plain_function(word: str) -> str:
        """Says it."""
        return word

    wrong = {bare: "no docstring", untyped: "no annotation", odd: "JSON cannot carry", starred: "no annotation"}
    for function, said in wrong.items():
        with pytest.raises(ConfigError, match=said):
            tool(cast(ToolFunction, function))
    with pytest.raises(ConfigError, match="async def"):
        tool(cast(ToolFunction, plain_function))


# the short names


def test_every_short_name_is_there_and_is_the_one_behind_it() -> None:
    assert {name: getattr(palestra.envs, name) for name in palestra.envs.__all__}.keys() == palestra.envs._HOMES.keys()
    assert palestra.envs.Tool is Tool
    with pytest.raises(AttributeError, match="no attribute 'Toolbox'"):
        palestra.envs.Toolbox  # noqa: B018


def test_importing_the_room_alone_loads_next_to_nothing() -> None:
    program = "import sys, palestra.envs, palestra.envs.errors; print(*{m.split('.')[0] for m in sys.modules})"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert not {"pydantic", "jsonschema", "tenacity", "numpy"} & set(loaded.stdout.split())
