"""From the [algorithm] settings to an algorithm, by name or by a dotted path of the user's own."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, cast

from palestra.envs.errors import ConfigError
from palestra.rl.algorithms.base import Algorithm
from palestra.rl.algorithms.center import Center
from palestra.rl.algorithms.cispo import CISPO
from palestra.rl.algorithms.dapo import DAPO
from palestra.rl.algorithms.dppo import DPPO
from palestra.rl.algorithms.dr_grpo import DrGRPO
from palestra.rl.algorithms.gdpo import GDPO
from palestra.rl.algorithms.gigpo import GiGPO
from palestra.rl.algorithms.grpo import GRPO
from palestra.rl.algorithms.gspo import GSPO
from palestra.rl.algorithms.loo_std import LooStd
from palestra.rl.algorithms.make_objective import make_objective
from palestra.rl.algorithms.maxrl import MaxRL
from palestra.rl.algorithms.opo import OPO
from palestra.rl.algorithms.outcome_turn import OutcomeTurn
from palestra.rl.algorithms.ppo import PPO
from palestra.rl.algorithms.recipes import Recipe
from palestra.rl.algorithms.reinforce import REINFORCE
from palestra.rl.algorithms.reinforce_pp import ReinforcePP
from palestra.rl.algorithms.rloo import RLOO
from palestra.rl.algorithms.rpp_baseline import RPPBaseline
from palestra.rl.algorithms.same_turn import SameTurn
from palestra.rl.algorithms.turn_gae import TurnGAE
from palestra.rl.algorithms.turn_return import TurnReturn
from palestra.rl.algorithms.vapo import VAPO
from palestra.rl.objective import Objective

if TYPE_CHECKING:
    from palestra.rl.settings_algorithm import AlgorithmSettings

KNOWN: dict[str, Recipe] = {
    # one value per trajectory
    "rloo": Recipe(RLOO),
    "center": Recipe(Center),
    "grpo": Recipe(GRPO),
    "dr_grpo": Recipe(DrGRPO, {"aggregation": "seq-mean-token-sum-norm"}),
    "loo_std": Recipe(LooStd),
    "opo": Recipe(OPO),
    "maxrl": Recipe(MaxRL),
    "gdpo": Recipe(GDPO),
    # whitened over the step
    "reinforce_pp": Recipe(ReinforcePP),
    "rpp_baseline": Recipe(RPPBaseline),
    # one value per turn
    "turn_return": Recipe(TurnReturn),
    "same_turn_baseline": Recipe(SameTurn),
    "outcome_turn": Recipe(OutcomeTurn),
    "gigpo": Recipe(GiGPO),
    # with a critic
    "turn_gae": Recipe(TurnGAE),
    "ppo": Recipe(PPO),
    "vapo": Recipe(VAPO),
    # credit of the above with the objective of a paper
    "reinforce": REINFORCE,
    "dapo": DAPO,
    "gspo": GSPO,
    "cispo": CISPO,
    "dppo": DPPO,
}
"""Every name of `algorithm.name`; docs/algorithms/ has a page for each."""


def make_algorithm(settings: AlgorithmSettings, budget_tokens: int) -> Algorithm:
    """The algorithm of the settings. Raises ConfigError for a name that nobody knows.

    `budget_tokens`: what a trajectory may sample, the constant of seq-mean-token-sum-norm unless the settings give one.
    """
    if settings.aggregation == "seq-mean-token-sum-norm" and settings.length_norm_tokens is None:
        settings = settings.model_copy(update={"length_norm_tokens": budget_tokens})
    updates = settings.updates_per_batch * settings.epochs
    objective = replace(make_objective(settings), updates_per_version=updates)
    if of_user(settings.name):
        return _load(settings.name)(objective)
    return recipe(settings.name).make(objective, settings.model_dump())


def recipe(name: str) -> Recipe:
    """What the name stands for. Raises ConfigError with the nearest name for one that nobody knows."""
    if name not in KNOWN:
        near = difflib.get_close_matches(name, KNOWN, 1)
        hint = f"Did you mean {near[0]!r}? " if near else ""
        raise ConfigError(
            f"algorithm.name is {name!r}. {hint}Have: {', '.join(KNOWN)}, or a function of your own: "
            '"my_project.credit:make"'
        )
    return KNOWN[name]


def of_user(name: str) -> bool:
    """Whether it is the dotted path of a function of the user's own."""
    return ":" in name


def _load(path: str) -> Callable[[Objective], Algorithm]:
    module, _, attribute = path.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"algorithm.name is {path!r}: {error}; is its package installed here?") from error
    if not callable(found):
        raise ConfigError(f"algorithm.name is {path!r}, a {type(found).__name__}; expected a function of an Objective")
    return cast(Callable[[Objective], Algorithm], found)
