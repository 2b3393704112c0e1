"""The step as most trainers make it, to measure ours against: padded rows, whole logits, a pass for the old policy.

Samples are padded to the longest of the batch and go a few at a time; the base is frozen and the adapter is peft's own.
The loss is the same, so the gradient is, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from palestra.rl.action_tokens import ActionTokens
from palestra.rl.batch import PackedRow
from palestra.rl.members import Actions
from palestra.rl.objective import Objective, loss_terms


@dataclass(frozen=True, slots=True)
class PaddedRows:
    """Some samples of one length: ids, mask [samples, length]; where their action tokens are predicted, and those."""

    ids: Tensor
    mask: Tensor
    owner: Tensor  # [N] int64
    predictors: Tensor  # [N] int64
    actions: Actions


def padded(row: PackedRow, tokens: int) -> Iterator[PaddedRows]:
    """The samples of a row that shares nothing, padded: as many at a time as fit into `tokens`, at least one."""
    if (row.parents >= 0).any():
        raise ValueError("the row shares prefixes; pack it with share_prefixes=False to pad its samples")
    starts, ends = row.boundaries[:-1].astype(np.int64), row.boundaries[1:].astype(np.int64)
    owner = np.searchsorted(row.boundaries, row.predictors, side="right") - 1
    longest = int((ends - starts).max())
    at_a_time = max(1, tokens // longest)
    for first in range(0, len(starts), at_a_time):
        chosen = range(first, min(first + at_a_time, len(starts)))
        ids = torch.zeros((len(chosen), longest), dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for i, sample in enumerate(chosen):
            ids[i, : ends[sample] - starts[sample]] = torch.from_numpy(row.ids[starts[sample] : ends[sample]])
            mask[i, : ends[sample] - starts[sample]] = 1
        mine = np.flatnonzero((owner >= chosen.start) & (owner < chosen.stop))
        yield PaddedRows(
            ids=ids,
            mask=mask,
            owner=torch.from_numpy(owner[mine] - first),
            predictors=torch.from_numpy(row.predictors[mine] - starts[owner[mine]]),
            actions=Actions(*(getattr(row.actions, f.name)[mine] for f in fields(Actions))),
        )


def step(
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    micro_batches: Sequence[PaddedRows],
    objective: Objective,
) -> float:
    """One optimiser step on all samples. Returns the loss; gradients stay."""
    optimizer.zero_grad(set_to_none=True)
    with torch.no_grad():
        old = [_logprobs(model, rows) for rows in micro_batches]
    total = 0.0
    for rows, before in zip(micro_batches, old, strict=True):
        tokens = ActionTokens.of(rows.actions, model.device, torch.float32)
        loss = loss_terms(objective, _logprobs(model, rows), tokens, old=before).loss
        loss.backward()
        total += float(loss.detach())
    torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 1e9)
    optimizer.step()
    return total


def _logprobs(model: PreTrainedModel, rows: PaddedRows) -> Tensor:
    """[N], from the log-softmax of every place of every row."""
    logits = model(input_ids=rows.ids, attention_mask=rows.mask, use_cache=False).logits
    temperature = torch.from_numpy(rows.actions.temperature)
    if bool((temperature != 1).any()):
        everywhere = torch.ones(rows.ids.shape)
        everywhere[rows.owner, rows.predictors] = temperature
        logits = logits / everywhere[..., None]
    log_softmax = torch.log_softmax(logits.float(), -1)
    return log_softmax[rows.owner, rows.predictors, torch.from_numpy(rows.actions.targets)]
