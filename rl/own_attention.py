"""From a model's own attention to packed attention, and whether the two are the same."""

from __future__ import annotations

import torch
from transformers import PretrainedConfig, PreTrainedModel

from palestra.envs.errors import ConfigError
from palestra.rl.attention import refuse_unpackable, use_packed_attention
from palestra.rl.closeness import allowed_variation, variation
from palestra.rl.layout import Layout

COMPARED = 16
"""Last positions of the row whose next tokens' distributions are compared."""

_SHORT, _LONG = 24, 256


@torch.no_grad()
def adopt_packed_attention(model: PreTrainedModel) -> None:
    """Put the model in evaluation mode and switch it to packed attention. Raises ConfigError unless that attention is
    what the model asks for.

    One row is computed before and after the switch, first by transformers' eager attention, whose masks hold all that
    the model says; the distributions at its last positions must agree, up to a total variation of 0.001 in the mean
    (0.25 in half precision, which rounds the same model apart). The row is short, or longer than the model's sliding
    window where that is at most 256 tokens. Whatever its length, a window below the model's context has to reach
    attention in some layer: a model that puts it into its mask alone is refused, since packed rows have no mask.
    """
    refuse_unpackable(model.config)
    model.eval()
    config = model.config.get_text_config()
    window, limit = _window(config), getattr(config, "max_position_embeddings", None)
    length = window + COMPARED if window is not None and window <= _LONG else _SHORT
    length = min(length, limit or length)
    ids = (torch.arange(length, device=model.device) % config.vocab_size)[None]
    model.set_attn_implementation("eager")
    theirs = model(input_ids=ids, use_cache=False).logits[0, -COMPARED:]
    use_packed_attention(model)
    windows: set[int | None] = set()
    layout = Layout.of([0, length], [-1], model.device)
    ours = model(input_ids=ids, use_cache=False, layout=layout, windows=windows).logits[0, -COMPARED:]
    if window is not None and windows <= {None}:
        raise ConfigError(
            f"{type(model).__name__} has a sliding window of {window} tokens that no layer hands to attention, so "
            "packed rows would look further back than the model does; choose another model"
        )
    gap, allowed = variation(theirs, ours), allowed_variation(model.dtype)
    if not gap <= allowed:
        raise ConfigError(
            f"{type(model).__name__}: next tokens under packed attention and under the model's own have a total "
            f"variation of {gap:.2g}, expected at most {allowed}; it asks attention for something that is not known "
            "here. Choose another model"
        )


def _window(config: PretrainedConfig) -> int | None:
    """The sliding window, where some layer has one and rows may be longer."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    limit = getattr(config, "max_position_embeddings", None)
    if not window or (kinds is not None and "sliding_attention" not in kinds) or (limit and window >= limit):
        return None
    return int(window)
