"""A small policy made on the spot: a Llama with random weights and a byte-level tokenizer trained on given texts.

For machines without a model hub: it starts from nothing, so it needs a warm start by imitation before it can explore.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from palestra.envs.errors import ConfigError
from palestra.rl.config import NewModel
from palestra.rl.gguf import no_progress_bars

START, END, PAD = "<|im_start|>", "<|im_end|>", "<|pad|>"

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True, slots=True)
class NewPolicySettings:
    """Shape of the policy. The defaults give about 1.1 million parameters."""

    hidden_size: int = 128
    intermediate_size: int = 512
    layers: int = 4
    heads: int = 4
    """Each with its own keys and values."""
    vocabulary: int = 512
    """Ids at most; a small corpus yields fewer."""
    context_tokens: int = 512
    rope_theta: float = 10000.0
    initializer_range: float = 0.02
    """Standard deviation of the first weights."""
    head_scale: float = 1.0
    """Factor on the head's first weights. The head stays frozen in reinforcement learning with LoRA: with a larger one,
    small changes of the body are enough to make the policy sure."""
    pieces: str = "[0-9]|[^0-9]+"
    """Regular expression of the pieces of text that tokens never cross; digits one by one, so that the same digit is
    the same token in every number."""
    extra_tokens: tuple[str, ...] = ("<tool_call>", "</tool_call>")
    """Words that are one id each, such as the tags of a tool call."""

    def __post_init__(self) -> None:
        if self.hidden_size % self.heads or self.hidden_size // self.heads < 32:
            raise ConfigError(
                f"new policy: hidden_size is {self.hidden_size} and heads {self.heads}; heads divide hidden_size into "
                "at least 32 each, since engines serve no narrower ones"
            )
        if self.vocabulary < 256 + 3 + len(self.extra_tokens):
            raise ConfigError(
                f"new policy: vocabulary is {self.vocabulary}; 256 bytes and the control tokens need more"
            )


def check_new_policy(settings: NewModel) -> None:
    """Raise ConfigError when no policy can be made of these settings."""
    NewPolicySettings(**settings.model_dump())
    try:
        Regex(settings.pieces)
    except Exception as error:  # tokenizers raises nothing more special
        raise ConfigError(f"model.new.pieces is {settings.pieces!r}, no regular expression: {error}") from error


@no_progress_bars()
def new_policy(folder: Path, settings: NewPolicySettings, texts: Iterable[str], *, seed: int) -> Path:
    """Write model and tokenizer as a Hugging Face folder: complete or absent. The same arguments give the same bytes.

    `texts` should look like what the policy will read and write; any other text still encodes, byte by byte. An
    existing folder is replaced.
    """
    tokenizer = _tokenizer(settings, texts)
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        tokenizer.save_pretrained(draft)
        _model(settings, tokenizer, seed).save_pretrained(draft)
        draft.chmod(0o755)
        if folder.exists():
            shutil.rmtree(folder)
        os.rename(draft, folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return folder


def _tokenizer(settings: NewPolicySettings, texts: Iterable[str]) -> PreTrainedTokenizerFast:
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(settings.pieces), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=settings.vocabulary - len(settings.extra_tokens),
        special_tokens=[START, END, PAD],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    core.add_tokens([AddedToken(word, normalized=False) for word in settings.extra_tokens])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=END, pad_token=PAD)
    tokenizer.chat_template = CHATML
    return tokenizer


def _model(settings: NewPolicySettings, tokenizer: PreTrainedTokenizerFast, seed: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        hidden_size=settings.hidden_size,
        intermediate_size=settings.intermediate_size,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        vocab_size=len(tokenizer),
        max_position_embeddings=settings.context_tokens,
        rope_parameters={"rope_type": "default", "rope_theta": settings.rope_theta},
        tie_word_embeddings=False,
        initializer_range=settings.initializer_range,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    model.lm_head.weight.data.mul_(settings.head_scale)
    return model
