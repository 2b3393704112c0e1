"""A real check that an engine's log-probabilities are those of the distribution it samples from."""

from __future__ import annotations

import math
from collections.abc import Mapping

from palestra.envs.errors import EngineError

TOLERANCE = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1}
"""Largest gap that rounding explains, natural logarithm. The same prompt may take another kernel the second time."""


def check_tempered(
    table: Mapping[int, float], token: int, reported: float, temperature: float, scored: float, dtype: str
) -> None:
    """Raise EngineError unless `reported` is log-softmax(logits / temperature) at `token`.

    table: log-probabilities of the whole vocabulary at temperature 1 after some prompt; token, reported: what the
    engine sampled after the same prompt at `temperature`, and its word for it; scored: its word for that token as part
    of a prompt, which must be that at temperature 1. Where both readings coincide within the tolerance (a flat
    distribution) nothing can be told and nothing is refused.
    """
    tolerance = TOLERANCE.get(dtype, TOLERANCE["bfloat16"])
    expected = table[token] / temperature - _log_sum_exp([value / temperature for value in table.values()])
    if not abs(reported - expected) <= tolerance:  # so that NaN fails
        raise EngineError(
            f"at temperature {temperature} the engine reports {reported:.5f} for a token of log-probability "
            f"{expected:.5f} ({table[token]:.5f} at temperature 1): its log-probabilities are not those it samples "
            f"from. It must run with logprobs_mode=processed_logprobs and no filter"
        )
    if not abs(scored - table[token]) <= tolerance:
        raise EngineError(
            f"the engine scores a prompt token {scored:.5f}, but samples it with {table[token]:.5f} at temperature 1; "
            f"its scores cannot be compared with the trainer's"
        )


def _log_sum_exp(values: list[float]) -> float:
    top = max(values)
    return top + math.log(sum(math.exp(value - top) for value in values))
