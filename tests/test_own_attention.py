"""Models whose attention or positions a packed row would not honour are refused before anything is trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PhimoeConfig,
    PhimoeForCausalLM,
    PreTrainedModel,
)

from palestra.envs.errors import ConfigError
from palestra.rl.attention import switch_length
from palestra.rl.learner import Learner, LearnerSettings
from palestra.rl.model import check_context
from palestra.rl.own_attention import adopt_packed_attention

SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 50,
    "initializer_range": 0.2,
    "pad_token_id": 1,
    "eos_token_id": 1,
    "bos_token_id": 1,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
    "original_max_position_embeddings": 64,
    "partial_rotary_factor": 1.0,
}


def gemma3(**settings: Any) -> PreTrainedModel:
    kinds = ["sliding_attention", "full_attention"]
    return Gemma3ForCausalLM(Gemma3TextConfig(**SHAPE, head_dim=8, layer_types=kinds, **settings))


def phimoe(window: int) -> PreTrainedModel:
    few = {"num_local_experts": 4, "num_experts_per_tok": 2, "max_position_embeddings": 1024}
    return PhimoeForCausalLM(PhimoeConfig(**SHAPE, **few, sliding_window=window))


def mistral(window: int) -> PreTrainedModel:
    return MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=window, max_position_embeddings=1024))


def llama(**settings: Any) -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**SHAPE, max_position_embeddings=256, **settings))


def phi3() -> PreTrainedModel:
    lengths = {"max_position_embeddings": 256, "original_max_position_embeddings": 64}
    return Phi3ForCausalLM(Phi3Config(**SHAPE, **lengths, rope_parameters=dict(LONGROPE)))


@pytest.mark.parametrize("window", [6, 512])
def test_a_window_that_is_in_the_mask_alone_is_refused(window: int) -> None:
    with pytest.raises(ConfigError, match=f"sliding window of {window} tokens that no layer hands"):
        adopt_packed_attention(phimoe(window))


@pytest.mark.parametrize("make", [lambda: mistral(6), lambda: mistral(512), lambda: gemma3(sliding_window=6)])
def test_a_window_that_attention_is_given_is_computed(make: Callable[[], PreTrainedModel]) -> None:
    torch.manual_seed(0)
    model, ids = make().eval(), list(range(2, 42))
    model.set_attn_implementation("eager")
    with torch.no_grad():
        own = torch.log_softmax(model(torch.tensor([ids])).logits[0], -1)[torch.arange(39), torch.tensor(ids[1:])]
    found = Learner(model, LearnerSettings(train="full")).score(ids)
    np.testing.assert_allclose(found, own.numpy(), atol=1e-4)


def test_a_window_as_long_as_the_context_is_none() -> None:
    adopt_packed_attention(phimoe(1024))


def test_attention_to_later_tokens_is_refused() -> None:
    with pytest.raises(ConfigError, match="tokens that come later"):
        adopt_packed_attention(gemma3(sliding_window=6, use_bidirectional_attention=True))


def test_anything_else_that_is_said_in_the_mask_is_refused() -> None:
    class Nearsighted(LlamaForCausalLM):
        def forward(self, input_ids: Any, **kwargs: Any) -> Any:
            if self.config._attn_implementation == "eager":
                near = torch.ones(input_ids.shape[1], input_ids.shape[1]).tril().triu(-3)
                kwargs["attention_mask"] = ((1 - near) * torch.finfo(torch.float32).min)[None, None]
            return super().forward(input_ids, **kwargs)

    config = llama().config
    assert isinstance(config, LlamaConfig)
    with pytest.raises(ConfigError, match="total variation"):
        adopt_packed_attention(Nearsighted(config))


@pytest.mark.parametrize("kind", ["dynamic", "unheard-of"])
def test_rotary_positions_that_depend_on_the_longest_row_are_refused(kind: str) -> None:
    model = llama()
    model.config.rope_parameters = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0}
    with pytest.raises(ConfigError, match=kind):
        adopt_packed_attention(model)
    model.config.rope_parameters = {"full_attention": {"rope_type": "default"}, "other": {"rope_type": kind}}
    with pytest.raises(ConfigError, match=kind):
        adopt_packed_attention(model)


def test_longrope_is_taken_for_rows_that_never_switch_it() -> None:
    model = phi3()
    check_context(model, 64, "environment.budgets.context_tokens")
    with pytest.raises(ConfigError, match=r"context_tokens is 65, but beyond 64.*use at most 64"):
        check_context(model, 65, "environment.budgets.context_tokens")
    learner = Learner(model, LearnerSettings(train="full"))
    assert len(learner.score([3] * 64)) == 63
    with pytest.raises(ConfigError, match="beyond 64 this model"):
        learner.score([3] * 70)


def test_the_switch_is_found_per_kind_of_layer() -> None:
    config = phi3().config
    config.rope_parameters = {
        "sliding_attention": {"rope_type": "default"},
        "full_attention": {**LONGROPE, "original_max_position_embeddings": 32},
    }
    assert switch_length(config) == 32
    assert switch_length(llama().config) is None


def test_a_model_is_the_same_module_with_dropout_off_afterwards() -> None:
    model = llama(attention_dropout=0.5).train()
    adopt_packed_attention(model)
    assert not any(module.training for module in model.modules() if isinstance(module, nn.Module))
