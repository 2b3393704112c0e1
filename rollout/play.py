"""The agent loop: observe, reason, act, until the policy says that it is done or a budget says so.

Ending is a property of this harness, not of the model: every branch either appends to the conversation or returns.
Whatever the policy does wrong is an observation; whatever a machine does wrong ends the episode as invalid, with its
first cause, and is never a reward.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from palestra.envs.calls import CallFormat
from palestra.envs.environment import Environment, OpensInState, Verifier
from palestra.envs.errors import InfrastructureError, IntegrityError
from palestra.envs.types import (
    Action,
    Artefact,
    CallStatus,
    Message,
    NoVerdict,
    StepResult,
    Task,
    Verdict,
)
from palestra.rollout.budgets import Budgets, Used, exhausted, turn_allowance
from palestra.rollout.engines.protocol import Engine
from palestra.rollout.renderer import Renderer
from palestra.rollout.rows import Row
from palestra.rollout.seeds import derive_seed
from palestra.rollout.types import Completion, Finish, Sampling, TerminatedBy, Trajectory, Turn

T = TypeVar("T")

CUT = (
    "Your turn was cut after {n} tokens, so nothing in it was run. Write a shorter turn that ends with a complete call."
)
CLOSE_S = 60.0
MISSED = (CallStatus.UNPARSABLE, CallStatus.NO_CALL)


@dataclass(frozen=True, slots=True)
class Ticket:
    """Which episode this is. Ticket("g7-2", "g7", seed=91, temperature=1.0)"""

    trajectory_id: str
    group_id: str
    seed: int
    temperature: float = 1.0


@dataclass(frozen=True, slots=True)
class Stage:
    """What an episode is played with; shared by many at once."""

    engine: Engine
    renderer: Renderer
    call_format: CallFormat
    budgets: Budgets
    clock: Callable[[], float] = time.monotonic


async def play(task: Task, environment: Environment, verifier: Verifier, stage: Stage, ticket: Ticket) -> Trajectory:
    """Play one episode to its end and have it judged. Never raises for what the policy or a machine did.

    Raises IntegrityError when the engine breaks its contract (then the run must stop), and passes cancellation on
    after the environment is closed.
    """
    episode = _Episode(task, environment, stage, ticket)
    started = stage.clock()
    verdict: Verdict
    try:
        artefact = await episode.run()
        verdict = await _within(verifier.verify(task, artefact), stage.budgets.verify_s, "the verifier")
    except asyncio.CancelledError:
        raise
    except IntegrityError as error:
        raise IntegrityError(f"{error} ({episode.where()})") from error
    except InfrastructureError as error:
        verdict = episode.failed(str(error))
    except Exception as error:  # noqa: BLE001 - the border to environments that users write: a bug there is no reward
        verdict = episode.failed(f"{type(error).__name__}: {error}")
    finally:
        await _settled(environment.close())
        await _settled(stage.engine.end_session(ticket.trajectory_id))
    if isinstance(verdict, NoVerdict) and episode.error is None:
        episode.error = verdict.cause
    return episode.trajectory(verdict, stage.clock() - started)


class _Episode:
    """The state of one episode while it is played."""

    def __init__(self, task: Task, environment: Environment, stage: Stage, ticket: Ticket) -> None:
        self.task, self.environment, self.stage, self.ticket = task, environment, stage, ticket
        self.messages: list[Message] = []
        self.turns: list[Turn] = []
        self.rows: list[Row] = []
        self.used = Used()
        self.state: str | None = None
        self.ended: TerminatedBy | None = None
        self.error: str | None = None
        self.artefact: Artefact | None = None

    async def run(self) -> Artefact:
        """Until the end; then what is to be judged."""
        budgets, started = self.stage.budgets, self.stage.clock()
        opening = await _within(
            self.environment.start(), min(budgets.setup_s, budgets.wall_clock_s), "setting up the environment"
        )
        if isinstance(self.environment, OpensInState):
            self.state = self.environment.opening_state
        self.messages += opening
        self.rows.append(Row(self.stage.renderer.open(opening)))
        while self.ended is None:
            self.used.seconds = self.stage.clock() - started
            self.used.context = len(self.rows[-1])
            self.ended = exhausted(budgets, self.used) or await self._decide()
        self.artefact = await _within(self.environment.export(), budgets.step_s, "exporting the artefact")
        return self.artefact

    async def _decide(self) -> TerminatedBy | None:
        """One decision: sample a turn, act on it, append what came back."""
        row, clock = self.rows[-1], self.stage.clock
        prompt_tokens, begun = len(row), clock()
        completion = await self._sample(row)
        if completion is None:
            return TerminatedBy.WALL_CLOCK
        generated = clock()
        text = self.stage.renderer.text(completion.ids.tolist())
        row.sampled(completion, self.used.steps, self.ticket.temperature)
        self.messages.append(Message("assistant", text))
        result = await self._act(text, completion)
        observed = self._observe(row, completion, result.observations) if not result.done else 0
        self.turns.append(
            Turn(
                index=self.used.steps,
                sample=self.rows.index(row),
                prompt_tokens=prompt_tokens,
                sampled_tokens=len(completion.ids),
                finish=completion.finish,
                text=text,
                results=result.results,
                observation_tokens=observed,
                generate_s=generated - begun,
                step_s=clock() - generated,
                reward=result.reward,
                state=self.state,
            )
        )
        self.state = result.state
        self.used.steps += 1
        self.used.tokens += len(completion.ids)
        missed = bool(result.results) and all(r.status in MISSED for r in result.results)
        self.used.parse_errors = self.used.parse_errors + 1 if missed else 0
        return TerminatedBy.DONE if result.done else None

    async def _sample(self, row: Row) -> Completion | None:
        """The policy's next turn, or None when the episode's time ran out first."""
        budgets, ticket = self.stage.budgets, self.ticket
        sampling = Sampling(
            max_tokens=turn_allowance(budgets, self.used),
            temperature=ticket.temperature,
            seed=derive_seed(ticket.seed, "turn", self.used.steps),
            stop_ids=self.stage.renderer.end_ids,
        )
        # a copy: the engine may keep it, and the row goes on growing
        request = self.stage.engine.generate(tuple(row.ids), sampling, session=ticket.trajectory_id)
        try:
            completion = await asyncio.wait_for(request, budgets.wall_clock_s - self.used.seconds)
        except TimeoutError:
            return None
        _check_completion(completion, sampling)
        return completion

    async def _act(self, text: str, completion: Completion) -> StepResult:
        if completion.finish is Finish.LENGTH:
            # a turn that was cut is not an action, even when what is there parses: half a command must not run
            note = CUT.format(n=len(completion.ids))
            return StepResult((Message("tool", note),), (), done=False, state=self.state)
        action: Action = self.stage.call_format.parse(text)
        return await _within(self.environment.step(action), self.stage.budgets.step_s, "the environment's step")

    def _observe(self, row: Row, completion: Completion, observations: tuple[Message, ...]) -> int:
        """Append what the environment answered, each message within its cap; in a new row if history is rewritten."""
        renderer, cap = self.stage.renderer, self.stage.budgets.observation_tokens
        observations = tuple(replace(m, content=renderer.cap(m.content, cap)) for m in observations)
        if renderer.continues(self.messages, observations):
            last = int(completion.ids[-1])  # also of a cut turn, whose last token may be the end by chance
            ids = renderer.extend(last if last in renderer.end_ids else None, observations)
            row.context(ids)
        else:
            ids = renderer.open((*self.messages, *observations))
            self.rows.append(Row(ids))
        self.messages += observations
        return len(ids)

    def where(self) -> str:
        """For messages: which episode, and how far it had come."""
        return f"task {self.task.id}, trajectory {self.ticket.trajectory_id}, turn {self.used.steps}"

    def failed(self, cause: str) -> NoVerdict:
        """Nobody's policy did this: the episode is over and is not a reward."""
        self.error = f"{cause} ({self.where()})"
        self.ended = TerminatedBy.INFRASTRUCTURE
        return NoVerdict(self.error)

    def trajectory(self, verdict: Verdict, seconds: float) -> Trajectory:
        """The record of the episode."""
        assert self.ended is not None
        return Trajectory(
            id=self.ticket.trajectory_id,
            task_id=self.task.id,
            group_id=self.ticket.group_id,
            seed=self.ticket.seed,
            messages=tuple(self.messages),
            turns=tuple(self.turns),
            samples=tuple(row.freeze() for row in self.rows),
            terminated_by=self.ended,
            verdict=verdict,
            error=self.error,
            seconds=seconds,
            artefact=self.artefact,
        )


async def _within(work: Awaitable[T], seconds: float, what: str) -> T:
    """The result of `work`, or InfrastructureError when it takes longer: no layer below is trusted to keep time."""
    try:
        return await asyncio.wait_for(work, seconds)
    except TimeoutError as error:
        raise InfrastructureError(f"{what} did not answer within {seconds:g} s") from error


async def _settled(closing: Awaitable[None]) -> None:
    """Closing that a cancellation does not interrupt: what was opened is given back before anyone hears of it."""
    task = asyncio.ensure_future(closing)
    try:
        await asyncio.wait_for(asyncio.shield(task), CLOSE_S)
    except asyncio.CancelledError:
        await asyncio.wait({task}, timeout=CLOSE_S)
        raise
    except TimeoutError:
        task.cancel()  # the sandbox pool or the reaper removes what is left


def _check_completion(completion: Completion, sampling: Sampling) -> None:
    """The engine's contract: one log-probability and one version per id, and no more ids than asked for."""
    count = len(completion.ids)
    if not count or not count == len(completion.logprobs) == len(completion.versions):
        raise IntegrityError(
            f"the engine returned {count} ids, {len(completion.logprobs)} log-probabilities and "
            f"{len(completion.versions)} versions; expected the same number of each, at least one"
        )
    if count > sampling.max_tokens:
        raise IntegrityError(f"the engine sampled {count} tokens where {sampling.max_tokens} were allowed")
    if not (np.isfinite(completion.logprobs) & (completion.logprobs <= 1e-4)).all():
        raise IntegrityError("the engine returned a log-probability that is not a number at or below 0")
    if completion.finish is Finish.STOP and int(completion.ids[-1]) not in sampling.stop_ids:
        raise IntegrityError(f"the engine says that it stopped, but {int(completion.ids[-1])} is no end token")


__all__ = ["Stage", "Ticket", "play"]
