"""One property: however a step's work is laid out, it has the same loss and the same gradient.

The reference is the plain way: every sample by itself, padded, with transformers' own attention and whole logits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from branching import branching_groups
from learning_support import exact_llama, group, random_groups, sample, tiny_gpt2, trajectory
from palestra.rl.action_tokens import ActionTokens
from palestra.rl.aggregation import Aggregation
from palestra.rl.algorithms.base import Credit
from palestra.rl.attention import use_packed_attention
from palestra.rl.batch import Batch, PackedRow, pack
from palestra.rl.checkpointing import checkpoint_layers
from palestra.rl.head import Head
from palestra.rl.logprobs import score_row
from palestra.rl.objective import Objective, loss_terms
from palestra.rl.surrogates import PPOClip
from palestra.rollout.types import Group, Sample, Trajectory

END = PAD = 1
BYPASS = Objective(PPOClip(), None, mode="bypass")
OBJECTIVES = (
    Objective(),
    BYPASS,
    replace(BYPASS, ratio="turn", aggregation=Aggregation("traj-mean-token-mean")),
    replace(BYPASS, ratio="sequence", aggregation=Aggregation("seq-mean-token-mean")),
    replace(BYPASS, aggregation=Aggregation("prompt-mean-token-mean")),
    replace(BYPASS, entropy_coefficient=0.1, aggregation=Aggregation("seq-mean-token-sum-norm", horizon=20)),
)


MAKERS = {"rotary": exact_llama, "absolute": lambda dtype: tiny_gpt2(dtype=dtype)}


@dataclass(frozen=True, slots=True)
class Result:
    loss: float
    gradients: dict[str, Tensor]


@cache
def model_of(kind: str, ours: bool, dtype: torch.dtype) -> PreTrainedModel:
    model = MAKERS[kind](dtype).eval()
    if ours:
        use_packed_attention(model)
    return model


def credit_of(made: Group, seed: int) -> Credit:
    """Its own for every trajectory and token, whatever the order of the group."""
    streams = []
    for t in made.trajectories:
        rng = np.random.default_rng([seed, *t.id.encode()])
        streams.append(rng.normal() + rng.normal(size=t.sampled_tokens))
    return Credit(tuple(streams))


def result_of(model: PreTrainedModel, batch: Batch, objective: Objective, plain_width: int | None = None) -> Result:
    """Summed over all rows of all ranks, in our way, or in the plain one with rows of `plain_width`."""
    model.zero_grad()
    total = 0.0
    for row in batch.rows:
        if not len(row.predictors):
            continue
        if plain_width is None:
            scored = score_row(model, Head.of(model), row, entropy_gradient=objective.entropy_coefficient > 0)
            logprobs, entropy = scored.logprobs, scored.entropy
        else:
            logprobs, entropy = plain_scores(model, row, plain_width)
        tokens = ActionTokens.of(row.actions, logprobs.device, logprobs.dtype)
        loss = loss_terms(objective, logprobs, tokens, entropy=entropy).loss
        loss.backward()
        total += float(loss.detach())
    return Result(total, {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None})


def plain_scores(model: PreTrainedModel, row: PackedRow, width: int) -> tuple[Tensor, Tensor]:
    """[N] log-probabilities and entropies from rows padded with the id that also ends turns."""
    assert set(row.parents.tolist()) == {-1}
    starts, ends = row.boundaries[:-1], row.boundaries[1:]
    longest = int((ends - starts).max())
    ids = torch.full((len(starts), longest + width), PAD)
    mask = torch.zeros_like(ids)
    for i, (start, end) in enumerate(zip(starts, ends, strict=True)):
        ids[i, : end - start] = torch.from_numpy(row.ids[start:end])
        mask[i, : end - start] = 1
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    owner = np.searchsorted(row.boundaries, row.predictors, side="right") - 1
    mine = logits[torch.from_numpy(owner), torch.from_numpy(row.predictors - starts[owner])]
    everything = torch.log_softmax(mine / torch.from_numpy(row.actions.temperature).to(mine)[:, None], -1)
    picked = everything[torch.arange(len(mine)), torch.from_numpy(row.actions.targets)]
    return picked, -(everything.exp() * everything).sum(-1)


def split(made: Trajectory, rng: np.random.Generator) -> Trajectory:
    """Its last sample as two: what was sampled up to some place, and the whole with only the later tokens sampled."""
    last = made.samples[-1]
    cut = int(rng.integers(1, len(last)))
    first, second = _kept(last, slice(0, cut), 0), _kept(last, slice(0, len(last)), cut)
    return trajectory(made.id, [*made.samples[:-1], first, second], made.reward)


def _kept(row: Sample, part: slice, sampled_from: int) -> Sample:
    mask = row.sampled & (np.arange(len(row)) >= sampled_from)
    return sample(
        row.ids[part].tolist(),
        mask[part].astype(int).tolist(),
        logprobs=row.logprobs[part].tolist(),
        temperature=float(np.nanmax(row.temperature)),
        turn=row.turn[part].tolist(),
    )


def shuffled(groups: list[Group], rng: np.random.Generator) -> list[Group]:
    """Groups, and the trajectories in them, in another order."""
    mixed = [group(g.id, [g.trajectories[i] for i in rng.permutation(len(g.trajectories))]) for g in groups]
    return [mixed[i] for i in rng.permutation(len(mixed))]


def close(found: Result, expected: Result, tolerance: float) -> None:
    assert found.loss == pytest.approx(expected.loss, rel=tolerance, abs=tolerance)
    assert found.gradients.keys() == expected.gradients.keys()
    largest = max(float(g.abs().max()) for g in expected.gradients.values())
    for name, grad in expected.gradients.items():
        gap = float((found.gradients[name] - grad).abs().max())
        assert gap <= tolerance * max(1.0, largest), name


@pytest.mark.parametrize("portion", range(10))
def test_loss_and_gradient_do_not_depend_on_how_the_work_is_laid_out(portion: int) -> None:
    """200 random ragged batches, each laid out at random in every way at once."""
    for seed in range(20 * portion, 20 * portion + 20):
        rng = np.random.default_rng(seed)
        objective, kind = OBJECTIVES[seed % len(OBJECTIVES)], ("rotary", "absolute")[seed // 6 % 2]
        made = (branching_groups if rng.random() < 0.6 else random_groups)(rng, groups=int(rng.integers(1, 4)))
        credits = [credit_of(g, seed) for g in made]
        plainly = pack(made, credits, 10**6, objective, share_prefixes=False)
        expected = result_of(model_of(kind, False, torch.float64), plainly, objective, int(rng.integers(0, 9)))

        other = shuffled(made, rng)
        if objective.aggregation.mode != "seq-mean-token-mean":  # which counts samples, as published
            other = [group(g.id, [split(t, rng) for t in g.trajectories]) for g in other]
        ranks = int(rng.integers(1, 4))
        tokens = int(rng.choice([1, 30, 70, 150, 1000]))
        again = [credit_of(g, seed) for g in other]
        batch = pack(other, again, tokens, objective, ranks=ranks, share_prefixes=bool(rng.random() < 0.7))
        assert len(batch.rows) % ranks == 0
        batch = replace(batch, rows=tuple(batch.rows[i] for i in rng.permutation(len(batch.rows))))
        close(result_of(model_of(kind, True, torch.float64), batch, objective), expected, 1e-9)
        if seed % 4 == 0:
            close(result_of(model_of(kind, True, torch.float32), batch, objective), expected, 1e-5)


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("recompute", [False, True])
def test_a_tree_has_the_values_and_gradients_of_its_branches(kind: str, recompute: bool) -> None:
    model = MAKERS[kind](torch.float64).eval()
    use_packed_attention(model)
    if recompute:
        checkpoint_layers(model)
    made = branching_groups(np.random.default_rng(5), per_group=5)
    credits = [credit_of(g, 0) for g in made]
    branches, tree = (pack(made, credits, 10**6, BYPASS, share_prefixes=share) for share in (False, True))
    assert tree.num_actions == branches.num_actions
    assert tree.num_tokens < 0.7 * branches.num_tokens
    close(result_of(model, tree, BYPASS), result_of(model, branches, BYPASS), 1e-10)


def test_a_shared_action_token_keeps_the_credit_and_the_ratio_of_each_branch() -> None:
    """Three trajectories sampled the same first turn; clipping is not linear in the advantage, so it is no sum."""
    rng = np.random.default_rng(0)
    trunk = rng.integers(0, 50, 20).tolist()
    rows = [
        sample(
            trunk + rng.integers(0, 50, 4).tolist(),
            [0] * 17 + [1] * 3 + [0, 1, 1, 0],
            logprobs=(-4.5 + rng.random(24)).tolist(),
        )
        for _ in range(3)
    ]
    made = group("g", [trajectory(f"t{i}", [row], 1.0) for i, row in enumerate(rows)])
    credit = Credit((np.full(5, 1.0), np.full(5, -2.0), np.full(5, 0.5)))
    tree, branches = (pack([made], [credit], 1000, BYPASS, share_prefixes=share) for share in (True, False))
    (row,) = tree.rows
    in_trunk = row.actions.targets[row.predictors < 20 - 1]
    assert len(row) == 20 + 3 * 2
    assert in_trunk.tolist() == trunk[17:] * 3
    assert len(set(row.actions.sampling_logprobs[row.predictors < 19].tolist())) == 9
    model = model_of("rotary", True, torch.float64)
    expected = result_of(model, branches, BYPASS)
    close(result_of(model, tree, BYPASS), expected, 1e-12)

    keep_first = ~((row.predictors < 19) & (row.actions.trajectory > 0))
    once = replace(
        row,
        predictors=row.predictors[keep_first],
        actions=type(row.actions)(*(getattr(row.actions, name)[keep_first] for name in row.actions.__slots__)),
    )
    wrong = result_of(model, replace(tree, rows=(once,)), BYPASS)
    assert abs(wrong.loss - expected.loss) > 1e-3
