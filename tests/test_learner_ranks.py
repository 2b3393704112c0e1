"""Several processes share a step: the same loss, gradients and weights as one, whole or in parts, busy or idle."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor

from learning_support import group, random_groups, random_sample, sample, tiny_gpt2, tiny_llama, trajectory
from palestra.envs.errors import IntegrityError
from palestra.rl.algorithms.rloo import RLOO
from palestra.rl.batch import Batch, pack
from palestra.rl.learner import Learner, LearnerSettings
from palestra.rl.learner_state import LearnerState
from palestra.rl.lora import LoraSettings
from palestra.rl.objective import Objective
from palestra.rl.optimizer import OptimizerSettings
from palestra.rl.ranks import Ranks
from palestra.rl.spread import check_sharded
from palestra.rollout.types import Group, Sample
from ranks_support import together

FAST = OptimizerSettings(learning_rate=1e-2, max_grad_norm=0.1)
SETTINGS = LearnerSettings(lora=LoraSettings(rank=2, alpha=4.0), optimizer=FAST)
PLAIN = RLOO(Objective(kl_coefficient=0.0))
ANCHORED = RLOO(Objective(kl_coefficient=0.1, entropy_coefficient=0.01))


@dataclass(frozen=True)
class Case:
    """One way of training, and the batches: "busy" gives each rank rows of unequal lengths, "idle" a single row."""

    layout: str = "busy"
    settings: LearnerSettings = SETTINGS
    tie: bool = True
    gpt2: bool = False
    dtype: torch.dtype = torch.float64
    algorithm: RLOO = PLAIN
    from_adapter: bool = False

    def learner(self, ranks: Ranks, seed: int = 0) -> Learner:
        model = tiny_gpt2(dtype=self.dtype) if self.gpt2 else tiny_llama(tie=self.tie, dtype=self.dtype)
        start = None
        if self.from_adapter:
            other = Learner(tiny_llama(tie=self.tie, dtype=self.dtype), self.settings, seed=7)
            other.update(self.batch(9, 1), PLAIN)
            start = other.adapter()
        return Learner(model, self.settings, seed=seed, start=start, ranks=ranks)

    def batch(self, seed: int, ranks: int) -> Batch:
        groups = groups_of(self.layout, seed)
        credits = [self.algorithm.advantages(g) for g in groups]
        return pack(groups, credits, 120 if self.layout == "one prompt" else 60, self.algorithm.objective, ranks=ranks)


def groups_of(layout: str, seed: int) -> list[Group]:
    rng = np.random.default_rng(seed)
    if layout == "busy":
        return random_groups(rng, groups=3)
    if layout == "one prompt":
        prompt = rng.integers(0, 50, 40).tolist()
        return [group("g", [trajectory(f"t{i}", [begun(rng, prompt, 4 + i)], float(i == 0)) for i in range(4)])]
    silent = sample([1, 2, 3], [0, 0, 0])
    return [group("g", [trajectory("a", [random_sample(rng, 50, 20)], 1.0), trajectory("b", [silent], 0.0)])]


def begun(rng: np.random.Generator, prompt: list[int], num: int) -> Sample:
    ids = [*prompt, *rng.integers(0, 50, num).tolist()]
    return sample(ids, [0] * len(prompt) + [1] * num)


def three_steps(ranks: Ranks, case: Case) -> dict[str, Any]:
    """Loss, norm and metrics of three updates, and what the learner is afterwards."""
    learner = case.learner(ranks)
    found: dict[str, Any] = {}
    for seed in range(3):
        stats = learner.update(case.batch(seed, ranks.size), case.algorithm)
        found[f"step {seed}"] = {"loss": stats.loss, "grad_norm": stats.grad_norm, **stats.metrics}
    probe = case.batch(5, ranks.size)
    by_token = learner.sampled_logprobs(probe)
    found["sampled_logprobs"] = by_token[np.lexsort((by_token, probe.actions().targets))]  # rows are in another order
    found["score"] = learner.score([4, 5, 6, 7])
    if learner.settings.train == "lora":
        factors = learner.adapter().factors
        found["adapter"] = {f"{name}.{part}": getattr(f, part) for name, f in factors.items() for part in "ab"}
    found["state"] = learner.state()
    return found


def assert_same(alone: dict[str, Any], other: dict[str, Any], tolerance: float) -> None:
    def close(found: object, wanted: object, what: str) -> None:
        if isinstance(wanted, dict):
            assert isinstance(found, dict)
            assert found.keys() == wanted.keys(), what
            for key in wanted:
                close(found[key], wanted[key], f"{what}: {key}")
        else:
            found, wanted = torch.as_tensor(found), torch.as_tensor(wanted)
            narrow = max(tolerance, 1e-6) if wanted.dtype == torch.float32 else tolerance
            torch.testing.assert_close(found, wanted, rtol=narrow, atol=narrow, msg=lambda m: f"{what}: {m}")

    for key in alone.keys() - {"state"}:
        close(other[key], alone[key], key)


CASES = {
    "lora": Case(),
    "one idle": Case(layout="idle"),
    "an untied head, a KL and an entropy bonus": Case(tie=False, algorithm=ANCHORED),
    "a KL to the adapter at the start, one idle": Case(layout="idle", algorithm=ANCHORED, from_adapter=True),
    "a prompt that is computed once for its group": Case(layout="one prompt"),
    "recomputed layers": Case(settings=replace(SETTINGS, gradient_checkpointing=True)),
    "all weights, tied": Case(settings=replace(SETTINGS, train="full")),
    "all weights, untied, recomputed, one idle": Case(
        layout="idle", tie=False, settings=replace(SETTINGS, train="full", gradient_checkpointing=True)
    ),
    "absolute positions": Case(gpt2=True),
    "float32": Case(dtype=torch.float32),
}


def all_cases(ranks: Ranks, cases: dict[str, Case]) -> dict[str, dict[str, Any]]:
    return {name: three_steps(ranks, case) for name, case in cases.items()}


@pytest.fixture(scope="module")
def alone() -> dict[str, dict[str, Any]]:
    return all_cases(Ranks(), CASES)


@pytest.mark.parametrize(("size", "sharding"), [(2, "replicate"), (2, "shard"), (4, "replicate"), (4, "shard")])
def test_ranks_take_the_same_steps_as_one(
    size: int, sharding: str, alone: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    names = list(CASES) if size == 2 else ["lora", "one idle", "all weights, untied, recomputed, one idle"]
    cases = {name: replace(CASES[name], settings=replace(CASES[name].settings, sharding=sharding)) for name in names}
    for rank, found in enumerate(together(size, all_cases, tmp_path / "ranks", cases)):
        for name in names:
            assert_same(alone[name], found[name], 1e-5 if name == "float32" else 1e-9)
            state: LearnerState = found[name]["state"]
            if rank:
                assert state.tensors == {}  # it took part, and rank 0 has it
                continue
            whole: LearnerState = alone[name]["state"]
            assert state.tensors.keys() == whole.tensors.keys()
            tolerance = 1e-4 if name == "float32" else 1e-9
            for key in (key for key in whole.tensors if key != "rng/torch"):
                torch.testing.assert_close(state.tensors[key], whole.tensors[key], rtol=tolerance, atol=tolerance)


def held_parts(ranks: Ranks) -> dict[str, tuple[tuple[int, ...], int]]:
    """Of every parameter, frozen or not: its shape, and how many of its numbers this rank holds."""
    learner = replace_sharding(Case()).learner(ranks)
    check_sharded(learner._model, ranks)
    return {
        name: (tuple(p.shape), p.to_local().numel() if isinstance(p, DTensor) else -1)
        for name, p in learner._model.named_parameters()
    }


def replace_sharding(case: Case, sharding: str = "shard") -> Case:
    return replace(case, settings=replace(case.settings, sharding=sharding))


def test_sharded_weights_lie_in_parts_on_the_ranks_frozen_ones_too(tmp_path: Path) -> None:
    found = together(4, held_parts, tmp_path / "ranks")
    names = found[0].keys()
    assert any("lora_A" in name for name in names)
    assert any("base_layer" in name for name in names)
    for name in names:
        shape, _ = found[0][name]
        held = [parts[name][1] for parts in found]
        rows = -(-shape[0] // 4)  # of a whole part; the last parts of a short tensor are smaller, or empty
        assert sum(held) == int(np.prod(shape)), name
        assert max(held) == rows * int(np.prod(shape[1:])), name


def test_whole_weights_are_refused_where_parts_were_asked_for() -> None:
    learner = Case().learner(Ranks())
    with pytest.raises(IntegrityError, match="is whole on rank 0, though weights are to be sharded"):
        check_sharded(learner._model, Ranks(0, 2))


def test_a_batch_dealt_for_another_number_of_ranks_is_refused_instead_of_waiting_for_ever() -> None:
    with pytest.raises(ValueError, match="3 rows for 2 ranks; pack the batch with ranks=2"):
        Ranks(0, 2).share([1, 2, 3])


def go_on(ranks: Ranks, case: Case, state: LearnerState, seed: int) -> LearnerState:
    learner = case.learner(ranks, seed=99)
    learner.load_state(state)
    learner.update(case.batch(seed, ranks.size), case.algorithm)
    return learner.state()


@pytest.mark.parametrize("name", ["lora", "all weights, tied"])
def test_a_state_goes_on_on_any_number_of_ranks(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    learner = case.learner(Ranks())
    for seed in range(4):
        if seed == 1:
            state = learner.state()
        learner.update(case.batch(seed, 1), case.algorithm)
    sharded = replace_sharding(case)
    state = together(4, go_on, tmp_path / "four", sharded, state, 1)[0]
    state = together(2, go_on, tmp_path / "two", case, state, 2)[0]
    state = go_on(Ranks(), sharded, state, 3)
    whole = learner.state()
    assert state.step == whole.step == 4
    assert state.tensors.keys() == whole.tensors.keys()
    for key in (key for key in whole.tensors if key != "rng/torch"):
        torch.testing.assert_close(state.tensors[key], whole.tensors[key], rtol=1e-9, atol=1e-9, msg=key)


def test_a_batch_that_serves_several_steps_is_compared_with_the_policy_that_froze_it(tmp_path: Path) -> None:
    alone = reused(Ranks(), CASES["lora"])
    for found in together(2, reused, tmp_path / "ranks", replace_sharding(CASES["lora"])):
        assert found == pytest.approx(alone, rel=1e-6)


def reused(ranks: Ranks, case: Case) -> dict[str, float]:
    learner, batch = case.learner(ranks), case.batch(0, ranks.size)
    old = learner.sampled_logprobs(batch)
    found: dict[str, float] = {}
    for turn in range(3):
        stats = learner.update(batch, case.algorithm, old)
        found |= {f"{turn} {name}": value for name, value in stats.metrics.items()} | {f"{turn} loss": stats.loss}
    assert found["0 ratio_mean"] == pytest.approx(1.0, abs=1e-6)
    assert abs(found["2 ratio_mean"] - 1.0) > 1e-5
    return found
