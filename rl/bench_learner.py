"""What `palestra bench learner` runs in a process of its own for each path, so that each has its own peak memory.

    python -m palestra.rl.bench_learner MODEL SIZE ours|plain THREADS FOLDER

Figures go to FOLDER as ours.json or plain.json, gradients beside them.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from palestra.rl import lora, plain_path
from palestra.rl.action_tokens import ActionTokens
from palestra.rl.batch import Batch, PackedRow, pack
from palestra.rl.bench_batches import PEERS, Work, work_of
from palestra.rl.fused_layers import unfuse
from palestra.rl.head import Head
from palestra.rl.learner import Learner, LearnerSettings
from palestra.rl.logprobs import distinct_actions, score_row
from palestra.rl.model import load_model
from palestra.rl.objective import loss_terms
from palestra.rl.optimizer import OptimizerSettings
from palestra.rl.tree import plant
from palestra.rollout.adapters import Adapter

TOKENS_PER_ROW, PEER_TOKENS_PER_ROW = 4096, 1536
PLAIN_BYTES_PER_TOKEN = 5_000_000
"""What the plain path was seen to need: 17 GB for 3,596 tokens at a time. It takes fewer where less memory is free."""
LORA = lora.LoraSettings(rank=16, alpha=32.0)
OPTIMIZER = OptimizerSettings(learning_rate=1e-5)


@dataclass(frozen=True, slots=True)
class Spent:
    """Seconds by the wall and of this process's CPU time; the second knows less of the neighbours."""

    wall: float
    cpu: float

    @classmethod
    def by(cls, work: Callable[[], object]) -> Spent:
        wall, cpu = time.perf_counter(), time.process_time()
        work()
        return cls(time.perf_counter() - wall, time.process_time() - cpu)


def measure_plain(model: PreTrainedModel, work: Work) -> tuple[dict[str, object], dict[str, torch.Tensor]]:
    """One step, after a little one that warms up."""
    torch.manual_seed(0)
    lora.attach(model.eval(), LORA)
    unfuse(model)
    stir(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.0)
    model(input_ids=torch.arange(64)[None], use_cache=False).logits.logsumexp(-1).sum().backward()
    (row,) = pack(work.groups, work.credits, 10**9, work.objective, share_prefixes=False).rows
    fits = free_bytes() // PLAIN_BYTES_PER_TOKEN
    micro_batches = list(plain_path.padded(row, int(min(TOKENS_PER_ROW, fits))))
    forget_peak()
    spent = Spent.by(lambda: plain_path.step(model, optimizer, micro_batches, work.objective))
    figures: dict[str, object] = {
        "plain_step_s": spent.wall,
        "plain_step_cpu_s": spent.cpu,
        "plain_action_tokens_per_s": len(row.actions) / spent.wall,
        "plain_row_tokens": sum(rows.ids.numel() for rows in micro_batches),
        "plain_samples_at_a_time": len(micro_batches[0].ids),
        "plain_peak_mb": peak_mb(),
    }
    return figures, gradients_of(model)


def measure_ours(model: PreTrainedModel, work: Work, size: str) -> tuple[dict[str, object], dict[str, torch.Tensor]]:
    """A step after one that warms up, the matrix rate around it, and the same step without each saving."""
    learner = Learner(model, LearnerSettings(lora=LORA, optimizer=OPTIMIZER), seed=0)
    tokens_per_row = PEER_TOKENS_PER_ROW if size in PEERS else TOKENS_PER_ROW
    batch = pack(work.groups, work.credits, tokens_per_row, work.objective)
    forget_peak()
    gradients: dict[str, torch.Tensor] = {}
    norms = []
    if size in PEERS:
        norms.append(learner.update(batch, work).grad_norm)
    else:
        stir(model)
        gradients = accumulated(model, batch, work)
    before = matrix_rate(learner.adapter())
    spent = Spent.by(lambda: norms.append(learner.update(batch, work).grad_norm))
    peak = peak_mb()
    rate = [(a + b) / 2 for a, b in zip(before, matrix_rate(learner.adapter()), strict=True)]
    flops = needed_flops(model, learner.adapter(), batch)
    tokens = sum(len(sample) for g in work.groups for t in g.trajectories for sample in t.samples)
    figures: dict[str, object] = {
        "step_s": spent.wall,
        "step_cpu_s": spent.cpu,
        "floor_s": flops / rate[0],
        "floor_fraction": flops / rate[0] / spent.wall,
        "floor_fraction_cpu": flops / rate[1] / spent.cpu,
        "matrix_gflop_per_s": rate[0] / 1e9,
        "needed_gflop": flops / 1e9,
        "action_tokens": batch.num_actions,
        "action_tokens_per_s": batch.num_actions / spent.wall,
        "row_tokens": batch.num_tokens,
        "row_tokens_per_s": batch.num_tokens / spent.wall,
        "tokens": tokens,
        "tokens_per_cpu_s": tokens / spent.cpu,
        "grad_norms": norms,
        "peak_mb": peak,
    }
    if size not in PEERS:
        figures["times_without"] = savings(learner, model, work)
    return figures, gradients


def savings(learner: Learner, model: PreTrainedModel, whole: Work) -> dict[str, float]:
    """How many times the CPU seconds the step would take without each saving, the others kept: of a quarter of it.

    Packing is measured among rows that share nothing.
    """
    work = a_quarter(whole)
    batch, plainly = (
        pack(work.groups, work.credits, TOKENS_PER_ROW, work.objective, share_prefixes=s) for s in (True, False)
    )
    longest = max(int(np.diff(row.boundaries).max()) for row in plainly.rows)
    everywhere = replace(batch, rows=tuple(map(scored_everywhere, batch.rows)))
    wide = replace(plainly, rows=tuple(padded_out(row, longest) for row in plainly.rows))

    def step(of: Batch) -> float:
        return Spent.by(lambda: learner.update(of, work)).cpu

    with_all, alone = step(batch), step(plainly)
    found = {
        "prefix_sharing": alone / with_all,
        "packing": step(wide) / alone,
        "action_row_head": step(everywhere) / with_all,
        "no_old_policy_pass": 1 + Spent.by(lambda: learner.sampled_logprobs(batch)).cpu / with_all,
    }
    unfuse(model)
    return found | {"fused_layers": step(batch) / with_all}


def a_quarter(whole: Work) -> Work:
    """Every other trajectory of half the groups: five more steps of all would take longer than everything else."""
    half = max(1, len(whole.groups) // 2)
    groups = tuple(replace(g, trajectories=g.trajectories[::2]) for g in whole.groups[:half])
    credits = tuple(replace(c, advantages=c.advantages[::2]) for c in whole.credits[:half])
    return Work(groups, credits, whole.objective)


def scored_everywhere(row: PackedRow) -> PackedRow:
    """With one more entry, of weight 0, for every place that predicts no action token."""
    others = np.setdiff1d(np.arange(len(row)), row.predictors)
    nothing = {"advantages", "weights", "value_weights"}
    actions = {}
    for name in row.actions.__slots__:
        values = getattr(row.actions, name)
        more = np.zeros(len(others), values.dtype) if name in nothing else np.resize(values, len(others))
        actions[name] = np.concatenate([values, more])
    return replace(row, predictors=np.concatenate([row.predictors, others]), actions=type(row.actions)(**actions))


def padded_out(row: PackedRow, width: int) -> PackedRow:
    """Each sample of a row that shares nothing made `width` tokens long."""
    samples = list(zip(row.boundaries, row.boundaries[1:], strict=False))
    ids = [np.pad(row.ids[start:end], (0, width - (end - start))) for start, end in samples]
    owner = np.searchsorted(row.boundaries, row.predictors, side="right") - 1
    wide = plant(ids, shortest=None)
    return replace(
        row,
        ids=wide.ids,
        positions=wide.positions,
        boundaries=wide.boundaries,
        parents=wide.parents,
        predictors=np.array(
            [wide.places[i][p - row.boundaries[i]] for i, p in zip(owner, row.predictors, strict=True)]
        ),
    )


def accumulated(model: PreTrainedModel, batch: Batch, work: Work) -> dict[str, torch.Tensor]:
    """The gradients of a batch, which are then forgotten."""
    for row in batch.rows:
        logprobs = score_row(model, Head.of(model), row).logprobs
        tokens = ActionTokens.of(row.actions, logprobs.device, logprobs.dtype)
        loss_terms(work.objective, logprobs, tokens).loss.backward()
    found = gradients_of(model)
    model.zero_grad(set_to_none=True)
    return found


def gradients_of(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@torch.no_grad()
def stir(model: PreTrainedModel) -> None:
    """Give the fresh adapter's B numbers, the same in both paths: at 0, the gradient of A would be 0."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.copy_(0.02 * torch.randn(parameter.shape, generator=generator))


def needed_flops(model: PreTrainedModel, adapter: Adapter, batch: Batch) -> float:
    """Of the batch's own tokens, forward and backward: frozen layers cost 2 a weight each way, adapters 6 in all, the
    head twice 2 for each distinct action token, attention 12 a pair of query and key."""
    config = model.config.get_text_config()
    shapes = [(f.b.shape[0], f.a.shape[1], f.a.shape[0]) for f in adapter.factors.values()]
    per_token = sum(4 * outputs * inputs + 6 * rank * (outputs + inputs) for outputs, inputs, rank in shapes)
    width = next(f.b.shape[0] for name, f in adapter.factors.items() if name.endswith("q_proj"))
    pairs = sum(int((row.positions + 1).sum()) for row in batch.rows)
    scored = sum(len(distinct_actions(row)[0]) for row in batch.rows)
    head = 8 * config.hidden_size * config.vocab_size / 2 * scored
    return float(per_token * batch.num_tokens + 12 * width * config.num_hidden_layers * pairs + head)


def matrix_rate(adapter: Adapter) -> tuple[float, float]:
    """FLOP/s of 1024 rows through the largest adapted layer, by the wall and by CPU time: the median of some."""
    factors = max(adapter.factors.values(), key=lambda f: f.b.shape[0] * f.a.shape[1])
    x, weight = torch.randn(1024, factors.a.shape[1]), torch.randn(factors.b.shape[0], factors.a.shape[1])
    out = torch.empty(1024, len(weight))
    spent = [Spent.by(lambda: torch.mm(x, weight.T, out=out)) for _ in range(30)]
    flops = 2 * 1024 * weight.numel()
    return flops / median(s.wall for s in spent), flops / median(s.cpu for s in spent)


def free_bytes() -> float:
    """Memory that can be had without swapping, where the kernel says so."""
    memory = Path("/proc/meminfo")
    if not memory.exists():
        return float("inf")
    line = next(line for line in memory.read_text().splitlines() if line.startswith("MemAvailable"))
    return 1024.0 * int(line.split()[1])


def forget_peak() -> None:
    """Start the kernel's count of this process's peak memory anew, where it has one."""
    if Path("/proc/self/clear_refs").exists():
        Path("/proc/self/clear_refs").write_text("5")


def peak_mb() -> float:
    """Most resident memory since `forget_peak`, the model included."""
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024 / 1e6
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def main(model: str, size: str, path: str, threads: int, folder: Path) -> None:
    """Measure one path."""
    torch.set_num_threads(threads)
    loaded, work = load_model(model).model, work_of(size)
    figures, gradients = measure_plain(loaded, work) if path == "plain" else measure_ours(loaded, work, size)
    save_file(gradients, folder / f"{path}.safetensors")
    (folder / f"{path}.json").write_text(json.dumps(figures), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), Path(sys.argv[5]))
