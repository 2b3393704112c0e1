"""The environment of a task with tools: a box per episode, calls through the runtime, an answer at the end."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from palestra.envs.calls import CallFormat, JsonInTags
from palestra.envs.runtime import RuntimeLimits, ToolRuntime
from palestra.envs.sandboxes.contract import Boxes, BoxSpec, Sandbox
from palestra.envs.tools import Tool
from palestra.envs.types import JSON, Action, Artefact, CallStatus, Message, StepResult, Task, ToolResult
from palestra.envs.verifiers.signs import control_plane_probe

_CALLS = JsonInTags()
_LIMITS = RuntimeLimits()


class ToolEnvironment:
    """One episode of `task` with `tools` in a box that holds the task's files.

    The episode is over when a finishing tool accepts a call, and by nothing else: no word in a text or a tool's output
    ends it. What leaves is `{"final": arguments of that call or None, "ran": {tool: successful calls}, "turns": n}`.
    """

    def __init__(
        self,
        task: Task,
        tools: Sequence[Tool],
        boxes: Boxes,
        *,
        spec: BoxSpec | None = None,
        calls: CallFormat = _CALLS,
        limits: RuntimeLimits = _LIMITS,
        digest_states: bool = False,
        call_reward: float = 0.0,
    ) -> None:
        """`spec`: None is the default box, of the task's image where it names one.
        `digest_states`: say in which state the box is before each action; costs a walk over its files each time.
        `call_reward`: what a step earns by itself when everything that it asked for ran without an error.
        """
        self.task = task
        self._tools = tuple(tools)
        self._boxes = boxes
        self._spec = spec or BoxSpec(image=task.image)
        self._calls = calls
        self._limits = limits
        self._digest_states = digest_states
        self._call_reward = call_reward
        self._opening_state: str | None = None
        self._box: Sandbox | None = None
        self._runtime: ToolRuntime | None = None
        self._num_calls = 0
        self._turns = 0
        self._ran: Counter[str] = Counter()
        self._final: dict[str, JSON] | None = None

    @property
    def tools(self) -> Sequence[Tool]:
        """What the policy may call."""
        return self._tools

    @property
    def opening_state(self) -> str | None:
        """Digest of the box as the first action finds it; None unless states are digested."""
        return self._opening_state

    async def start(self) -> tuple[Message, ...]:
        """Borrow a box with the task's files and return the task's prompt. Raises SandboxError."""
        if self._runtime is not None:
            raise RuntimeError(f"{self.task.id}: an environment is for one episode; make a new one")
        box = await self._boxes.acquire(self._spec, self.task.files, episode=self.task.id)
        self._box = box
        # the seed spreads retries apart; it decides nothing that is recorded
        self._runtime = ToolRuntime(self._tools, box, self._limits, random.Random(box.id))
        self._opening_state = await self._state(box)
        return self.task.prompt

    async def step(self, action: Action) -> StepResult:
        """Answer every call and every unreadable call of the action. Raises SandboxError."""
        if self._runtime is None or self._box is None or self._final is not None:
            raise RuntimeError(f"{self.task.id}: step before start or after the end of the episode")
        self._turns += 1
        # ids are ours, so that two calls of an episode never share one, whatever the policy wrote
        calls = [replace(call, id=f"c{self._num_calls + n}") for n, call in enumerate(action.calls, 1)]
        self._num_calls += len(calls)
        results = await self._runtime.run(calls)
        for call, result in zip(calls, results, strict=True):
            if result.status is CallStatus.OK:
                self._ran[call.name] += 1
                if any(tool.finishes for tool in self._tools if tool.name == call.name):
                    self._final = dict(call.arguments)
        unread = tuple(ToolResult(CallStatus.UNPARSABLE, f"error: {error.message}") for error in action.errors)
        results = (*results, *unread) or (self._no_call(),)
        done = self._final is not None
        state = None if done else await self._state(self._box)
        reward = self._call_reward if all(result.status is CallStatus.OK for result in results) else 0.0
        return StepResult(tuple(map(self._observation, results)), results, done, reward, state)

    async def export(self) -> Artefact:
        """The answer and what was done for it, as plain data."""
        answer: dict[str, JSON] = {"final": self._final, "ran": {**self._ran}, "turns": self._turns}
        return Artefact(answer, flags=self.signs())

    def signs(self) -> tuple[str, ...]:
        """Flags of what the policy tried and its box refused."""
        return () if self._box is None else control_plane_probe(self._box.denials())

    async def close(self) -> None:
        """Give the box back. Idempotent."""
        box, self._box = self._box, None
        if box is not None:
            await asyncio.shield(self._boxes.release(box))

    async def _state(self, box: Sandbox) -> str | None:
        """What the policy has written so far, not what it has read; None also where that is too much to digest."""
        if not self._digest_states:
            return None
        try:
            return await box.digest()
        except ValueError:  # the policy's own doing, and no failure: a state like no other
            return None

    def _no_call(self) -> ToolResult:
        names = ", ".join(tool.name for tool in self._tools)
        return ToolResult(CallStatus.NO_CALL, f"error: no tool called. Write {self._calls.form} with one of: {names}")

    def _observation(self, result: ToolResult) -> Message:
        # a chat template prints the name as its own words, so a name that the policy made up stays in the record
        known = any(tool.name == result.name for tool in self._tools)
        return Message("tool", result.content, name=result.name if known else None, call_id=result.call_id)
