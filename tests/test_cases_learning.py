"""Where every sampled token goes, what an evaluation counts, and what a publish proves."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer

from learning_support import group, random_groups, rewarded, sample, tiny_llama, trajectory
from palestra.envs.errors import ConfigError, IntegrityError
from palestra.envs.types import NoVerdict
from palestra.rl.accounting import consumed
from palestra.rl.algorithms.grpo import GRPO
from palestra.rl.algorithms.rloo import RLOO
from palestra.rl.batch import pack
from palestra.rl.counted import Counting
from palestra.rl.evaluation import no_verdicts, report
from palestra.rl.gap_watch import GapWatch
from palestra.rl.gather import Gathered, GatherSettings
from palestra.rl.learner import Learner, LearnerSettings
from palestra.rl.ledger import Ledger
from palestra.rl.lora import LoraSettings, read_peft_folder
from palestra.rl.objective import Objective
from palestra.rl.optimizer import OptimizerSettings
from palestra.rl.publish import Publisher
from palestra.rl.statistics import pass_at
from palestra.rl.step import Practice, learn
from palestra.rl.step_metrics import evaluation_metrics
from palestra.rl.summary import Summary
from palestra.rl.train import Loop, LoopSettings, Metrics
from palestra.rollout.adapters import Adapter, Factors
from palestra.rollout.types import Float32, Group, Receipt, TerminatedBy, Trajectory


def episodes(outcomes: Sequence[float | None]) -> list[Trajectory]:
    """One task each."""
    made = [trajectory(f"t{i}", [sample([1, 2, 3], [0, 1, 1])], value) for i, value in enumerate(outcomes)]
    return [replace(each, task_id=f"task{i}") for i, each in enumerate(made)]


def test_failed_episodes_are_in_the_headline_and_the_rate_without_them_stands_beside_it() -> None:
    found = report(episodes([1.0] * 4 + [0.0] * 2 + [None] * 4))
    assert found.success.mean == pytest.approx(0.4)
    assert found.success_valid is not None
    assert found.success_valid.mean == pytest.approx(2 / 3)
    assert (found.validity, found.invalid, found.episodes) == (0.6, 4, 10)
    metrics = evaluation_metrics(found)
    assert metrics["eval/success"] == pytest.approx(0.4)
    assert metrics["eval/success_valid"] == pytest.approx(2 / 3)
    assert metrics["eval/validity"] == 0.6
    told = Summary("e", "s", 0, success_after=found).as_dict()["success_after"]
    assert (told["mean"], told["valid_mean"], told["validity"]) == (found.success.mean, found.success_valid.mean, 0.6)


def test_an_evaluation_in_which_everything_failed_is_a_zero_and_not_a_crash() -> None:
    found = report(episodes([None, None]))
    assert (found.success.mean, found.success_valid, found.validity, found.reward_mean) == (0.0, None, 0.0, None)
    evaluation_metrics(found)


def test_pass_at_k_is_the_unbiased_one() -> None:
    found = pass_at({"t": [1.0, 1.0] + [0.0] * 6})
    assert {k: round(value, 4) for k, value in found.items()} == {1: 0.25, 2: 0.4643, 4: 0.7857, 8: 1.0}
    assert pass_at({"a": [1.0, 0.0], "b": [0.0]}) == {1: 0.25}
    assert pass_at({}) == {}


def test_versions_of_an_evaluation_are_those_of_all_its_episodes() -> None:
    valid, failed = episodes([1.0, None])
    old = failed.samples[0]
    failed = replace(failed, samples=(replace(old, version=np.where(old.sampled, 3, -1).astype(np.int32)),))
    assert report([valid, failed]).versions == (0, 3)


def test_missing_verdicts_are_counted_by_cause() -> None:
    causes = ["timeout: the judge ran for more than 10 s (2 attempts)", "timeout: the judge ran for more than 9 s"]
    causes += ["not finite: reward is nan", "the judge raised ValueError: x of task 7", "the judge returned nothing"]
    made = [replace(each, verdict=NoVerdict(cause)) for each, cause in zip(episodes([None] * 5), causes, strict=True)]
    broken = replace(episodes([None])[0], terminated_by=TerminatedBy.INFRASTRUCTURE)
    assert no_verdicts([*made, broken, *episodes([1.0])]) == {
        "timeout": 2,
        "not finite": 1,
        "the judge raised ValueError": 1,
        "the judge returned nothing": 1,
        "infrastructure": 1,
    }


# -- accounting --------------------------------------------------------------------------------------------------------

groups_of_any_kind = st.lists(
    st.lists(
        st.tuples(st.sampled_from([None, 0.0, 1.0]), st.lists(st.integers(0, 5), max_size=3)), min_size=1, max_size=4
    ),
    min_size=1,
    max_size=4,
)


def any_groups(shape: list[list[tuple[float | None, list[int]]]]) -> list[Group]:
    """Groups of trajectories with rewards or none, of any number of rows, some without a sampled token."""
    made = []
    for g, members in enumerate(shape):
        rows = [[sample([7] * (n + 2), [0] + [1] * n + [0]) for n in lengths] for _, lengths in members]
        made.append(group(f"g{g}", [trajectory(f"g{g}t{t}", rows[t], r) for t, (r, _) in enumerate(members)]))
    return made


@given(groups_of_any_kind, st.sampled_from([Objective(), Objective(kl_coefficient=0.1)]), st.integers(1, 40))
@settings(max_examples=150, deadline=None)
def test_every_sampled_token_is_trained_or_in_one_counted_place(
    shape: list[list[tuple[float | None, list[int]]]], objective: Objective, tokens: int
) -> None:
    groups = any_groups(shape)
    algorithm = RLOO(objective)
    batch = pack(groups, [algorithm.advantages(g) for g in groups], tokens, objective)
    account, sampled = batch.accounting, sum(t.sampled_tokens for g in groups for t in g.trajectories)
    assert account.trained_tokens + account.tokens_without_signal + account.invalid_tokens == sampled
    assert batch.num_actions == account.trained_tokens
    assert batch.num_actions == 0 or batch.actions().weights.sum() == pytest.approx(1.0)


class Told:
    """A collector that hands out what it is told, and everything else that the loop asks for."""

    def __init__(self, groups: list[Group]) -> None:
        self.groups, self.version, self.lines = groups, 0, list[Metrics]()
        self.proofs = 0

    async def take(self, count: int, *, replacing: bool = False) -> list[Group]:
        return self.groups

    async def evaluate(self, step: int) -> None: ...

    async def publish(self, version: int) -> SimpleNamespace:
        return SimpleNamespace(gap=0.0, gap_mean=0.0, moved=1.0, matched_modules=1, digest="d", seconds=0.0)

    def log(self, step: int, values: Metrics) -> None:
        self.lines.append(values)


def one_step(groups: list[Group], folder: Path) -> tuple[Metrics, dict[str, int]]:
    told, ledger = Told(groups), Ledger(folder / "ledger.sqlite")
    ledger.begin(step=0, now=0.0)
    loop = Loop(
        settings=LoopSettings(1, 1, 0, 20, 1 << 20, GatherSettings(len(groups)), Counting(), Practice(64)),
        collector=told,  # type: ignore[arg-type]
        learner=Learner(tiny_llama(dtype=torch.float32), LearnerSettings(lora=LoraSettings(4, 4.0))),
        algorithm=RLOO(),
        publisher=told,  # type: ignore[arg-type]
        ledger=ledger,
        log=told,
        summary=Summary("e", "s", 0),
        gap=GapWatch(on_policy=True),
        save=lambda step: None,
        evaluate=told.evaluate,
        trajectories=folder,
        say=lambda line: None,
        stop=asyncio.Event(),
    )
    assert asyncio.run(loop.run())
    return told.lines[0], ledger.totals()


def test_the_ledger_and_the_metrics_count_each_sampled_token_once_and_only_the_trained_as_trained(
    tmp_path: Path,
) -> None:
    groups = [
        rewarded("g0", [1.0, 0.0, None], [3, 4, 50]),  # the invalid one is in no loss
        rewarded("g1", [1.0, 1.0], [5, 6]),
        rewarded("g2", [1.0, None, None], [7, 8, 9]),  # nothing to compare with
    ]
    metrics, totals = one_step(groups, tmp_path)
    assert totals["tokens_trained"] == metrics["update/action_tokens"] == metrics["update/tokens_trained"] == 7
    assert totals["tokens_no_signal"] == 11
    assert totals["tokens_invalid"] == 50 + 7 + 8 + 9
    tokens = ("update/tokens_trained", "update/tokens_without_signal", "update/tokens_invalid")
    assert sum(int(str(metrics[name])) for name in tokens) == metrics["rollout/policy_tokens"] == 92
    assert metrics["rollout/success_all"] == pytest.approx(4 / 8)
    assert metrics["rollout/success"] == pytest.approx(4 / 5)
    assert metrics["rollout/no_verdict/no judge"] == 3
    assert metrics["rollout/oldest_version"] == 0


def test_a_group_that_a_kl_learns_from_is_trained_though_it_has_no_signal() -> None:
    algorithm = RLOO(Objective(kl_coefficient=0.1))
    groups = [rewarded("g0", [1.0, 1.0], [5, 6])]
    learner = Learner(tiny_llama(dtype=torch.float32), LearnerSettings(lora=LoraSettings(4, 4.0)))
    learned = learn(learner, algorithm, groups, Counting(), Practice(64))
    (row,) = consumed(Gathered(tuple(groups), ("used",)), learned, algorithm, Counting())
    assert (row.outcome, row.sampled_tokens, row.invalid_tokens) == ("trained", 11, 0)


def test_metrics_look_at_no_observation() -> None:
    """Another text of the same length between the actions changes what follows it, but no token of its own counts."""
    learner = Learner(tiny_llama(dtype=torch.float32), LearnerSettings(lora=LoraSettings(4, 4.0)))
    groups = random_groups(np.random.default_rng(1))
    batch = pack(groups, [RLOO().advantages(g) for g in groups], 64, Objective())
    padded = [replace(g, trajectories=tuple(map(with_tail, g.trajectories))) for g in groups]
    longer = pack(padded, [RLOO().advantages(g) for g in padded], 64, Objective())
    assert longer.num_tokens == batch.num_tokens
    one = learner.update(batch, RLOO()).metrics
    other = Learner(tiny_llama(dtype=torch.float32), LearnerSettings(lora=LoraSettings(4, 4.0))).update(longer, RLOO())
    assert one == pytest.approx(other.metrics, rel=1e-6)


def with_tail(made: Trajectory) -> Trajectory:
    """With 30 tokens of observation behind everything."""
    return replace(made, samples=tuple(longer(row) for row in made.samples))


def longer(row: object) -> object:
    from palestra.rollout.types import Sample

    assert isinstance(row, Sample)
    more = sample([9] * 30, [0] * 30)
    joined = {
        name: np.concatenate([getattr(row, name), getattr(more, name)])
        for name in ("ids", "sampled", "logprobs", "temperature", "version", "turn")
    }
    return Sample(**joined)


@pytest.mark.parametrize("algorithm", [RLOO(), GRPO()])
def test_one_verdict_in_a_group_teaches_nothing_and_none_is_never_nan(algorithm: RLOO | GRPO) -> None:
    for rewards in ([1.0, None, None], [None, None], [0.5]):
        credit = algorithm.advantages(rewarded("g", rewards))
        assert not credit.signal
        assert all(stream is None or not np.isnan(stream).any() for stream in credit.advantages)


# -- publishing --------------------------------------------------------------------------------------------------------


class Served:
    """A trainer whose log-probabilities are its version's, and engines that serve what they like."""

    def __init__(self, engines: int, noise: float = 0.0) -> None:
        self.version, self.serves, self.noise = 0, [0] * engines, noise
        self.stuck: set[int] = set()
        self.rng = np.random.default_rng(0)

    def adapter(self) -> Adapter:
        return Adapter({"m": Factors(np.full((1, 1), self.version, np.float32), np.ones((1, 1), np.float32), 1.0)})

    def score(self, ids: Sequence[int]) -> Float32:
        return np.full(len(ids) - 1, -1.0 - 1e-4 * self.version, np.float32)

    async def publish(self, adapter: Adapter, version: int) -> tuple[Receipt, ...]:
        self.serves = [old if i in self.stuck else version for i, old in enumerate(self.serves)]
        return tuple(Receipt(f"e{i}", version, adapter.digest(), 1, "merged", 0.0) for i in range(len(self.serves)))

    async def score_each(self, ids: Sequence[int]) -> tuple[Float32, ...]:
        noise = [self.noise * self.rng.standard_normal(len(ids) - 1) for _ in self.serves]
        served = [np.full(len(ids) - 1, -1.0 - 1e-4 * version) for version in self.serves]
        return tuple((s + n).astype(np.float32) for s, n in zip(served, noise, strict=True))


def publisher(served: Served) -> Publisher:
    return Publisher(served, served, [[1, 2, 3, 4]], max_gap=1e-3)


@pytest.mark.parametrize("stuck", [0, 1, 2])
@pytest.mark.parametrize("noise", [0.0, 1e-6])
def test_any_engine_that_stays_behind_is_noticed_though_its_gap_is_within_the_limit(stuck: int, noise: float) -> None:
    served = Served(3, noise)
    made = publisher(served)
    asyncio.run(made.publish(0))
    served.version = 1
    assert asyncio.run(made.publish(1)).moved == pytest.approx(1e-4, rel=0.1)
    served.version, served.stuck = 2, {stuck}
    with pytest.raises(IntegrityError, match="still serves the old weights"):
        asyncio.run(made.publish(2))


def test_publishing_the_same_weights_again_is_no_alarm() -> None:
    served = Served(2, 1e-7)
    made = publisher(served)
    asyncio.run(made.publish(0))
    asyncio.run(made.publish(0))
    served.serves.append(0)  # an engine more than before
    served.version = 1
    asyncio.run(made.publish(1))
    assert [proof.version for proof in made.proofs] == [0, 0, 1]


def test_a_gap_that_is_not_a_number_stops_the_run() -> None:
    served = Served(1, float("nan"))
    with pytest.raises(IntegrityError, match="differ by nan"):
        asyncio.run(publisher(served).publish(0))


# -- adapters and state ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stabilised", [False, True])
def test_every_module_of_a_saved_adapter_keeps_the_scale_that_peft_gives_it(stabilised: bool, tmp_path: Path) -> None:
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=4,
        lora_alpha=8,
        use_rslora=stabilised,
        target_modules="all-linear",
        rank_pattern={"q_proj": 2, "layers.1.mlp.up_proj": 8},
        alpha_pattern={"k_proj": 32, r"model\.layers\.0\.mlp\.down_proj": 3},
    )
    model = get_peft_model(tiny_llama(dtype=torch.float32), config)
    model.save_pretrained(str(tmp_path))
    found = read_peft_folder(tmp_path).factors
    layers = {
        name.removeprefix("base_model.model."): module.scaling["default"]
        for name, module in model.named_modules()
        if isinstance(module, LoraLayer)
    }
    assert {name: factors.scale for name, factors in found.items()} == pytest.approx(layers)
    assert len(set(layers.values())) > 3


def test_a_state_of_another_rank_is_refused_and_changes_nothing() -> None:
    other = Learner(tiny_llama(), LearnerSettings(lora=LoraSettings(8, 8.0))).state()
    learner = Learner(tiny_llama(), LearnerSettings(lora=LoraSettings(4, 4.0)))
    before = learner.adapter().digest()
    with pytest.raises(ConfigError, match="resume with the model and lora settings"):
        learner.load_state(other)
    assert learner.adapter().digest() == before


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_a_schedule_goes_on_where_it_was(schedule: str) -> None:
    how = LearnerSettings(
        lora=LoraSettings(4, 4.0),
        optimizer=OptimizerSettings(learning_rate=1e-2, schedule=schedule, total_steps=10, warmup_steps=3),  # type: ignore[arg-type]
    )
    groups = random_groups(np.random.default_rng(2))
    batch = pack(groups, [RLOO().advantages(g) for g in groups], 64, Objective())
    whole, first = Learner(tiny_llama(), how), Learner(tiny_llama(), how)
    rates = [whole.update(batch, RLOO()).learning_rate for _ in range(6)]
    for _ in range(4):
        first.update(batch, RLOO())
    second = Learner(tiny_llama(seed=0), how, seed=99)
    second.load_state(first.state())
    assert [second.update(batch, RLOO()).learning_rate for _ in range(2)] == rates[4:]
    assert second.adapter().digest() == whole.adapter().digest()


def test_the_base_is_bit_for_bit_what_it_was_after_many_updates() -> None:
    learner = Learner(tiny_llama(dtype=torch.float32), LearnerSettings(lora=LoraSettings(4, 4.0)))
    groups = random_groups(np.random.default_rng(3))
    batch = pack(groups, [RLOO().advantages(g) for g in groups], 64, Objective(kl_coefficient=0.1))
    frozen = {name: p.clone() for name, p in learner._model.named_parameters() if not p.requires_grad}
    for _ in range(10):
        learner.update(batch, RLOO(Objective(kl_coefficient=0.1)))
    assert all(torch.equal(p, frozen[n]) for n, p in learner._model.named_parameters() if n in frozen)
