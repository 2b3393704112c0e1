"""Attention over the forest of a row, registered with transformers under one name.

A token sees the segments above its own, and its own up to itself. On CUDA in half precision one variable-length flash
kernel serves the whole row; elsewhere `tree_attention` does. No mask of [tokens, tokens] is ever made.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel

from palestra.envs.errors import ConfigError
from palestra.rl.layout import Layout, VarLen
from palestra.rl.tree_attention import tree_attention

NAME = "palestra_packed"

_KINDS = {"full_attention", "sliding_attention"}
_SAME_AT_ANY_LENGTH = {"default", "linear", "yarn", "llama3", "proportional"}
"""Rotary embeddings whose frequencies depend on the model alone."""


def use_packed_attention(model: PreTrainedModel) -> None:
    """Switch a model to packed attention. Raises ConfigError for layers that a row of several members would mix up."""
    refuse_unpackable(model.config)
    AttentionInterface.register(NAME, _packed_attention)
    model.set_attn_implementation(NAME)


def refuse_unpackable(config: PretrainedConfig) -> None:
    """Raise ConfigError unless every layer is causal attention that this file computes exactly, with positions that
    mean the same in every row: neighbours must not change them."""
    config = config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if not kinds <= _KINDS:
        raise ConfigError(
            f"{config.model_type} has layers {sorted(kinds - _KINDS)}; packed rows need attention layers only, since "
            "other layers carry state across members. Choose a model of attention layers"
        )
    if getattr(config, "attn_logit_softcapping", None):
        raise ConfigError(f"{config.model_type} caps attention logits, which no kernel here does; choose another model")
    if not getattr(config, "is_causal", True):
        raise ConfigError(f"{config.model_type} is not causal; choose a causal language model")
    for rope in _ropes(config):
        kind = _rope_type(rope)
        if kind not in _SAME_AT_ANY_LENGTH and kind != "longrope":
            raise ConfigError(
                f"{config.model_type} has rotary embeddings of type {kind!r}, whose frequencies may depend on the "
                "longest row of a call, so that members of a packed row would change each other; choose a model with "
                f"one of {', '.join(sorted(_SAME_AT_ANY_LENGTH))}, or with longrope"
            )


def switch_length(config: PretrainedConfig) -> int | None:
    """Longest row for which rotary frequencies are the same whatever else is computed with it; None when all are.

    With longrope, one longer member would switch the whole call to other frequencies (transformers'
    `dynamic_rope_update`).
    """
    config = config.get_text_config()
    long = [rope for rope in _ropes(config) if _rope_type(rope) == "longrope"]
    if not long:
        return None
    named = "original_max_position_embeddings"
    other = getattr(config, named, None) or config.max_position_embeddings
    return min(int(rope.get(named) or other) for rope in long)


def _ropes(config: PretrainedConfig) -> list[dict[str, Any]]:
    """The rotary settings: those of the model, or those of each kind of layer."""
    settings = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in settings.values() if isinstance(value, dict)]
    return nested or [settings]


def _rope_type(rope: dict[str, Any]) -> str:
    return str(rope.get("rope_type") or rope.get("type") or "default")


def _packed_attention(
    module: nn.Module,
    query: Tensor,  # [1, heads, T, head_dim]
    key: Tensor,  # [1, key_value_heads, T, head_dim]
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,  # never applied: the policy that is trained is the policy that samples
    sliding_window: int | None = None,
    layout: Layout | None = None,
    windows: set[int | None] | None = None,  # told what each layer looks back at, when somebody asks
    **kwargs: Any,
) -> tuple[Tensor, None]:
    if layout is None or attention_mask is not None or kwargs.get("s_aux") is not None:
        raise ConfigError(
            f"{type(module).__name__} does not hand on the layout of a packed row, passes a mask of its own or uses "
            "attention sinks; packed rows cannot be computed exactly with this model. Choose another one"
        )
    if not getattr(module, "is_causal", True) or kwargs.get("is_causal") is False:
        raise ConfigError(
            f"{type(module).__name__} looks at tokens that come later; choose a causal language model, or switch that "
            "off in its config.json (use_bidirectional_attention)"
        )
    if windows is not None:
        windows.add(sliding_window)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if layout.varlen is not None and query.dtype in (torch.bfloat16, torch.float16):
        q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))  # [T, heads, head_dim]
        return _by_flash(q, k, v, scale, sliding_window, layout.varlen)[None], None
    # in half precision, products of this many terms are summed in float32, as the flash kernel does
    dtype = torch.promote_types(query.dtype, torch.float32)
    q, k, v = (tensor[0].to(dtype) for tensor in (query, key, value))
    return tree_attention(q, k, v, scale, sliding_window, layout.segments).to(query.dtype)[None], None


def _by_flash(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, rows: VarLen) -> Tensor:
    """[T, heads, head_dim] by one kernel for all segments."""
    if rows.gathered is not None:
        k, v = k.index_select(0, rows.gathered), v.index_select(0, rows.gathered)
    output = varlen_attn(
        q.contiguous(),
        k.contiguous(),
        v.contiguous(),
        rows.queries,
        rows.keys,
        rows.longest_queries,
        rows.longest_keys,
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=q.shape[1] != k.shape[1],
    )
    assert isinstance(output, Tensor)  # for the type checker: no auxiliary output was asked for
    return output
