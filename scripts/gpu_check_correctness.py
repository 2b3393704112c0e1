"""The learner on a device against the same learner on the CPU: log-probabilities, losses, gradients, updates."""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any, Literal

import gpu_check_models as made
import numpy as np
import peft
import torch
import transformers

from palestra.rl.batch import Batch
from palestra.rl.learner import Learner, LearnerSettings
from palestra.rl.lora import LoraSettings
from palestra.rl.objective import Objective
from palestra.rl.optimizer import OptimizerSettings
from palestra.rollout.adapters import Adapter, Factors

LORA = LoraSettings(rank=4, alpha=8.0)
RATE, BETA1 = 1e-3, 0.9


@dataclass(frozen=True, slots=True)
class Allowed:
    """The largest differences that count as equal. `change` and `gradient` are relative, by the norm of the whole."""

    logprobs: float
    loss: float
    gradient: float
    change: float


EXACT = Allowed(1e-5, 1e-6, 2e-5, 2e-4)
"""Of float64: log-probabilities come out in float32, and models compute rotary positions and norms in float32."""
SINGLE = Allowed(2e-4, 1e-4, 2e-3, 2e-2)
HALF = Allowed(0.25, 0.05, 0.1, 0.3)
"""Of bfloat16 against float32 with the same rounded weights: its 8 bits of precision go through every layer."""


@dataclass(frozen=True, slots=True)
class Check:
    """One comparison."""

    what: str
    found: float
    allowed: float
    ok: bool


@dataclass(slots=True)
class Report:
    """All comparisons so far, told after each."""

    device: str
    factor: float
    tell: Callable[[Mapping[str, Any]], None]
    checks: list[Check] = field(default_factory=list)

    def add(self, what: str, found: float, allowed: float) -> None:
        """A difference; what is not a number is a large one."""
        allowed *= self.factor
        found = found if math.isfinite(found) else 1e300  # which JSON can carry
        self.checks.append(Check(what, found, allowed, bool(found <= allowed)))
        self.tell({"device": self.device, "checks": [asdict(check) for check in self.checks]})


@dataclass(frozen=True, slots=True)
class Seen:
    """What a learner did with a batch: log-probabilities [N] in the order of the episodes, loss, gradient, updates."""

    logprobs: np.ndarray
    loss: float
    gradient: Mapping[str, torch.Tensor]
    change: Mapping[str, torch.Tensor]


def check_all(device: str, small: bool, factor: float, tell: Callable[[Mapping[str, Any]], None]) -> None:
    """Every comparison, the sharpest first."""
    report = Report(_name(device), factor, tell)
    longest = 60 if small else 400
    kinds = ("llama", "gpt2", "qwen3")
    for dtype, allowed in ((torch.float64, EXACT), (torch.float32, SINGLE)):
        for kind in kinds[:1] if small else kinds:
            _against_cpu(report, kind, device, dtype, allowed, longest, "lora")
    _against_cpu(report, "llama", device, torch.float32, SINGLE, longest, "full")
    for kind in ("qwen3",) if small else ("llama", "qwen3"):
        _against_cpu(report, kind, device, torch.bfloat16, HALF, longest, "lora")
    for dtype, allowed in ((torch.float32, SINGLE), (torch.bfloat16, HALF)):
        _same_on_device(report, device, dtype, allowed, longest)
    _members_are_apart(report, device, longest)


def _against_cpu(
    report: Report,
    kind: str,
    device: str,
    dtype: torch.dtype,
    allowed: Allowed,
    longest: int,
    train: Literal["lora", "full"],
) -> None:
    """The device in `dtype` against the CPU, in at least float32, with the same weights: rounded to `dtype` on both."""
    reference = torch.float32 if dtype == torch.bfloat16 else dtype
    found = see(learner(kind, device, dtype, train=train), _batch(longest))
    wanted = see(learner(kind, "cpu", reference, rounded=dtype, train=train), _batch(longest))
    _compare(report, f"{kind} {_word(dtype)} {train} against the CPU", found, wanted, allowed)


def _same_on_device(report: Report, device: str, dtype: torch.dtype, allowed: Allowed, longest: int) -> None:
    """What changes how a batch is computed and not what: sharing prefixes, micro-batches, checkpointed layers."""
    plain = see(learner("qwen3", device, dtype), _batch(longest, share=False))
    ways = {
        "a tree against its branches": (_batch(longest), False),
        "a row per episode against one row": (_batch(longest, share=False, tokens=1), False),
        "checkpointed layers against kept ones": (_batch(longest, share=False), True),
    }
    for what, (batch, checkpointed) in ways.items():
        found = see(learner("qwen3", device, dtype, checkpointed=checkpointed), batch)
        _compare(report, f"{_word(dtype)}: {what}", found, plain, allowed)


def _members_are_apart(report: Report, device: str, longest: int) -> None:
    """Other ids in one episode of a packed row leave the log-probabilities of the others as they are."""
    rng = np.random.default_rng(0)
    groups = made.groups(rng, longest=longest, shared=1)
    first = groups[0].trajectories[0].samples[0]
    rows = learner("qwen3", device, torch.bfloat16)
    before = _logprobs(rows, made.batch(groups, np.random.default_rng(1), share=False))
    first.ids[1:] = (first.ids[1:] + 7) % (made.VOCAB - 2) + 2  # in place: everything else stays
    after = _logprobs(rows, made.batch(groups, np.random.default_rng(1), share=False))
    own = int(first.sampled.sum())
    report.add("bfloat16: log-probabilities beside an episode that changed", _most(before[own:], after[own:]), 2e-3)
    assert not np.allclose(before[:own], after[:own], atol=0.1)  # else nothing was tested


def learner(
    kind: str,
    device: str,
    dtype: torch.dtype,
    *,
    rounded: torch.dtype | None = None,
    train: Literal["lora", "full"] = "lora",
    checkpointed: bool = False,
) -> Learner:
    """A tiny model's learner, with an adapter that already does something. `rounded`: weights go through this type."""
    model = made.tiny(kind).to(rounded or dtype).to(dtype).to(device)
    settings = LearnerSettings(
        train=train,
        lora=LORA,
        # a large eps: else a gradient of almost nothing, whose sign is rounding, moves its weight by a whole step
        optimizer=OptimizerSettings(learning_rate=RATE, beta1=BETA1, eps=1e-3, max_grad_norm=1e9),
        gradient_checkpointing=checkpointed,
    )
    start = _adapter(kind) if train == "lora" else None
    return Learner(model, settings, start=start)


def see(one: Learner, batch: Batch) -> Seen:
    """Score, then update three times. The first moment of the first update is the gradient."""
    logprobs = _logprobs(one, batch)
    before = _weights(one)
    loss = one.update(batch, _Objective()).loss
    moments = one.state().tensors
    gradient = {key: tensor.double() / (1 - BETA1) for key, tensor in moments.items() if key.startswith("exp_avg/")}
    for _ in range(2):
        one.update(batch, _Objective())
    after = _weights(one)
    return Seen(logprobs, loss, gradient, {name: after[name] - before[name] for name in before})


@dataclass(frozen=True, slots=True)
class _Objective:
    objective: Objective = field(default_factory=Objective)


def _compare(report: Report, what: str, found: Seen, wanted: Seen, allowed: Allowed) -> None:
    report.add(f"{what}: log-probabilities", _most(found.logprobs, wanted.logprobs), allowed.logprobs)
    report.add(f"{what}: loss", abs(found.loss - wanted.loss), allowed.loss * max(1.0, abs(wanted.loss)))
    report.add(f"{what}: gradient", _relative(found.gradient, wanted.gradient), allowed.gradient)
    report.add(f"{what}: three updates", _relative(found.change, wanted.change), allowed.change)


def _batch(longest: int, *, share: bool = True, tokens: int = 1 << 20) -> Batch:
    groups = made.groups(np.random.default_rng(0), longest=longest)
    return made.batch(groups, np.random.default_rng(1), share=share, tokens=tokens)


def _logprobs(one: Learner, batch: Batch) -> np.ndarray:
    """In the order of the episodes, however the batch laid them out in rows."""
    return one.sampled_logprobs(batch)[np.argsort(batch.actions().sample, kind="stable")]


def _weights(one: Learner) -> dict[str, torch.Tensor]:
    return {key: value.double() for key, value in one.state().tensors.items() if key.startswith("weight/")}


@cache
def _adapter(kind: str) -> Adapter:
    """Factors for every linear layer of a tiny model, B not zero, the same each time."""
    fresh = Learner(made.tiny(kind), LearnerSettings(lora=LORA)).adapter()
    rng = np.random.default_rng(2)
    return Adapter(
        {
            name: Factors(
                (rng.standard_normal(factors.a.shape) / np.sqrt(factors.a.shape[1])).astype(np.float32),
                (0.05 * rng.standard_normal(factors.b.shape)).astype(np.float32),
                factors.scale,
            )
            for name, factors in sorted(fresh.factors.items())
        }
    )


def _most(found: np.ndarray, wanted: np.ndarray) -> float:
    """The largest difference; not a number when either holds one."""
    return float(np.abs(found.astype(np.float64) - wanted.astype(np.float64)).max())


def _relative(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> float:
    """Norm of the difference over the norm of what was wanted, over all tensors as one vector."""
    if found.keys() != wanted.keys():
        return float("inf")
    difference = sum(float((found[name] - wanted[name]).square().sum()) for name in wanted)
    return float(np.sqrt(difference / sum(float(tensor.square().sum()) for tensor in wanted.values())))


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _name(device: str) -> str:
    """The device and the versions, for the record."""
    what = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine()
    return f"{what}, torch {torch.__version__}, transformers {transformers.__version__}, peft {peft.__version__}"
