"""The thread that decodes. Requests join and leave between two steps, where weights change too."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from palestra.envs.errors import EngineError
from palestra.rollout.engines.checks import UNPUBLISHED
from palestra.rollout.engines.decoding import Batch, prefill
from palestra.rollout.engines.kept import Kept, KeptSessions
from palestra.rollout.engines.lora_layers import Bindings, LoraLayers
from palestra.rollout.engines.sampling import draw
from palestra.rollout.types import Completion, Finish, Sampling

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Weights:
    """What one load put in force: base plus `bound`, published as `version`; `load` counts loads."""

    load: int
    version: int
    bound: Bindings


@dataclass(slots=True, eq=False)
class Row:
    """One request in flight. Weights are fixed when it is admitted and kept to its end."""

    prompt: list[int]
    sampling: Sampling
    session: str
    stream: torch.Generator
    answer: Future[Completion] = field(default_factory=Future)
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @property
    def finish(self) -> Finish | None:
        """Why it is over, None while it is not."""
        if self.ids and self.ids[-1] in self.sampling.stop_ids:
            return Finish.STOP
        return Finish.LENGTH if len(self.ids) >= self.sampling.max_tokens else None


@dataclass(slots=True)
class _Group:
    """The rows under the same weights, decoded as one batch."""

    weights: Weights
    rows: list[Row] = field(default_factory=list)
    batch: Batch = field(default_factory=Batch.empty)


class StepLoop:
    """Decodes in a thread of its own. `add` and `call` may be used from any thread; the rest runs inside."""

    def __init__(self, model: PreTrainedModel, layers: LoraLayers, kept: KeptSessions, max_rows: int) -> None:
        self._model = model
        self._layers = layers
        self._kept = kept
        self._max_rows = max_rows
        self._groups: dict[int, _Group] = {}  # by load
        self._rows: deque[Row] = deque()
        self._calls: deque[tuple[Callable[[], object], Future]] = deque()
        self._news = threading.Condition()
        self._closed = False
        self.weights = Weights(0, UNPUBLISHED, Bindings())
        self._thread = threading.Thread(target=self._run, name="palestra-decode", daemon=True)
        self._thread.start()

    def add(self, row: Row) -> None:
        """Queue a request; `row.answer` gets its Completion or EngineError. Cancel `row.answer` to give up on it."""
        with self._news:
            self._refuse_when_closed()
            self._rows.append(row)
            self._news.notify()

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run `function` between two steps."""
        answer: Future[T] = Future()
        with self._news:
            self._refuse_when_closed()
            self._calls.append((function, answer))
            self._news.notify()
        return answer

    def close(self, timeout_s: float) -> None:
        """End the thread; whoever still waits gets an EngineError. Idempotent."""
        with self._news:
            self._closed = True
            self._news.notify()
        self._thread.join(timeout_s)

    def _refuse_when_closed(self) -> None:
        if self._closed:
            raise EngineError("the engine is closed")

    def _run(self) -> None:
        with torch.inference_mode():
            while self._wait():
                self._serve_calls()
                self._admit()
                for group in list(self._groups.values()):
                    self._advance(group)
                self._groups = {load: group for load, group in self._groups.items() if group.rows}
        waiting = [row.answer for group in self._groups.values() for row in group.rows]
        waiting += [row.answer for row in self._rows] + [answer for _, answer in self._calls]
        for answer in waiting:
            _fail(answer, EngineError("the engine was closed while the request was in flight"))

    def _wait(self) -> bool:
        with self._news:
            # no limit: there is nothing to wait for but news, and close() is news
            self._news.wait_for(lambda: self._closed or self._groups or self._rows or self._calls)
            return not self._closed

    def _serve_calls(self) -> None:
        while self._calls:
            function, answer = self._calls.popleft()
            if not answer.set_running_or_notify_cancel():
                continue
            try:
                answer.set_result(function())
            except Exception as error:  # noqa: BLE001  (the border of the thread: the caller gets the cause)
                answer.set_exception(error)

    def _admit(self) -> None:
        while self._rows and sum(len(group.rows) for group in self._groups.values()) < self._max_rows:
            row = self._rows.popleft()
            if row.answer.cancelled():
                continue
            group = self._groups.setdefault(self.weights.load, _Group(self.weights))
            try:
                self._layers.use(group.weights.bound)
                kept = self._kept.prefix(row.session, row.prompt, group.weights.load)
                logits, layers = prefill(self._model, row.prompt, kept)
                self._take([row], logits[None])
                group.batch.join(layers)
                group.rows.append(row)
            except Exception as error:  # noqa: BLE001  (one request fails, the others go on)
                _fail(row.answer, _as_engine_error(error))
        for group in self._groups.values():
            self._release(group)

    def _advance(self, group: _Group) -> None:
        if not group.rows:
            return
        try:
            self._layers.use(group.weights.bound)
            self._take(group.rows, group.batch.step(self._model, [row.ids[-1] for row in group.rows]))
            self._release(group)
        except Exception as error:  # noqa: BLE001  (this batch fails, the engine goes on)
            for row in group.rows:
                _fail(row.answer, _as_engine_error(error))
            group.rows, group.batch = [], Batch.empty()

    def _take(self, rows: list[Row], logits: Tensor) -> None:
        ids, logprobs = draw(logits, [row.sampling.temperature for row in rows], [row.stream for row in rows])
        for row, token, logprob in zip(rows, ids.tolist(), logprobs.tolist(), strict=True):
            row.ids.append(token)
            row.logprobs.append(logprob)

    def _release(self, group: _Group) -> None:
        staying = []
        for index, row in enumerate(group.rows):
            if row.finish is None and not row.answer.cancelled():
                staying.append(index)
                continue
            if row.finish is not None:
                known = (*row.prompt, *row.ids[:-1])  # the last token was sampled, not run
                self._kept.put(row.session, Kept(known, group.weights.load, group.batch.row(index)))
                _answer(row, group.weights.version)
        if len(staying) < len(group.rows):
            group.rows = [group.rows[index] for index in staying]
            group.batch.leave(staying)


def _answer(row: Row, version: int) -> None:
    if row.finish is None or not row.answer.set_running_or_notify_cancel():
        return
    ids = np.asarray(row.ids, dtype=np.int32)
    logprobs = np.asarray(row.logprobs, dtype=np.float32)
    row.answer.set_result(Completion(ids, logprobs, row.finish, np.full(len(ids), version, dtype=np.int32)))


def _fail(answer: Future, error: EngineError) -> None:
    if not answer.done() and answer.set_running_or_notify_cancel():
        answer.set_exception(error)


def _as_engine_error(error: Exception) -> EngineError:
    failure = EngineError(f"decoding failed: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure
