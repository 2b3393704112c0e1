"""The budgets of an episode, checked in one fixed order before every decision."""

from __future__ import annotations

from dataclasses import dataclass

from palestra.rollout.types import TerminatedBy


@dataclass(frozen=True, slots=True)
class Budgets:
    """What one episode may use. The time limit of a single tool call belongs to the tool and is enforced there."""

    steps: int = 16  # decisions of the policy
    tokens: int = 2048  # sampled by the policy in the whole episode; observations do not count
    turn_tokens: int = 512  # sampled in one turn
    context_tokens: int = 4096  # the longest row, prompt and observations included
    wall_clock_s: float = 300.0  # from before the sandbox is asked for until the last observation
    observation_tokens: int = 1024  # of one message from a tool
    parse_errors: int = 4  # unreadable turns in a row
    step_s: float = 120.0  # the environment's answer to one action; beyond it the environment has failed
    setup_s: float = 120.0  # until the opening messages are there
    verify_s: float = 600.0  # until there is a verdict, all tries of a judge included


@dataclass(slots=True)
class Used:
    """What an episode has used so far."""

    steps: int = 0
    tokens: int = 0
    context: int = 0
    seconds: float = 0.0
    parse_errors: int = 0


def exhausted(budgets: Budgets, used: Used) -> TerminatedBy | None:
    """The first budget that leaves no room for another decision, in the order of this function; None: go on."""
    if used.parse_errors >= budgets.parse_errors:
        return TerminatedBy.PARSE_ERRORS
    if used.steps >= budgets.steps:
        return TerminatedBy.STEPS
    if used.tokens >= budgets.tokens:
        return TerminatedBy.TOKENS
    if used.seconds >= budgets.wall_clock_s:
        return TerminatedBy.WALL_CLOCK
    if used.context >= budgets.context_tokens:
        return TerminatedBy.CONTEXT
    return None


def turn_allowance(budgets: Budgets, used: Used) -> int:
    """Tokens that the next turn may sample: what the turn, the episode and the context leave, whichever is least."""
    return min(budgets.turn_tokens, budgets.tokens - used.tokens, budgets.context_tokens - used.context)
