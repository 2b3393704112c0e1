"""Tokens per second and peak memory of whole updates: LoRA of rank 16 on all linear layers, checkpointed layers."""

from __future__ import annotations

import gc
import resource
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import gpu_check_models as made
import numpy as np
import torch

from palestra.rl.batch import Batch
from palestra.rl.learner import Learner, LearnerSettings
from palestra.rl.lora import LoraSettings
from palestra.rl.objective import Objective
from palestra.rl.optimizer import OptimizerSettings

LENGTHS = (16_384, 8_192, 4_096)  # the first that fits is measured; those that do not are told
SAMPLED = 0.4  # share of the tokens that the policy sampled; the rest is observed
MOST_UPDATES, MOST_SECONDS = 4, 25.0


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement. `tokens` are those of the episodes, whether or not they were computed once for several."""

    what: str
    tokens: int
    action_tokens: int = 0
    row_tokens: int = 0  # through the model's body
    tokens_per_s: float = 0.0
    step_s: float = 0.0
    peak_gib: float = 0.0
    updates: int = 0
    missing: str | None = None  # why there are no figures


@dataclass(frozen=True, slots=True)
class _Objective:
    objective: Objective


def measure_all(name: str, device: str, small: bool, until: float, tell: Callable[[Mapping[str, Any]], None]) -> None:
    """One episode of 16,384 tokens, then a group with a shared prompt, computed once and computed for each.

    No measurement begins after `until`, on the clock of `time.monotonic`.
    """
    model = made.shaped(name, small=small, device=device)
    weights = sum(parameter.numel() for parameter in model.parameters())
    rows: list[Row] = []

    def add(row: Row) -> None:
        rows.append(row)
        tell({"device": f"{name}: {weights:,} weights in bfloat16", "rows": [asdict(row) for row in rows]})

    settings = LearnerSettings(
        lora=LoraSettings(rank=16, alpha=32.0),
        optimizer=OptimizerSettings(learning_rate=1e-5),
        gradient_checkpointing=True,
    )
    learner = Learner(model, settings)
    vocab = model.config.vocab_size
    lengths = tuple(length // 64 for length in LENGTHS) if small else LENGTHS
    for row in longest_that_fits(lengths, partial(_one_episode, learner, device, vocab)):
        add(row)
    half = rows[-1].tokens // 8
    for share in (True, False):
        if time.monotonic() > until:
            add(Row(_GROUP[share], 16 * half, missing="no time left"))
        else:
            add(_or_missing(partial(_group, learner, device, vocab, half, share), 16 * half, _GROUP[share]))


_GROUP = {True: "8 episodes, the prompt computed once", False: "8 episodes, the prompt computed for each"}


def longest_that_fits(lengths: tuple[int, ...], attempt: Callable[[int], Row]) -> Iterator[Row]:
    """A row for each length that is too much for the memory, and one for the first that is not, if any."""
    for length in lengths:
        row = _or_missing(partial(attempt, length), length, "one episode")
        yield row
        if row.missing is None:
            return


def _or_missing(measure: Callable[[], Row], tokens: int, what: str) -> Row:
    """A measurement, or the figure that there was no memory for it."""
    try:
        return measure()
    except torch.OutOfMemoryError:
        pass  # what the traceback holds must be gone before memory is given back
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return Row(what, tokens, missing="out of memory")


def _one_episode(learner: Learner, device: str, vocab: int, length: int) -> Row:
    rng = np.random.default_rng(0)
    prompt = length // 16
    group = made.group_of(rng, episodes=1, shared=prompt, own=length - prompt, sampled=SAMPLED, vocab=vocab)
    return _measure("one episode", learner, device, made.batch([group], rng), length)


def _group(learner: Learner, device: str, vocab: int, half: int, share: bool) -> Row:
    """Eight episodes, of whose tokens the first half is the prompt of all."""
    rng = np.random.default_rng(0)
    group = made.group_of(rng, episodes=8, shared=half, own=half, sampled=SAMPLED, vocab=vocab)
    return _measure(_GROUP[share], learner, device, made.batch([group], rng, share=share), 16 * half)


def _measure(what: str, learner: Learner, device: str, batch: Batch, tokens: int) -> Row:
    """Whole updates: forward, backward, clip, step. The first is not timed, but counts for the memory."""
    how = _Objective(Objective())
    _reset_peak(device)
    learner.update(batch, how)
    _wait(device)
    seconds: list[float] = []
    while len(seconds) < MOST_UPDATES and sum(seconds) < MOST_SECONDS:
        begun = time.perf_counter()
        learner.update(batch, how)
        _wait(device)
        seconds.append(time.perf_counter() - begun)
    step = float(np.median(seconds))
    return Row(
        what=what,
        tokens=tokens,
        action_tokens=batch.num_actions,
        row_tokens=batch.num_tokens,
        tokens_per_s=tokens / step,
        step_s=step,
        peak_gib=_peak_bytes(device) / 2**30,
        updates=len(seconds),
    )


def _wait(device: str) -> None:
    """Until the device has done what was asked of it."""
    if device == "cuda":
        torch.cuda.synchronize()


def _reset_peak(device: str) -> None:
    if device == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _peak_bytes(device: str) -> int:
    """The most that tensors took on the GPU; on a CPU, that the process took so far."""
    if device == "cuda":
        return int(torch.cuda.max_memory_allocated())
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
