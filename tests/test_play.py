"""The agent loop: what becomes an observation, what ends an episode, and what is recorded of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from episodes import (
    ADD,
    ANSWER,
    FORMAT,
    RENDERER,
    TASK,
    TOOLS,
    CountedBoxes,
    Judge,
    call,
    engine,
    environment,
    episode,
    no_verdict,
    number,
    sampled_text,
)
from palestra.envs.errors import IntegrityError, SandboxError
from palestra.envs.tools import Tool, ToolContext
from palestra.envs.types import JSON, CallStatus, Message, NoVerdict, Scored, StepResult
from palestra.rollout.budgets import Budgets
from palestra.rollout.engines.scripted import Reply, ScriptedEngine
from palestra.rollout.play import Stage, Ticket, play
from palestra.rollout.renderer import Renderer
from palestra.rollout.types import Completion, Finish, Sampling, TerminatedBy
from test_renderer import THINKING, tokenizer

END = "<|im_end|>"
LENGTH = len(RENDERER.encoder.data(ADD)) + 1  # ids of a turn, its end token included


def test_tool_output_is_recorded_but_not_trained_on() -> None:
    trajectory = episode([ADD, ANSWER])
    assert sampled_text(trajectory) == [ADD + END, ANSWER + END]
    assert trajectory.verdict == Scored(1.0)
    assert trajectory.terminated_by is TerminatedBy.DONE
    assert [m.role for m in trajectory.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert not trajectory.truncated


def test_what_is_trained_is_what_was_sampled_and_the_rest_is_poison() -> None:
    trajectory = episode(engine([ADD, ANSWER], logprobs=-0.25))
    (sample,) = trajectory.samples
    assert len(sample) == len(sample.sampled) == len(sample.logprobs) == len(sample.version) == len(sample.turn)
    assert np.all(sample.logprobs[sample.sampled] == np.float32(-0.25))
    assert np.isnan(sample.logprobs[~sample.sampled]).all()
    assert (sample.turn[~sample.sampled] == -1).all()
    assert trajectory.sampled_tokens == sum(turn.sampled_tokens for turn in trajectory.turns)


def test_each_request_is_the_row_so_far() -> None:
    scripted = engine([ADD, ADD, ANSWER])
    trajectory = episode(scripted)
    row = trajectory.samples[0].ids.tolist()
    for turn, request in zip(trajectory.turns, scripted.requests, strict=True):
        assert list(request.prompt) == row[: turn.prompt_tokens]
    assert len({request.sampling.seed for request in scripted.requests}) == 3


@pytest.mark.parametrize(
    ("turn", "status", "words"),
    [
        ("<tool_call>{not json}</tool_call>", CallStatus.UNPARSABLE, "Expected <tool_call>"),
        ("It is five.", CallStatus.NO_CALL, "add, answer"),
        (call("subtract", a=1, b=2), CallStatus.UNKNOWN_TOOL, "add, answer"),
        (call("add", a=1), CallStatus.INVALID_ARGUMENTS, "b is missing"),
        (call("add", a=1, b="x"), CallStatus.INVALID_ARGUMENTS, "expected integer"),
    ],
)
def test_what_the_policy_does_wrong_is_an_observation(turn: str, status: CallStatus, words: str) -> None:
    trajectory = episode([turn, ANSWER])
    assert trajectory.turns[0].results[0].status is status
    assert words in trajectory.messages[3].content
    assert trajectory.reward == 1.0


def test_a_tool_that_raises_is_an_observation() -> None:
    async def fails(arguments: Mapping[str, JSON], context: ToolContext) -> str:
        raise KeyError("no such table")

    trajectory = episode([ADD, ANSWER], tools=(replace(TOOLS[0], handler=fails), TOOLS[1]))
    assert trajectory.turns[0].results[0].status is CallStatus.ERROR
    assert "no such table" in trajectory.messages[3].content


def test_a_tool_that_is_too_slow_is_an_observation() -> None:
    async def slow(arguments: Mapping[str, JSON], context: ToolContext) -> str:
        await asyncio.sleep(60)
        return ""

    trajectory = episode([ADD, ANSWER], tools=(Tool("add", "", number("a", "b"), slow, timeout_s=0.05), TOOLS[1]))
    assert trajectory.turns[0].results[0].status is CallStatus.TIMEOUT
    assert trajectory.reward == 1.0


def test_saying_done_in_words_ends_nothing() -> None:
    trajectory = episode(["DONE. <submit/> answer(5)", ANSWER])
    assert len(trajectory.turns) == 2


def test_the_step_budget_ends_the_episode_exactly() -> None:
    scripted = engine(lambda prompt, session, turn: call("add", a=turn, b=1))
    trajectory = episode(scripted, budgets=Budgets(steps=3))
    assert trajectory.terminated_by is TerminatedBy.STEPS
    assert len(trajectory.turns) == 3 == scripted.calls["generate"]
    assert trajectory.reward == 0.0
    assert trajectory.truncated


def test_an_answer_in_the_last_allowed_step_counts() -> None:
    assert episode([ADD, ANSWER], budgets=Budgets(steps=2)).terminated_by is TerminatedBy.DONE


def test_the_token_budget_is_shared_by_the_turns() -> None:
    scripted = engine(lambda prompt, session, turn: [300] * 500)
    trajectory = episode(scripted, budgets=Budgets(tokens=100, turn_tokens=40))
    assert [turn.sampled_tokens for turn in trajectory.turns] == [40, 40, 20]
    assert trajectory.terminated_by is TerminatedBy.TOKENS


def test_a_call_that_was_cut_is_not_run_and_not_held_against_its_form() -> None:
    length = len(RENDERER.encoder.data(ADD))
    trajectory = episode([ADD, ANSWER], budgets=Budgets(turn_tokens=length))
    assert trajectory.turns[0].finish is Finish.LENGTH
    assert trajectory.turns[0].results == ()
    assert "cut" in trajectory.messages[3].content
    assert trajectory.truncated
    assert trajectory.samples[0].sampled.sum() == trajectory.sampled_tokens


def test_the_end_token_that_the_harness_adds_to_a_cut_turn_is_not_trained() -> None:
    length = len(RENDERER.encoder.data(ADD))
    trajectory = episode([ADD, ANSWER], budgets=Budgets(turn_tokens=length))
    assert sampled_text(trajectory)[0] == ADD


def test_a_full_context_ends_the_episode_without_a_request() -> None:
    opening = len(RENDERER.open(TASK.prompt))
    scripted = engine([ADD, ANSWER])
    trajectory = episode(scripted, budgets=Budgets(context_tokens=opening))
    assert trajectory.terminated_by is TerminatedBy.CONTEXT
    assert scripted.calls["generate"] == 0
    assert trajectory.reward == 0.0


def test_one_token_of_room_is_used() -> None:
    opening = len(RENDERER.open(TASK.prompt))
    trajectory = episode([ADD], budgets=Budgets(context_tokens=opening + 1))
    assert trajectory.turns[0].sampled_tokens == 1


def test_unreadable_turns_in_a_row_end_the_episode() -> None:
    trajectory = episode(["a", "b", ADD, "c", "d", "e", ANSWER], budgets=Budgets(parse_errors=3))
    assert trajectory.terminated_by is TerminatedBy.PARSE_ERRORS
    assert len(trajectory.turns) == 6


def test_the_clock_ends_an_episode_in_the_middle_of_a_turn() -> None:
    begun = time.monotonic()
    trajectory = episode([Reply(ADD, delay_s=30.0)], budgets=Budgets(wall_clock_s=0.3))
    assert trajectory.terminated_by is TerminatedBy.WALL_CLOCK
    assert time.monotonic() - begun < 2
    assert trajectory.valid
    assert trajectory.reward == 0.0


def test_long_observations_are_cut_in_tokens() -> None:
    async def floods(arguments: Mapping[str, JSON], context: ToolContext) -> str:
        return "word " * 100_000

    tools = (replace(TOOLS[0], handler=floods), TOOLS[1])
    trajectory = episode([ADD, ANSWER], budgets=Budgets(observation_tokens=50), tools=tools)
    assert trajectory.turns[0].observation_tokens < 70
    assert "characters cut" in trajectory.messages[3].content


def test_a_broken_box_is_no_reward() -> None:
    class Broken(CountedBoxes):
        async def acquire(self, *args: object, **named: object) -> object:  # type: ignore[override]
            raise SandboxError("the engine is gone")

    trajectory = episode([ADD], world=environment(TASK, Broken()))
    assert trajectory.terminated_by is TerminatedBy.INFRASTRUCTURE
    assert trajectory.reward is None
    assert "the engine is gone" in (trajectory.error or "")


class World:
    """An environment that a test bends."""

    tools = TOOLS

    def __init__(self, **bend: object) -> None:
        self._bend = bend
        self.closed = 0

    async def start(self) -> tuple[Message, ...]:
        await asyncio.sleep(float(self._bend.get("start_s", 0)))  # type: ignore[arg-type]
        return TASK.prompt

    async def step(self, action: object) -> StepResult:
        await asyncio.sleep(float(self._bend.get("step_s", 0)))  # type: ignore[arg-type]
        if "raises" in self._bend:
            raise self._bend["raises"]  # type: ignore[misc]
        return StepResult(self._bend.get("says", ()), (), done=False)  # type: ignore[arg-type]

    async def export(self) -> object:
        return None

    async def close(self) -> None:
        self.closed += 1


def test_setting_up_counts_and_has_a_limit() -> None:
    begun = time.monotonic()
    trajectory = episode([ADD], world=World(start_s=30), budgets=Budgets(setup_s=0.2))  # type: ignore[arg-type]
    assert time.monotonic() - begun < 2
    assert trajectory.terminated_by is TerminatedBy.INFRASTRUCTURE
    assert "setting up the environment did not answer within 0.2 s" in (trajectory.error or "")


def test_an_environment_that_never_answers_costs_no_worker() -> None:
    begun = time.monotonic()
    trajectory = episode([ADD], world=World(step_s=60), budgets=Budgets(step_s=0.2))  # type: ignore[arg-type]
    assert time.monotonic() - begun < 2
    assert trajectory.reward is None


def test_a_bug_in_an_environment_names_the_task_and_the_turn() -> None:
    world = World(raises=ZeroDivisionError("seven by zero"))
    trajectory = episode([ADD], world=world)  # type: ignore[arg-type]
    assert trajectory.terminated_by is TerminatedBy.INFRASTRUCTURE
    for words in ("ZeroDivisionError", "seven by zero", TASK.id, "trajectory t", "turn 0"):
        assert words in (trajectory.error or "")
    assert world.closed == 1


def test_an_engine_that_fails_is_no_reward() -> None:
    trajectory = episode([Reply(ADD, error="out of memory")])
    assert trajectory.reward is None
    assert "out of memory" in (trajectory.error or "")


def test_no_verdict_is_not_zero() -> None:
    trajectory = episode([ANSWER], judge=Judge(no_verdict))
    assert trajectory.verdict == NoVerdict("the judge was out")
    assert trajectory.reward is None
    assert not trajectory.valid
    assert trajectory.terminated_by is TerminatedBy.DONE


class Liar(ScriptedEngine):
    """Returns what no engine may."""

    def __init__(self, **changes: object) -> None:
        super().__init__([ADD], encode=RENDERER.encoder.data)
        self._changes = changes

    async def generate(self, prompt: Sequence[int], sampling: Sampling, *, session: str) -> Completion:
        completion = await super().generate(prompt, sampling, session=session)
        return replace(completion, **self._changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"logprobs": np.zeros(1, np.float32)}, "same number"),
        ({"logprobs": np.full(LENGTH, np.nan, np.float32)}, "not a number"),
        ({"logprobs": np.full(LENGTH, 0.5, np.float32)}, "at or below 0"),
        ({"logprobs": np.full(LENGTH, -np.inf, np.float32)}, "not a number"),
        ({"ids": np.full(LENGTH, 300, np.int32)}, "no end token"),
        ({name: np.zeros(0, np.int32) for name in ("ids", "logprobs", "versions")}, "at least one"),
    ],
)
def test_an_engine_that_breaks_its_contract_stops_the_run(changes: dict[str, object], words: str) -> None:
    with pytest.raises(IntegrityError, match=words):
        episode(Liar(**changes))


def test_a_cancelled_episode_gives_its_box_back() -> None:
    async def body() -> int:
        boxes = CountedBoxes()
        stage = Stage(engine([Reply(ADD, delay_s=30)]), RENDERER, FORMAT, Budgets())
        task = asyncio.create_task(play(TASK, environment(TASK, boxes), Judge(), stage, Ticket("t", "g", 1)))
        await asyncio.sleep(0.05)
        assert boxes.lent == 1
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return boxes.lent

    assert asyncio.run(body()) == 0


def test_a_rewritten_history_begins_a_new_row_and_trains_each_token_once() -> None:
    made = tokenizer(THINKING)
    renderer = Renderer(made, [made.eos_token_id], history="template")
    world = World(says=(Message("user", "go on"),))
    turns = ["<think>one</think>first", "<think>two</think>second"]
    trajectory = episode(
        engine(lambda prompt, session, turn: turns[turn]),
        world=world,  # type: ignore[arg-type]
        budgets=Budgets(steps=2),
        renderer=renderer,
    )
    assert sampled_text(trajectory) == [turn + END for turn in turns]
    assert len(trajectory.samples) == 3
    assert "<think>one" not in RENDERER.encoder.text(trajectory.samples[1].ids.tolist())
    assert [turn.sample for turn in trajectory.turns] == [0, 1]


@given(st.lists(st.text(max_size=30), min_size=1, max_size=6))
@settings(max_examples=60, deadline=None)
def test_whatever_is_sampled_is_trained_exactly_once(turns: list[str]) -> None:
    ids = [RENDERER.encoder.data(turn) for turn in turns]
    trajectory = episode(
        engine(lambda prompt, session, turn: ids[turn]), budgets=Budgets(steps=len(turns), parse_errors=100)
    )
    sampled = trajectory.samples[0].ids[trajectory.samples[0].sampled].tolist()
    end = RENDERER.end_ids[0]
    assert sampled == [token for turn in ids for token in [*turn, end]]
