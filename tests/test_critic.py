"""The value head: what it reads, what it learns from, and that it learns beside the policy without disturbing it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from learning_support import (
    POISONS,
    golden,
    group,
    poisoned,
    random_groups,
    sample,
    tiny_gpt2,
    tiny_llama,
    trajectory,
)
from palestra.envs.errors import ConfigError
from palestra.rl.algorithms.base import Credit, Measured
from palestra.rl.algorithms.make import make_algorithm
from palestra.rl.algorithms.ppo import PPO
from palestra.rl.algorithms.rloo import RLOO
from palestra.rl.algorithms.turn_gae import TurnGAE
from palestra.rl.batch import Batch, pack
from palestra.rl.checkpoints import Checkpoints
from palestra.rl.critic import Critic, CriticSettings, critic_of
from palestra.rl.learner import Learner, LearnerSettings
from palestra.rl.members import Actions, join_actions
from palestra.rl.objective import Objective
from palestra.rl.optimizer import OptimizerSettings
from palestra.rl.ranks import Ranks
from palestra.rl.settings_algorithm import AlgorithmSettings
from palestra.rl.values import measure_values
from palestra.rollout.types import Group
from ranks_support import together
from test_optimum import updates_to_optimum
from turn_support import played

FAST = OptimizerSettings(learning_rate=1e-2)
CRITIC = CriticSettings(learning_rate=1e-2)


def learner(
    critic: CriticSettings | None = CRITIC, *, train: str = "full", seed: int = 0, **options: object
) -> Learner:
    model = options.pop("model", None) or tiny_llama(seed=seed)
    settings = LearnerSettings(train=train, optimizer=FAST, critic=critic)  # type: ignore[arg-type]
    return Learner(model, settings, **options)  # type: ignore[arg-type]


def taught(made: Learner) -> Learner:
    """With a head that says something."""
    rng = np.random.default_rng(5)
    state = made.state()
    weight = torch.from_numpy(rng.normal(size=(1, 32)) * 0.3)
    head = {"critic/weight/weight": weight, "critic/weight/bias": torch.tensor([0.1], dtype=torch.float64)}
    made.load_state(replace(state, tensors={**state.tensors, **head}))
    return made


def by_hand(made: Learner, model: PreTrainedModel, ids: np.ndarray) -> np.ndarray:
    """[L] V of the state after each token of a row, from the model's own forward pass."""
    tensors = made.state().tensors
    with torch.no_grad():
        body = getattr(model, model.base_model_prefix)
        layout_free = body(input_ids=torch.from_numpy(ids.astype(np.int64))[None], use_cache=False)
        hidden = layout_free.last_hidden_state[0]
        return (hidden @ tensors["critic/weight/weight"][0] + tensors["critic/weight/bias"]).numpy()


def credited(made: Learner, algorithm: PPO | TurnGAE, groups: list[Group], tokens: int = 64) -> Batch:
    values, last_values = measure_values(made, groups, tokens)
    credits = algorithm.credit(groups, Measured(values=values, last_values=last_values))
    return pack(groups, credits, tokens, algorithm.objective)


@pytest.mark.parametrize("make", [tiny_llama, tiny_gpt2])
@pytest.mark.parametrize("tokens", [8, 64, 4096])
def test_values_are_of_the_states_before_the_sampled_tokens_and_after_the_last(make: object, tokens: int) -> None:
    reference: PreTrainedModel = make().eval()  # type: ignore[operator]
    made = taught(learner(model=make()))  # type: ignore[operator]
    groups = random_groups(np.random.default_rng(1), groups=2)
    lost = replace(groups[0].trajectories[1], verdict=trajectory("x", [], None).verdict)
    groups[0] = group("g0", [groups[0].trajectories[0], lost, *groups[0].trajectories[2:]])
    values, last_values = measure_values(made, groups, tokens)
    assert (values[0][1], last_values[0][1]) == (None, None)
    for of_group, lasts, mine in zip(groups, last_values, values, strict=True):
        for one, last, stream in zip(of_group.trajectories, lasts, mine, strict=True):
            if stream is None:
                continue
            rows = [by_hand(made, reference, row.ids) for row in one.samples]
            before = [row[np.flatnonzero(s.sampled) - 1] for row, s in zip(rows, one.samples, strict=True)]
            np.testing.assert_allclose(stream, np.concatenate(before), atol=2e-6)  # the head is in float32
            assert last == pytest.approx(rows[-1][-1], abs=2e-6), "what was observed at the end is read"


@pytest.mark.parametrize("make", [tiny_llama, tiny_gpt2])
def test_what_lies_beyond_the_context_is_not_looked_at(make: object) -> None:
    """An episode that filled its context has observed more than fits; a model with fixed positions cannot read it."""
    model: PreTrainedModel = make().eval()  # type: ignore[operator]
    most = model.config.max_position_embeddings
    made = taught(learner(model=make()))  # type: ignore[operator]
    row = sample([5 + n % 40 for n in range(most + 30)], [0] * (most - 4) + [1, 1] + [0] * 32)
    opening = sample([5] * (most + 30), [0] * (most + 30))  # a prompt that alone fills it: nothing was sampled
    groups = [group("g", [trajectory("a", [row], 1.0), trajectory("b", [opening], 0.0)])]
    values, lasts = measure_values(made, groups, 4096, longest=most)
    seen = by_hand(made, model, row.ids[:most])
    np.testing.assert_allclose(values[0][0], seen[[most - 5, most - 4]], atol=2e-6)  # type: ignore[arg-type]
    assert lasts[0][0] == pytest.approx(seen[-1], abs=2e-6)
    assert values[0][1] is not None
    assert len(values[0][1]) == 0


def test_values_know_no_temperature() -> None:
    made = taught(learner())
    rows = [[sample([5, 6, 7, 8], [0, 1, 0, 1], temperature=t)] for t in (0.5, 1.0, 2.0)]
    groups = [group("g", [trajectory(f"t{i}", row, 0.0) for i, row in enumerate(rows)])]
    values, _ = measure_values(made, groups, 64)
    for stream in values[0]:
        np.testing.assert_array_equal(stream, values[0][0])  # type: ignore[arg-type]


def actions(returns: list[float], old: list[float], weights: list[float]) -> Actions:
    nobody, number = np.zeros(len(returns), np.int32), np.zeros(len(returns))
    return Actions(
        targets=nobody.astype(np.int64),
        sampling_logprobs=number.astype(np.float32),
        temperature=number.astype(np.float32),
        version=nobody,
        turn=nobody,
        sample=nobody,
        trajectory=nobody,
        group=nobody,
        advantages=number,
        weights=number,
        returns=np.array(returns),
        old_values=np.array(old),
        value_weights=np.array(weights),
    )


@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("trunk_gradient", [True, False])
def test_the_published_value_loss_comes_out_of_the_head_and_unasked_tokens_do_nothing(
    poison: float, trunk_gradient: bool
) -> None:
    case = golden("gae")["gae/value_loss_clipped"]
    inputs, mask = case["inputs"], np.array(case["inputs"]["mask"], bool)
    settings = CriticSettings(coefficient=0.7, clip=0.2, trunk_gradient=trunk_gradient)
    critic = Critic(settings, 1, FAST, device=torch.device("cpu"), dtype=torch.float64)
    one = {"critic/weight/weight": torch.ones(1, 1, dtype=torch.float64), "critic/weight/bias": torch.zeros(1)}
    critic.load(one)
    new = torch.tensor(poisoned(inputs["values_new"], poison)).requires_grad_()
    returns, old = (poisoned(inputs[key], float("nan")).ravel().tolist() for key in ("returns", "values_old"))
    weights = np.where(mask, 1 / 13, poison).ravel().tolist()
    terms = critic.terms(new.reshape(-1, 1), actions(returns, old, weights))
    assert terms.loss.item() == pytest.approx(0.7 * case["expected"]["loss"], abs=1e-9)
    assert terms.sums["critic_tokens"] == 13
    assert terms.sums["critic_clipped"] / 13 == pytest.approx(case["expected"]["clip_frac"])
    terms.loss.backward()
    if trunk_gradient:
        wanted = 0.7 * torch.tensor(case["expected"]["grad_values_new"], dtype=torch.float64)
        torch.testing.assert_close(new.grad, wanted, rtol=1e-9, atol=1e-9)
    else:
        assert new.grad is None
    nothing = critic.terms(None, join_actions([]))
    assert nothing.loss.item() == 0.0
    assert nothing.sums.keys() == terms.sums.keys()


@pytest.mark.parametrize("make", [PPO, TurnGAE])
def test_value_weights_are_counted_over_the_tokens_that_are_asked(make: type[PPO] | type[TurnGAE]) -> None:
    groups = [group("g", [played("a", [3, 2], 1.0), played("b", [1, 4], 0.0)])]
    found = credited(learner(), make(), groups).actions()
    asked = np.isfinite(found.returns)
    assert asked.sum() == (10 if make is PPO else 4)
    np.testing.assert_allclose(found.value_weights[asked], 1 / asked.sum())
    assert (found.value_weights[~asked] == 0.0).all()
    np.testing.assert_allclose(found.weights, 1 / 10)


def stats_of(made: Learner, batch: Batch, algorithm: PPO) -> dict[str, float]:
    stats = made.update(batch, algorithm)
    return {"loss": stats.loss, "grad_norm": stats.grad_norm, **stats.metrics}


@pytest.mark.parametrize("trunk_gradient", [True, False])
def test_an_update_is_the_same_under_any_micro_batching(trunk_gradient: bool) -> None:
    groups = random_groups(np.random.default_rng(2), groups=3)
    algorithm = PPO(value_trunk_gradient=trunk_gradient, value_learning_rate=1e-2)
    results = []
    for tokens in (16, 48, 4096):
        made = taught(learner(algorithm.critic))
        stats = [stats_of(made, credited(made, algorithm, groups, tokens), algorithm) for _ in range(2)]
        results.append((stats, made.state().tensors))
    first_stats, first = results[0]
    for stats, tensors in results[1:]:
        for mine, theirs in zip(stats, first_stats, strict=True):
            assert mine == pytest.approx(theirs, rel=1e-5, abs=1e-6)
        for key in (key for key in first if key.startswith(("critic/weight/", "weight/"))):
            torch.testing.assert_close(tensors[key], first[key], rtol=1e-4, atol=1e-6)


def test_without_a_trunk_gradient_the_critic_leaves_the_policys_step_alone() -> None:
    groups = random_groups(np.random.default_rng(3))
    algorithm = RLOO(Objective())
    plain = learner(None)
    batch = pack(groups, [algorithm.advantages(g) for g in groups], 64, algorithm.objective)
    alone = plain.update(batch, algorithm)
    sizes = [[np.full(t.sampled_tokens, 50.0) for t in g.trajectories] for g in groups]
    credits = [
        replace(algorithm.advantages(g), returns=tuple(s), values=tuple(s)) for g, s in zip(groups, sizes, strict=True)
    ]
    asked = pack(groups, credits, 64, algorithm.objective)
    beside, through = learner(), learner(replace(CRITIC, trunk_gradient=True))
    stats = beside.update(asked, algorithm)
    assert stats.grad_norm == pytest.approx(alone.grad_norm, rel=1e-12)
    assert stats.metrics["value_grad_norm"] > FAST.max_grad_norm, "clipped by itself, or the policy would stand still"
    taught(through).update(asked, algorithm)
    for name, tensor in plain.state().tensors.items():
        if name.startswith("weight/"):
            torch.testing.assert_close(beside.state().tensors[name], tensor, rtol=1e-12, atol=1e-12)
    differ = [
        name
        for name, tensor in plain.state().tensors.items()
        if name.startswith("weight/") and not torch.allclose(through.state().tensors[name], tensor, rtol=1e-6)
    ]
    assert differ, "with a trunk gradient the body learns for the values as well"


def test_a_batch_without_returns_leaves_the_head_as_it_is() -> None:
    groups, made = random_groups(np.random.default_rng(3)), taught(learner())
    before = made.state().tensors["critic/weight/weight"].clone()
    batch = pack(groups, [RLOO().advantages(g) for g in groups], 64, Objective())
    stats = made.update(batch, RLOO())
    assert not any(name.startswith(("value_", "critic_")) for name in stats.metrics)
    assert torch.equal(made.state().tensors["critic/weight/weight"], before)


def test_groups_of_equal_advantages_still_teach_the_critic() -> None:
    groups = [group("g", [trajectory("t", [sample([5, 6], [0, 1])], 0.7)])]
    made = learner()
    batch = credited(made, PPO(), groups)
    assert batch.num_actions == 1
    assert made.update(batch, PPO()).metrics["value_error"] == pytest.approx(0.7)
    nothing, something = np.zeros(1), np.ones(1)
    assert not Credit((nothing,)).signal
    assert not Credit((nothing,), returns=(something,), values=(something,)).signal
    assert not Credit((nothing,), returns=(np.array([np.nan]),), values=(something,)).signal
    assert Credit((nothing,), returns=(nothing,), values=(something,)).signal
    assert Credit((nothing,), returns=(something,)).signal


@pytest.mark.parametrize("train", ["full", "lora"])
def test_the_head_goes_on_from_a_checkpoint_as_if_nothing_had_been(train: str, tmp_path: Path) -> None:
    groups, algorithm = random_groups(np.random.default_rng(4)), PPO(value_learning_rate=1e-2)
    made, resumed = learner(algorithm.critic, train=train), learner(algorithm.critic, train=train)
    made.update(credited(made, algorithm, groups), algorithm)
    checkpoints = Checkpoints(tmp_path, base="b")
    resumed.load_state(checkpoints.load(checkpoints.save(made.state(), {}))[0])
    for _ in range(2):
        ours, theirs = (one.update(credited(one, algorithm, groups), algorithm) for one in (made, resumed))
        assert (ours.loss, ours.metrics) == (theirs.loss, theirs.metrics)
    for key, tensor in made.state().tensors.items():
        assert torch.equal(tensor, resumed.state().tensors[key]), key
    plain = learner(None, train=train)
    plain.load_state(made.state())  # to evaluate, say: the head is not needed for that
    with pytest.raises(ConfigError, match="value head's weight of shape None"):
        made.load_state(plain.state())
    with pytest.raises(ConfigError, match="no critic"):
        measure_values(plain, groups, 64)


def ranked(ranks: Ranks, sharding: str) -> dict[str, Any]:
    algorithm = PPO(value_learning_rate=1e-2, value_trunk_gradient=True)
    settings = LearnerSettings(train="lora", optimizer=FAST, critic=algorithm.critic, sharding=sharding)  # type: ignore[arg-type]
    made = Learner(tiny_llama(), settings, ranks=ranks)
    groups = random_groups(np.random.default_rng(6), groups=2)
    found: dict[str, Any] = {}
    for step in range(2):
        values, lasts = measure_values(made, groups, 60, ranks=ranks.size)
        credits = algorithm.credit(groups, Measured(values=values, last_values=lasts))
        stats = made.update(pack(groups, credits, 60, algorithm.objective, ranks=ranks.size), algorithm)
        found[f"step {step}"] = {"loss": stats.loss, "grad_norm": stats.grad_norm, **stats.metrics}
    found["tensors"] = {k: t for k, t in made.state().tensors.items() if k.startswith(("critic/weight", "weight"))}
    return found


def both(ranks: Ranks) -> dict[str, dict[str, Any]]:
    return {sharding: ranked(ranks, sharding) for sharding in ("replicate", "shard")}


def test_two_ranks_train_the_same_critic_as_one(tmp_path: Path) -> None:
    alone = ranked(Ranks(), "replicate")
    for rank in together(2, both, tmp_path / "ranks"):
        for found in rank.values():
            for step in ("step 0", "step 1"):
                assert found[step] == pytest.approx(alone[step], rel=1e-5, abs=1e-6)
            for key, tensor in found["tensors"].items():
                torch.testing.assert_close(tensor, alone["tensors"][key], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("trunk_gradient", [True, False])
def test_the_value_loss_falls_on_a_tiny_transformer(trunk_gradient: bool) -> None:
    groups = random_groups(np.random.default_rng(7), groups=4)
    # the policy stays where it is, so what there is to know of each state stays the same
    algorithm = PPO(lam=1.0, value_learning_rate=6e-2, value_trunk_gradient=trunk_gradient, value_clip=0.0)
    rate = 1e-3 if trunk_gradient else 1e-12
    made = Learner(
        tiny_llama(dtype=torch.float32),
        LearnerSettings(train="full", optimizer=replace(FAST, learning_rate=rate), critic=algorithm.critic),
    )
    first = made.update(credited(made, algorithm, groups), algorithm).metrics
    for _ in range(30):
        last = made.update(credited(made, algorithm, groups), algorithm).metrics
    assert last["value_error"] < 0.7 * first["value_error"]
    assert last["explained_variance"] > 0.3


def test_ppo_learns_a_task_of_two_turns_through_the_learner() -> None:
    assert updates_to_optimum("ppo", seed=0) is not None


def test_only_algorithms_with_a_critic_ask_for_one() -> None:
    assert critic_of(RLOO()) is None
    settings = AlgorithmSettings(name="ppo", value_learning_rate=0.01, value_clip=0.0, value_trunk_gradient=True)
    assert critic_of(make_algorithm(settings, 10)) == CriticSettings(0.01, 0.5, None, True)
    for wrong in ({"learning_rate": 0.0}, {"coefficient": -1.0}, {"clip": 0.0}):
        with pytest.raises(ConfigError):
            CriticSettings(**wrong)
