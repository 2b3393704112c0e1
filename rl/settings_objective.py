"""The part of [algorithm] that says what is minimised, given the credit."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, PlainSerializer

from palestra.rl.settings import Positive, PositiveFloat, Section

Coefficient = Annotated[float, Field(ge=0, allow_inf_nan=False)]
OrOff = Annotated[
    PositiveFloat | None,
    BeforeValidator(lambda value: None if value == "off" else value),
    PlainSerializer(lambda value: "off" if value is None else value),
]
"""A number, or None, which files call "off": TOML has no null, and leaving the setting out means its default."""


class ObjectiveSettings(Section):
    """Surrogate, ratio, correction, KL, entropy, aggregation. docs/algorithms/objectives.md has the formulas."""

    surrogate: Literal[
        "ppo", "cispo_two_sided", "cispo_upper", "reinforce", "importance_sampling", "dppo_tv", "dppo_kl"
    ] = "ppo"
    """What is minimised for a token of known ratio and advantage."""
    ratio: Literal["token", "turn", "sequence"] = "token"
    """What the ratio is of: the token, or the geometric mean over its turn or trajectory ("sequence" is GSPO)."""
    mode: Literal["on_policy", "bypass", "decoupled", "decoupled_loglinear"] = "on_policy"
    """What the ratio is taken to: the policy itself, what sampled ("bypass"), or the policy when the batch was frozen,
    recomputed ("decoupled") or interpolated by the age of the token."""
    clip_low: PositiveFloat = 0.2
    """The policy's ratio is clipped below 1 - clip_low ("ppo", "cispo_two_sided")."""
    clip_high: PositiveFloat = 0.28
    """The policy's ratio is clipped above 1 + clip_high ("ppo", "cispo_two_sided")."""
    dual_clip: OrOff = 3.0
    """Bound on the loss of tokens with negative advantage; above 1, or "off". Of "ppo" alone."""
    cispo_max_ratio: PositiveFloat | None = None
    """Cap of "cispo_upper" on the ratio itself, not a distance from 1: 5.0 caps at 5. Required by it."""
    dppo_low: PositiveFloat | None = None
    """Divergence beyond which a token of negative advantage that became rarer is dropped. None: 0.2 in total variation
    ("dppo_tv"), 0.05 in KL ("dppo_kl")."""
    dppo_high: PositiveFloat | None = None
    """Divergence beyond which a token of positive advantage that became likelier is dropped. None: as dppo_low."""
    dppo_max_ratio: OrOff = 20.0
    """Cap on the ratio itself in "dppo_tv" and "dppo_kl", or "off"."""
    correction: Literal[
        "none",
        "token_tis",
        "token_clamp",
        "icepop",
        "turn_tis",
        "turn_mask",
        "turn_geo_tis",
        "turn_geo_mask",
        "seq_tis",
        "seq_mask",
        "seq_geo_tis",
        "seq_geo_mask",
        "opsm",
    ] = "token_tis"
    """How the mismatch of trainer and engine is corrected, by rho = trainer / engine of the token, turn or sequence."""
    tis_cap: OrOff = 2.0
    """Cap of the importance weight trainer / engine, 1 or more. "off": "token_tis" corrects nothing, and what a
    geometric mask keeps is weighed by 1 instead of by token TIS."""
    correction_low: PositiveFloat | None = None
    """Smallest rho that "token_clamp", "icepop" and the masks let through; below 1."""
    correction_high: PositiveFloat | None = None
    """Largest rho that "token_clamp", "icepop" and the masks let through; above 1."""
    opsm_delta: PositiveFloat | None = None
    """"opsm" drops tokens of negative advantage where the trajectory's mean log(engine / policy) exceeds this."""
    kl: Literal["none", "reward_k1", "k1", "k2", "k3_score", "k3_is", "k3_is_detached", "k3"] = "none"
    """How drift from the reference policy is counted: in the reward, or as a term of the loss."""
    kl_coefficient: Coefficient = 0.0
    """Weight of the KL."""
    entropy_coefficient: Coefficient = 0.0
    """Weight of the entropy bonus on action tokens, of the tempered distribution."""
    aggregation: Literal[
        "token-mean",
        "seq-mean-token-mean",
        "seq-mean-token-sum",
        "seq-mean-token-sum-norm",
        "prompt-mean-token-mean",
        "traj-mean-token-mean",
        "token-sum",
    ] = "token-mean"
    """How token losses become one number, with counts over the whole optimiser step."""
    count_without_signal: bool = False
    """Count groups that teach nothing in the denominators of "aggregation", though they are in no sum."""
    length_norm_tokens: Positive | None = None
    """The constant of "seq-mean-token-sum-norm"."""
