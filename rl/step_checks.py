"""What cannot be right about how a step uses its groups, told before anything starts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from palestra.rl.config import Config  # which calls what is here


def wrong_in_step(config: Config) -> Iterator[str]:
    """A sentence for every fault."""
    yield from _groups(config)
    yield from _rewards(config)
    yield from _lag(config)


def _groups(config: Config) -> Iterator[str]:
    run, size, algorithm = config.run, config.rollout.group_size, config.algorithm
    if run.min_group_size > size:
        yield (
            f"run.min_group_size is {run.min_group_size}, but a group has {size} episodes (rollout.group_size); no "
            "group would ever be used"
        )
    if algorithm.dynamic_sampling and size < 2:
        yield (
            f"algorithm.dynamic_sampling compares the episodes of a group, but rollout.group_size is {size}; use 2 or "
            "more"
        )
    if algorithm.updates_per_batch > run.groups_per_step:
        yield (
            f"algorithm.updates_per_batch is {algorithm.updates_per_batch}, but a batch has {run.groups_per_step} "
            "groups (run.groups_per_step), which are dealt whole; use at most that many, or algorithm.epochs"
        )


def _rewards(config: Config) -> Iterator[str]:
    algorithm, tokens = config.algorithm, config.environment.budgets.tokens
    longest, cache = algorithm.overlong_tokens, algorithm.overlong_cache
    if longest is None and cache:
        yield (
            f"algorithm.overlong_cache is {cache}, but without algorithm.overlong_tokens length costs nothing; set "
            "both or neither"
        )
    if longest is not None and cache > longest:
        yield (
            f"algorithm.overlong_cache is {cache}, more than algorithm.overlong_tokens ({longest}); it is the part of "
            "that length in which the reward falls"
        )
    if longest is not None and longest - cache >= tokens:
        yield (
            f"algorithm.overlong_tokens {longest} with overlong_cache {cache} lowers rewards beyond {longest - cache} "
            f"sampled tokens, which environment.budgets.tokens ({tokens}) never allows; use smaller numbers, or leave "
            "them out"
        )
    taken = {"overlong": longest is not None, "step_cost": algorithm.step_cost, "token_cost": algorithm.token_cost}
    named = algorithm.objectives
    for part in (name for name, on in taken.items() if on and named is not None and name not in named):
        yield (
            f"{algorithm.name} learns from the parts of a verdict that algorithm.objectives names, so what is taken "
            f"off the reward has no effect; add {part} to them with a weight, or leave its setting out"
        )


def _lag(config: Config) -> Iterator[str]:
    lag, algorithm = config.run.max_lag, config.algorithm
    if not lag:
        return
    if config.rollout.max_sampled_gap is not None:
        yield (
            "rollout.max_sampled_gap compares tokens with the weights that sampled them, but run.max_lag is "
            f"{lag}; leave it out, or set run.max_lag to 0"
        )
    correction, cap = algorithm.correction, algorithm.tis_cap
    # one that only drops tokens leaves the others with the weight of the policy's own, however old they are
    weighs = correction not in ("none", "opsm") and not (
        cap is None and (correction == "token_tis" or correction.endswith("_geo_mask"))
    )
    if algorithm.mode != "bypass" and not weighs:
        yield (
            f"run.max_lag is {lag}, so tokens are sampled by older weights, but in mode {algorithm.mode} with "
            f"correction {correction}{' and tis_cap off' if cap is None else ''} nothing makes up for it; use a "
            "correction that weighs tokens (token_tis), mode bypass, or lag 0"
        )
