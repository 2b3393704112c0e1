"""Credit per turn: published numbers, groups that teach nothing, and how states and rewards come into the record."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from episodes import FORMAT, TASK, TOOLS, CountedBoxes, call, episode
from learning_support import golden, group, trajectory
from palestra.envs.environment import Environment
from palestra.envs.errors import ConfigError, IntegrityError
from palestra.envs.runtime import RuntimeLimits
from palestra.envs.sandboxes.contract import BoxSpec
from palestra.envs.tool_environment import ToolEnvironment
from palestra.envs.tools import Tool, ToolContext
from palestra.envs.types import JSON, Action, Artefact, Message, StepResult
from palestra.rl.algorithms.base import Algorithm, Float64, Measured
from palestra.rl.algorithms.gigpo import GiGPO
from palestra.rl.algorithms.outcome_turn import OutcomeTurn
from palestra.rl.algorithms.rloo import RLOO
from palestra.rl.algorithms.same_turn import SameTurn, same_turn_advantages
from palestra.rl.algorithms.turn_gae import TurnGAE
from palestra.rl.algorithms.turn_return import TurnReturn, turn_return_advantages
from palestra.rl.config import Config
from palestra.rl.preflight import check
from palestra.rl.returns import reward_to_go
from palestra.rl.turns import turns_of
from palestra.rollout import record
from palestra.rollout.guard import GuardedEnvironment
from palestra.rollout.types import Group, Trajectory
from turn_support import played

CASES = golden("turn_level")
COMPARING: tuple[Algorithm, ...] = (TurnReturn(), TurnReturn(gamma=0.9), SameTurn(gamma=0.9), OutcomeTurn(), GiGPO())
comparing = pytest.mark.parametrize(
    "algorithm", COMPARING, ids=lambda a: f"{type(a).__name__}-{getattr(a, 'gamma', '')}"
)
precisions = pytest.mark.parametrize(("dtype", "tolerance"), [(np.float64, 1e-9), (np.float32, 1e-6)])


def per_turn(algorithm: Algorithm, of: Group, measured: Measured | None = None) -> list[Float64 | None]:
    """The advantage of each turn of each trajectory; the tokens of a turn must agree."""
    found: list[Float64 | None] = []
    for one, stream in zip(of.trajectories, algorithm.credit([of], measured)[0].advantages, strict=True):
        if stream is None:
            found.append(None)
            continue
        table = turns_of(one)
        assert all(np.ptp(stream[table.of_token == k]) == 0.0 for k in range(len(table)))
        found.append(np.array([stream[table.of_token == k][0] for k in range(len(table))]))
    return found


def same(found: Sequence[Float64 | None], expected: Sequence[Any], tolerance: float = 1e-9) -> None:
    for mine, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(mine, wanted, rtol=tolerance, atol=tolerance)  # type: ignore[arg-type]


@precisions
def test_published_returns_are_discounted_once_per_turn(dtype: type, tolerance: float) -> None:
    case = CASES["turn/discounted_return_to_go"]
    rows = [np.array(row, dtype).astype(np.float64) for row in case["inputs"]["turn_rewards"]]
    gamma = case["conventions"]["gamma"]
    same([reward_to_go(row, gamma) for row in rows], case["expected"]["turn_returns"], tolerance)
    # the outcome is what the last turn earned, whatever the number of tokens in a turn
    episodes = [played(f"t{i}", [i + 1] * len(r), r[-1], rewards=[*r[:-1], 0.0]) for i, r in enumerate(rows)]
    same([reward_to_go(turns_of(e).rewards, gamma) for e in episodes], case["expected"]["turn_returns"], tolerance)


@precisions
def test_published_outcome_and_turn_reward(dtype: type, tolerance: float) -> None:
    case = CASES["turn/outcome_plus_turn_reward"]
    inputs, how = case["inputs"], case["conventions"]
    first = np.array(inputs["turn0_reward"], dtype).astype(float)
    episodes = [
        played(f"t{i}", [2] * turns, outcome, rewards=[own] + [0.0] * (turns - 1))
        for i, (outcome, own, turns) in enumerate(zip(inputs["outcome"], first, inputs["n_turns"], strict=True))
    ]
    algorithm = OutcomeTurn(outcome_weight=how["lam"], ddof=how["ddof"], eps=how["eps"])
    same(per_turn(algorithm, group("g", episodes)), case["expected"]["turn_advantages"], 10 * tolerance)


@precisions
def test_published_gigpo_without_std(dtype: type, tolerance: float) -> None:
    case = CASES["turn/gigpo_mean_norm"]
    how, steps = case["conventions"], case["inputs"]["steps"]
    episodes, order = [], []
    for name, total in case["inputs"]["episode_return"].items():
        own = [(i, step) for i, step in enumerate(steps) if step["trajectory"] == name]
        returns = np.array([step["step_return"] for _, step in own], dtype).astype(float)
        rewards = returns - how["gamma"] * np.append(returns[1:], 0.0)
        episodes.append(
            played(name, [2] * len(own), 0.0, rewards=rewards.tolist(), states=[step["anchor"] for _, step in own])
        )
        assert rewards.sum() == pytest.approx(total, abs=1e-6)
        order += [i for i, _ in own]
    algorithm = GiGPO(gamma=how["gamma"], step_weight=how["omega"])
    found = np.concatenate(per_turn(algorithm, group("g", episodes)))  # type: ignore[arg-type]
    np.testing.assert_allclose(found, np.array(case["expected"]["advantages"])[order], atol=10 * tolerance)
    episode_part = np.concatenate(per_turn(replace(algorithm, step_weight=0.0), group("g", episodes)))  # type: ignore[arg-type]
    np.testing.assert_allclose(
        episode_part, np.array(case["expected"]["episode_advantage"])[order], atol=10 * tolerance
    )
    wrong = np.array(case["expected"]["episode_advantage_if_mean_over_steps"])[order]
    assert np.abs(episode_part - wrong).max() > 1e-3


@precisions
def test_published_gae_over_turns_is_broadcast_to_the_tokens(dtype: type, tolerance: float) -> None:
    case = CASES["turn/turn_level_gae"]
    inputs, how = case["inputs"], case["conventions"]
    lengths = inputs["turn_lengths"]
    rewards = inputs["turn_rewards"]
    one = played("t", lengths, rewards[-1], rewards=[*rewards[:-1], 0.0])
    values = np.full(sum(lengths), 7.0)  # only the first token of a turn says what its state is worth
    values[np.cumsum([0, *lengths[:-1]])] = np.array(inputs["turn_values"], dtype)
    measured = Measured(values=((values,),), last_values=((5.0,),))
    algorithm = TurnGAE(gamma=how["gamma"], lam=how["lambda"])
    credit = algorithm.credit([group("g", [one])], measured)[0]
    returns = credit.returns[0]  # type: ignore[index]
    asked = np.isfinite(returns)  # type: ignore[arg-type]
    np.testing.assert_array_equal(np.flatnonzero(asked), np.cumsum([0, *lengths[:-1]]))
    same([returns[asked]], [case["expected"]["turn_returns"]], tolerance)  # type: ignore[index]
    plain = np.array(case["expected"]["token_advantages"])
    white = (plain - plain.mean()) / np.sqrt(plain.var(ddof=1) + 1e-8)
    same([credit.advantages[0]], [white], 10 * tolerance)


def test_the_turn_baseline_of_one_index_leaves_a_lone_turn_alone() -> None:
    returns = [np.array([0.81, 0.9, 1.0]), np.array([0.2, 0.0]), np.array([0.45, 0.5, 0.0, 0.0])]
    mean = same_turn_advantages(returns, "mean")
    first, second, third = np.mean([0.81, 0.2, 0.45]), np.mean([0.9, 0.0, 0.5]), np.mean([1.0, 0.0])
    same(
        mean, [[0.81 - first, 0.9 - second, 0.5], [0.2 - first, -second], [0.45 - first, 0.5 - second, 0 - third, 0.0]]
    )
    others = same_turn_advantages(returns, "leave_one_out")
    same(others[1:2], [[0.2 - (0.81 + 0.45) / 2, 0.0 - (0.9 + 0.5) / 2]])
    assert mean[2][3] == others[2][3] == 0.0


def test_the_baseline_of_turn_return_is_of_the_other_attempts() -> None:
    returns = [np.array([1.0, 0.5]), np.array([0.0]), np.array([0.2, 0.2, 0.2])]
    others = [[1.0 - 0.1, 0.5 - 0.1], [0.0 - 0.6], [0.2 - 0.5, 0.2 - 0.25, 0.2 - 0.25]]
    same(turn_return_advantages(returns, "leave_one_out"), others)
    same(turn_return_advantages(returns, "mean"), [[value * 2 / 3 for value in row] for row in others])


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from([0.0, 0.25, 1.0]), min_size=1, max_size=6), st.integers(0, 2**31))
def test_with_an_outcome_alone_and_no_discount_turn_return_is_rloo(rewards: list[float], seed: int) -> None:
    rng = np.random.default_rng(seed)
    one = group("g", [played(f"t{i}", rng.integers(1, 4, rng.integers(1, 5)), r) for i, r in enumerate(rewards)])
    for mine, theirs in zip(TurnReturn().credit([one])[0].advantages, RLOO().credit([one])[0].advantages, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-12)  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [2, 3])
def test_turn_return_is_the_policy_gradient_with_turn_rewards_and_ends_at_different_turns(size: int) -> None:
    """Stop for 0.5, or earn 0.2 and decide again between 1 and 0: every group that there can be, by its chance."""
    first, second = np.array([0.6, 0.4]), np.array([0.7, 0.3])
    episodes = {  # choices of each turn: (chance, rewards of each turn)
        (0,): (first[0], [0.5]),
        (1, 0): (first[1] * second[0], [0.2, 1.0]),
        (1, 1): (first[1] * second[1], [0.2, 0.0]),
    }

    def scores(choices: tuple[int, ...]) -> list[Float64]:
        """d log pi / d logits of the two decisions, for each turn."""
        found = []
        for k, choice in enumerate(choices):
            score = np.zeros(4)
            score[2 * k : 2 * k + 2] = np.eye(2)[choice] - (first, second)[k]
            found.append(score)
        return found

    exact = sum(chance * sum(rewards) * sum(scores(choices)) for choices, (chance, rewards) in episodes.items())
    expected = np.zeros(4)
    for attempts in itertools.product(episodes, repeat=size):
        chance = np.prod([episodes[choices][0] for choices in attempts])
        returns = [reward_to_go(np.array(episodes[choices][1]), 1.0) for choices in attempts]
        for choices, advantages in zip(attempts, turn_return_advantages(returns, "leave_one_out"), strict=True):
            expected += chance / size * sum(a * s for a, s in zip(advantages, scores(choices), strict=True))
    np.testing.assert_allclose(expected, exact, atol=1e-12)


@comparing
@pytest.mark.parametrize("rewards", [[0.7] * 8, [1.0], [1.0, None], [0.0, 0.0, None]])
def test_groups_that_teach_nothing_get_exactly_nothing(algorithm: Algorithm, rewards: list[float | None]) -> None:
    episodes = [played(f"t{i}", [2, 1], reward, states=["a", "b"]) for i, reward in enumerate(rewards)]
    credit = algorithm.credit([group("g", episodes)])[0]
    assert not credit.signal
    assert [stream is None for stream in credit.advantages] == [reward is None for reward in rewards]


@comparing
def test_an_attempt_without_a_verdict_changes_nothing_for_the_others(algorithm: Algorithm) -> None:
    judged = [
        played("a", [2, 1], 1.0, rewards=[0.5, 0.0], states=["s", "u"]),
        played("b", [1, 3], 0.0, states=["s", "v"]),
        played("c", [1, 1, 2], 0.5, rewards=[0.1, 0.0, 0.0], states=["s", "u", "u"]),
    ]
    lost = replace(played("x", [2, 2], None, rewards=[99.0, 0.0], states=["s", "u"]), turns=())
    with_it, without = group("g", [judged[0], lost, *judged[1:]]), group("g", judged)
    found = algorithm.credit([with_it])[0].advantages
    assert found[1] is None
    for mine, theirs in zip((found[0], *found[2:]), algorithm.credit([without])[0].advantages, strict=True):
        np.testing.assert_array_equal(mine, theirs)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="group_size is 1"):
        algorithm.check(1)


@comparing
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**31))
def test_the_order_of_the_attempts_means_nothing(algorithm: Algorithm, seed: int) -> None:
    rng = np.random.default_rng(seed)

    def attempt(name: str) -> Trajectory:
        turns = int(rng.integers(1, 5))
        return played(
            name,
            rng.integers(1, 4, turns).tolist(),
            float(rng.integers(0, 3)) / 2,
            rewards=(rng.integers(0, 3, turns) / 4).tolist(),
            states=["s", *rng.choice(["s", "u", "v"], turns - 1).tolist()],
        )

    attempts = [attempt(f"t{i}") for i in range(5)]
    order = rng.permutation(5)
    here = algorithm.credit([group("g", attempts)])[0].advantages
    there = algorithm.credit([group("g", [attempts[i] for i in order])])[0].advantages
    for place, i in enumerate(order):
        np.testing.assert_allclose(there[place], here[i], atol=1e-12)  # type: ignore[arg-type]


@comparing
def test_turns_and_tokens_that_disagree_are_refused(algorithm: Algorithm) -> None:
    good, other = played("a", [2, 1], 1.0, states=["s", "u"]), played("b", [1], 0.0, states=["s"])
    for turns in ((), good.turns[:1], (good.turns[0], replace(good.turns[1], sampled_tokens=2)), good.turns[::-1]):
        with pytest.raises(IntegrityError, match="trajectory a: its turns tell of"):
            algorithm.credit([group("g", [replace(good, turns=turns), other])])


@comparing
def test_an_attempt_that_never_got_to_act_is_compared_without_tokens(algorithm: Algorithm) -> None:
    silent = replace(trajectory("silent", [], 0.0), turns=())
    credit = algorithm.credit([group("g", [silent, played("a", [1], 1.0), played("b", [1], 0.0)])])[0]
    assert credit.advantages[0] is not None
    assert credit.advantages[0].size == 0
    assert credit.advantages[1] is not None
    assert credit.advantages[1][0] > 0


def test_a_kl_in_the_reward_is_taken_off_the_turns_that_pay_it() -> None:
    one, two = played("a", [2, 1], 1.0), played("b", [1, 1], 0.0)
    penalties = ((np.array([0.1, 0.2, 0.3]), np.zeros(2)),)
    found = per_turn(TurnReturn(turn_baseline="mean"), group("g", [one, two]), Measured(penalties=penalties))
    same(found, [[0.2, 0.35], [-0.2, -0.35]])


def test_gigpo_compares_turns_of_equal_states_and_no_others() -> None:
    episodes = [
        played("a", [1, 1], 1.0, states=[None, "x"]),
        played("b", [1, 1], 0.0, states=[None, "x"]),
        played("c", [1, 1], 0.0, states=[None, None]),
    ]
    steps = replace(GiGPO(gamma=1.0), step_weight=1.0)
    both, alone = per_turn(steps, group("g", episodes)), per_turn(replace(steps, step_weight=0.0), group("g", episodes))
    found = [mine - theirs for mine, theirs in zip(both, alone, strict=True)]  # type: ignore[operator]
    same(found, [[2 / 3, 0.5], [-1 / 3, -0.5], [-1 / 3, 0.0]])
    stdless = [replace(e, turns=tuple(replace(t, state=None) for t in e.turns)) for e in episodes]
    with pytest.raises(IntegrityError, match="digest_states"):
        steps.credit([group("g", stdless)])
    with_std = per_turn(replace(steps, std="group"), group("g", episodes[:2]))
    same(with_std, [[np.sqrt(2), np.sqrt(2)], [-np.sqrt(2), -np.sqrt(2)]], 1e-5)
    for name in (GiGPO, OutcomeTurn):
        with pytest.raises(ConfigError, match="batch"):
            name(std="batch")  # type: ignore[call-arg]


def test_comparing_states_that_nobody_records_is_refused_before_anything_starts() -> None:
    settings: dict[str, Any] = {
        "algorithm": {"name": "gigpo"},
        "environment": {"name": "arithmetic", "sandbox": {"backend": "namespace"}},
    }
    with pytest.raises(ConfigError, match="digest_states = true"):
        check(Config.model_validate(settings))
    settings["environment"]["options"] = {"digest_states": True}
    assert check(Config.model_validate(settings)).algorithm == GiGPO()


# --- how turns get their rewards and states ---------------------------------------------------------------------------


async def note(arguments: Mapping[str, JSON], context: ToolContext) -> str:
    await context.box.write("note.txt", str(arguments["word"]).encode())
    return "noted"


WORD: dict[str, JSON] = {
    "type": "object",
    "properties": {"word": {"type": "string"}},
    "required": ["word"],
    "additionalProperties": False,
}
NOTE = Tool("note", "Writes a word down.", WORD, note)


def noted(turns: Sequence[str], **options: Any) -> Trajectory:
    world = ToolEnvironment(
        TASK, (*TOOLS, NOTE), CountedBoxes(), spec=BoxSpec(), calls=FORMAT, limits=RuntimeLimits(), **options
    )
    return episode(list(turns), world=GuardedEnvironment(lambda: world))


def test_a_turn_records_the_state_that_its_action_found() -> None:
    one, two = call("note", word="one"), call("note", word="two")
    look, end = call("add", a=1, b=1), call("answer", value=5)
    states = [turn.state for turn in noted([look, one, look, two, one, end], digest_states=True).turns]
    opening, _, after_one, _, after_two, again = states
    assert states[1] == opening, "a turn that only looks changes no state"
    assert states[3] == after_one
    assert len({opening, after_one, after_two}) == 3
    assert again == after_one, "the way to a state is no part of it"
    other = [turn.state for turn in noted([two, "no call", one, end], digest_states=True).turns]
    assert other == [opening, after_two, after_two, after_one], "the same in another box and another episode"


def test_states_are_not_digested_unless_asked_for() -> None:
    assert [turn.state for turn in noted([call("note", word="one"), call("answer", value=5)]).turns] == [None, None]


def test_a_turn_whose_calls_all_run_earns_its_reward() -> None:
    script = [call("note", word="one"), call("note", wrong=1), "words", call("answer", value=5)]
    assert [turn.reward for turn in noted(script, call_reward=0.25).turns] == [0.25, 0.0, 0.0, 0.25]


class Paying:
    """Pays 0.5 for each step and says "n" in step n."""

    tools = TOOLS

    def __init__(self, **bend: Any) -> None:
        self.steps, self.bend = 0, bend

    async def start(self) -> tuple[Message, ...]:
        return TASK.prompt

    async def step(self, action: Action) -> StepResult:
        self.steps += 1
        given: dict[str, Any] = {"reward": 0.5, "state": str(self.steps), **self.bend}
        return StepResult((Message("tool", "on"),), (), done=self.steps == 3, **given)

    async def export(self) -> Artefact:
        return Artefact()

    async def close(self) -> None: ...


def test_an_environment_without_an_opening_state_tells_the_later_ones() -> None:
    environment: Environment = Paying()
    found = episode(["a", "b", "c"], world=GuardedEnvironment(lambda: environment))
    assert [turn.state for turn in found.turns] == [None, "1", "2"]
    assert [turn.reward for turn in found.turns] == [0.5] * 3


@pytest.mark.parametrize("bend", [{"reward": float("nan")}, {"reward": "1"}, {"reward": True}, {"state": 7}])
def test_rewards_and_states_of_another_kind_are_refused_where_they_come_in(bend: dict[str, Any]) -> None:
    async def body() -> None:
        world = GuardedEnvironment(lambda: Paying(**bend))
        await world.start()
        with pytest.raises(TypeError, match="expected"):
            await world.step(Action("a"))

    asyncio.run(body())


def test_records_keep_rewards_and_states_and_older_records_are_still_read() -> None:
    made = noted([call("note", word="one"), call("answer", value=5)], digest_states=True, call_reward=0.1)
    row = json.loads(json.dumps(record.to_json(made)))
    kept = record.from_json(row)
    assert [(turn.reward, turn.state) for turn in kept.turns] == [(turn.reward, turn.state) for turn in made.turns]
    assert kept.turns[1].state is not None
    for turn in row["turns"]:
        del turn["reward"], turn["state"]
    old = record.from_json(row)
    assert [(turn.reward, turn.state) for turn in old.turns] == [(0.0, None)] * 2
