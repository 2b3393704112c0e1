"""The tool runtime: its gates, its limits, and what becomes of a tool that fails."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from typing import TypeVar

import pytest

from palestra.envs.errors import ConfigError, IntegrityError, SandboxError
from palestra.envs.runtime import RuntimeLimits, ToolRuntime
from palestra.envs.sandboxes.contract import Exec
from palestra.envs.sandboxes.scripted import ScriptedSandbox, Trouble
from palestra.envs.tools import Handler, Tool, ToolContext, ToolError, TransientToolError
from palestra.envs.types import JSON, CallStatus, ToolCall, ToolResult

Result = TypeVar("Result")
ANY: dict[str, JSON] = {"type": "object"}


def tool(name: str, handler: Handler, parameters: dict[str, JSON] = ANY, **more: object) -> Tool:
    return Tool(name, f"The tool {name}.", parameters, handler, **more)  # type: ignore[arg-type]


async def echo(arguments: Mapping[str, JSON], context: ToolContext) -> str:
    return f"echo {arguments.get('x')}"


def runtime(*tools: Tool, box: ScriptedSandbox | None = None, **limits: float) -> ToolRuntime:
    return ToolRuntime(tools, box or ScriptedSandbox(), RuntimeLimits(**limits), random.Random(0))  # type: ignore[arg-type]


def calls(name: str, *arguments: Mapping[str, JSON], first: int = 1) -> list[ToolCall]:
    return [ToolCall(f"c{n}", name, each) for n, each in enumerate(arguments, first)]


def results(over: ToolRuntime, *actions: list[ToolCall]) -> list[ToolResult]:
    async def body() -> list[ToolResult]:
        return [result for action in actions for result in await over.run(action)]

    return asyncio.run(body())


def test_a_call_runs_and_its_result_is_tied_to_it() -> None:
    [result] = results(runtime(tool("echo", echo)), calls("echo", {"x": 1}))
    assert (result.status, result.content, result.name, result.call_id) == (CallStatus.OK, "echo 1", "echo", "c1")
    assert result.arguments == {"x": 1}
    assert result.attempts == 1


def test_an_unknown_tool_is_answered_with_what_exists() -> None:
    [result] = results(runtime(tool("echo", echo), tool("other", echo)), calls("ehco", {}))
    assert result.status is CallStatus.UNKNOWN_TOOL
    assert result.content == 'error: no tool "ehco". Have: echo, other'


STRICT: dict[str, JSON] = {
    "type": "object",
    "properties": {
        "key": {"type": "string", "pattern": "^[a-z]+$", "maxLength": 5},
        "count": {"type": "integer", "minimum": 1},
        "mode": {"enum": ["fast", "slow"]},
        "where": {"type": "object", "properties": {"x": {"type": ["number", "null"]}}},
    },
    "required": ["key", "count"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"count": 1}, "arguments: key is missing"),
        ({}, "error: arguments: key is missing; arguments: count is missing"),
        ({"key": 7, "count": 1}, "key: expected string, found 7"),
        ({"key": ["a"], "count": 1}, 'key: expected string, found ["a"]'),
        ({"key": "A", "count": 1}, 'key: expected text that matches ^[a-z]+$, found "A"'),
        ({"key": "abcdef", "count": 1}, 'key: expected a length of at most 5, found "abcdef"'),
        ({"key": "a", "count": True}, "count: expected integer, found true"),
        ({"key": "a", "count": 0}, "count: expected at least 1, found 0"),
        ({"key": "a", "count": 1, "mode": "quick"}, 'mode: expected one of "fast", "slow", found "quick"'),
        ({"key": "a", "count": 1, "where": {"x": "1"}}, 'where.x: expected number or null, found "1"'),
        ({"key": "a", "count": 1, "cnt": 2}, 'arguments: "cnt" not known. Have: key, count, mode, where'),
        ({"key": "a", "count": 1, "__proto__": {}}, 'arguments: "__proto__" not known'),
    ],
)
def test_a_refused_argument_is_named_with_what_was_expected(arguments: dict[str, JSON], said: str) -> None:
    ran = []

    async def spy(arguments: Mapping[str, JSON], context: ToolContext) -> str:
        ran.append(arguments)
        return ""

    [result] = results(runtime(tool("spy", spy, STRICT)), calls("spy", arguments))
    assert result.status is CallStatus.INVALID_ARGUMENTS
    assert said in result.content
    assert ran == []


def test_every_violation_is_listed_up_to_five() -> None:
    many: dict[str, JSON] = {
        "type": "object",
        "properties": {name: {"type": "integer"} for name in "abcdefg"},
        "required": ["z"],
    }
    [result] = results(runtime(tool("echo", echo, many)), calls("echo", dict.fromkeys("abcdefg", "no")))
    assert result.content.count(";") == 5
    assert result.content.endswith("and 3 more")


def test_a_long_argument_is_not_echoed_back() -> None:
    [result] = results(runtime(tool("echo", echo, STRICT)), calls("echo", {"key": "x" * 5000, "count": 1}))
    assert len(result.content) < 200


def test_arguments_of_too_many_bytes_are_refused() -> None:
    [result] = results(runtime(tool("echo", echo)), calls("echo", {"x": "y" * 20_000}))
    assert result.status is CallStatus.INVALID_ARGUMENTS
    assert "at most 16384" in result.content


def test_a_schema_that_points_elsewhere_is_never_fetched() -> None:
    remote: dict[str, JSON] = {"type": "object", "properties": {"x": {"$ref": "https://example.invalid/schema.json"}}}
    with pytest.raises(ConfigError, match=r"echo.*example.invalid"):
        tool("echo", echo, remote)


@pytest.mark.parametrize(
    ("declaration", "said"),
    [
        ({"name": "two words"}, "tool name"),
        ({"parameters": {"type": "array"}}, '"type": "object"'),
        ({"parameters": {"type": "objekt"}}, "no JSON Schema"),
        ({"parameters": {"type": "object", "properties": {"x": {"pattern": "("}}}}, "no JSON Schema"),
        ({"parameters": {"type": "object", "properties": {"x": {"$ref": "#/$defs/y"}}}}, "not in it"),
        ({"timeout_s": 0}, "timeout_s is 0"),
    ],
)
def test_a_bad_declaration_is_refused_when_it_is_made(declaration: dict[str, object], said: str) -> None:
    right = {"name": "echo", "description": "", "parameters": ANY, "handler": echo}
    with pytest.raises(ConfigError, match=said):
        Tool(**{**right, **declaration})  # type: ignore[arg-type]


def test_two_tools_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="two tools of one name"):
        runtime(tool("echo", echo), tool("echo", echo))


def test_the_same_call_is_nudged_after_three_equal_results_whatever_the_order_of_keys() -> None:
    first: dict[str, JSON] = {"x": 1, "y": {"a": 1, "b": 2}}
    again: dict[str, JSON] = {"y": {"b": 2, "a": 1}, "x": 1}
    over = runtime(tool("echo", echo))
    got = results(over, *(calls("echo", args, first=n) for n, args in enumerate([first, again, first, again, again])))
    assert [result.status for result in got] == [CallStatus.OK] * 3 + [CallStatus.REPEATED] * 2
    assert "gave the same result 3 times" in got[3].content


def test_two_calls_in_turn_are_recognised_as_a_loop() -> None:
    over = runtime(tool("echo", echo))
    got = results(over, *(calls("echo", {"x": n % 2}, first=n) for n in range(8)))
    assert [result.status for result in got] == [CallStatus.OK] * 6 + [CallStatus.REPEATED] * 2


def test_equal_calls_of_one_action_count_before_they_have_ended() -> None:
    got = results(runtime(tool("echo", echo)), calls("echo", *[{"x": 1}] * 5))
    assert [result.status for result in got] == [CallStatus.OK] * 3 + [CallStatus.REPEATED] * 2


def test_polling_something_that_changes_is_no_loop() -> None:
    ticks = iter(range(100))

    async def poll(arguments: Mapping[str, JSON], context: ToolContext) -> str:
        return str(next(ticks))

    got = results(runtime(tool("poll", poll)), *(calls("poll", {}, first=n) for n in range(10)))
    assert {result.status for result in got} == {CallStatus.OK}


def test_other_calls_let_a_repeated_one_run_again() -> None:
    over = runtime(tool("echo", echo), repeat_window=4, repeat_limit=2)
    same, other = {"x": 0}, [{"x": n} for n in range(1, 5)]
    got = results(over, *(calls("echo", args, first=n) for n, args in enumerate([same, same, same, *other, same])))
    assert [result.status for result in got][2] is CallStatus.REPEATED
    assert got[-1].status is CallStatus.OK


def test_results_come_in_call_order_and_one_failure_takes_no_other() -> None:
    async def mixed(arguments: Mapping[str, JSON], context: ToolContext) -> str:
        match arguments["x"]:
            case 1:
                raise ZeroDivisionError("division by zero")
            case 2:
                await asyncio.sleep(60)
            case 3:
                await asyncio.sleep(0.05)
        return f"done {arguments['x']}"

    over = runtime(tool("mixed", mixed, timeout_s=0.2))
    got = results(over, calls("mixed", {"x": 3}, {"x": 1}, {"x": 2}, {"x": 0}))
    assert [result.call_id for result in got] == ["c1", "c2", "c3", "c4"]
    assert [result.status for result in got] == ["ok", "error", "timeout", "ok"]
    assert got[1].content == "error: ZeroDivisionError: division by zero"
    assert "Traceback" not in got[1].content
    assert got[2].content == "error: mixed did not end within 0.2 s"
    assert 0.15 < got[2].seconds < 2


def test_calls_of_one_action_run_at_once_but_not_too_many() -> None:
    running, most = 0, 0

    async def slow(arguments: Mapping[str, JSON], context: ToolContext) -> str:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.02)
        running -= 1
        return ""

    results(runtime(tool("slow", slow), concurrent_calls=3), calls("slow", *({"x": n} for n in range(8))))
    assert most == 3


def test_calls_beyond_the_cap_of_an_action_are_answered_and_not_run() -> None:
    over = runtime(tool("echo", echo), calls_per_action=2)
    got = results(over, calls("echo", *({"x": n} for n in range(1000))))
    assert len(got) == 1000
    assert [result.status for result in got[:3]] == [CallStatus.OK, CallStatus.OK, CallStatus.LIMIT]
    assert got[999].content == "error: not run: at most 2 calls are run in one turn"


def test_a_finishing_call_waits_for_those_before_it_and_nothing_runs_behind_it() -> None:
    order = []

    async def note(arguments: Mapping[str, JSON], context: ToolContext) -> str:
        await asyncio.sleep(0.02 if arguments["x"] == 1 else 0)
        order.append(arguments["x"])
        return ""

    over = runtime(tool("note", note), tool("answer", note, finishes=True))
    action = [*calls("note", {"x": 1}), *calls("answer", {"x": 2}, first=2), *calls("answer", {"x": 3}, first=3)]
    got = results(over, action)
    assert order == [1, 2]
    assert got[2].content == "error: not run: the episode is over"


def test_a_transient_failure_is_tried_again_without_the_policy_noticing() -> None:
    failures = iter([TransientToolError("busy"), TransientToolError("busy")])

    async def flaky(arguments: Mapping[str, JSON], context: ToolContext) -> str:
        if (failure := next(failures, None)) is not None:
            raise failure
        return "fine"

    [result] = results(runtime(tool("flaky", flaky), retry_wait_s=0.01), calls("flaky", {}))
    assert (result.status, result.content, result.attempts) == (CallStatus.OK, "fine", 3)


@pytest.mark.parametrize(("error", "attempts"), [(TransientToolError("busy"), 3), (ToolError("no"), 1), (OSError(), 1)])
def test_only_transient_failures_are_tried_again_and_not_for_ever(error: Exception, attempts: int) -> None:
    async def broken(arguments: Mapping[str, JSON], context: ToolContext) -> str:
        raise error

    [result] = results(runtime(tool("broken", broken), retry_wait_s=0.01), calls("broken", {}))
    assert (result.status, result.attempts) == (CallStatus.ERROR, attempts)


def test_retries_end_with_the_time_limit() -> None:
    async def broken(arguments: Mapping[str, JSON], context: ToolContext) -> str:
        raise TransientToolError("busy")

    over = runtime(tool("broken", broken, timeout_s=0.1), retry_wait_s=30)
    [result] = results(over, calls("broken", {}))
    assert result.status is CallStatus.TIMEOUT


def test_a_tool_that_returns_no_text_is_an_error_of_the_tool() -> None:
    async def number(arguments: Mapping[str, JSON], context: ToolContext) -> str:
        return 7  # type: ignore[return-value]

    [result] = results(runtime(tool("number", number)), calls("number", {}))
    assert result.content == "error: TypeError: the tool returned int, not text"


def command(argv: list[str]) -> Handler:
    async def run(arguments: Mapping[str, JSON], context: ToolContext) -> str:
        return (await context.run(argv)).stdout.decode()

    return run


@pytest.mark.parametrize("trouble", list(Trouble))
def test_a_broken_box_is_nobody_s_policy_and_travels_up(trouble: Trouble) -> None:
    box = ScriptedSandbox(lambda command, files: trouble)
    over = runtime(tool("shell", command(["true"]), timeout_s=0.2), tool("echo", echo), box=box)
    with pytest.raises(SandboxError):
        results(over, [*calls("shell", {}), *calls("echo", {}, first=2)])


def test_numbers_that_must_agree_and_do_not_stop_everything() -> None:
    async def broken(arguments: Mapping[str, JSON], context: ToolContext) -> str:
        raise IntegrityError("two digests differ")

    with pytest.raises(IntegrityError):
        results(runtime(tool("broken", broken)), calls("broken", {}))


def test_a_command_that_overruns_is_the_tool_s_timeout() -> None:
    box = ScriptedSandbox(lambda command, files: Exec(exit_code=None, signal=9, timed_out=True))
    [result] = results(runtime(tool("shell", command(["sleep", "9"]), timeout_s=3), box=box), calls("shell", {}))
    assert result.status is CallStatus.TIMEOUT
    assert box.commands[0].timeout_s == pytest.approx(3, abs=0.1)


def test_waiting_for_the_box_does_not_eat_a_tool_s_time() -> None:
    class SlowBox(ScriptedSandbox):
        async def run(self, argv, **more):  # type: ignore[no-untyped-def]
            await asyncio.sleep(0.15)
            return await super().run(argv, **more)

    box = SlowBox(lambda command, files: Exec(exit_code=0, stdout=b"ok"))
    got = results(
        runtime(tool("shell", command(["work"]), timeout_s=0.25), box=box),
        calls("shell", *({"x": n} for n in range(4))),
    )
    assert [result.status for result in got] == [CallStatus.OK] * 4
    assert all(asked.timeout_s > 0.2 for asked in box.commands)


def test_one_command_at_a_time_reaches_the_box() -> None:
    inside = []

    class Watched(ScriptedSandbox):
        async def run(self, argv, **more):  # type: ignore[no-untyped-def]
            inside.append(1)
            assert len(inside) == 1
            await asyncio.sleep(0.01)
            inside.pop()
            return await super().run(argv, **more)

    got = results(
        runtime(tool("shell", command(["work"])), box=Watched()), calls("shell", *({"x": n} for n in range(4)))
    )
    assert {result.status for result in got} == {CallStatus.OK}


def test_the_gates_stand_in_one_visible_order_and_every_decision_is_recorded() -> None:
    over = runtime(tool("echo", echo, STRICT), repeat_limit=1)
    assert [gate.name for gate in over.gates] == ["scope", "schema", "repeats"]
    good: dict[str, JSON] = {"key": "a", "count": 1}
    results(
        over, calls("none", {}), calls("echo", {}, first=2), calls("echo", good, first=3), calls("echo", good, first=4)
    )
    assert [(record.call.id, record.decided_by, str(record.result.status)) for record in over.audit] == [
        ("c1", "scope", "unknown_tool"),
        ("c2", "schema", "invalid_arguments"),
        ("c3", "execution", "ok"),
        ("c4", "repeats", "repeated"),
    ]


def test_cancelling_an_action_ends_its_tools() -> None:
    ended = []

    async def forever(arguments: Mapping[str, JSON], context: ToolContext) -> str:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(arguments["x"])
        return ""

    async def body() -> None:
        over = runtime(tool("forever", forever, timeout_s=60))
        task = asyncio.ensure_future(over.run(calls("forever", {"x": 1}, {"x": 2})))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(body())
    assert sorted(ended) == [1, 2]  # type: ignore[type-var]
