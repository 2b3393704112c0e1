"""Models small enough for every test: random Llamas with a tokenizer and a ChatML template, made in under a second."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from palestra.rollout.adapters import Adapter, Factors

START, END, PAD = "<|im_start|>", "<|im_end|>", "<|pad|>"
START_ID, END_ID, PAD_ID = 0, 1, 2

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tiny(
    folder: Path | str,
    *,
    hidden: int = 256,
    layers: int = 3,
    heads: int = 8,
    vocab: int = 2048,
    seed: int = 0,
    tie: bool = True,
    context: int = 2048,
) -> Path:
    """A random Llama saved in float32 with its tokenizer: 2.9M parameters as given, 41k with `make_tinier`.

    The same arguments give the same bytes. Heads are at least 32 wide, since vLLM serves no narrower ones, and two
    query heads share one key-value head.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer(vocab)
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 2),
        head_dim=max(32, hidden // heads),
        vocab_size=vocab,
        max_position_embeddings=context,
        initializer_range=0.05,
        tie_word_embeddings=tie,
        bos_token_id=None,
        eos_token_id=END_ID,
        pad_token_id=PAD_ID,
        dtype="float32",
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def make_tinier(folder: Path | str, *, seed: int = 0, tie: bool = True) -> Path:
    """The smallest: 2 layers, hidden 32, 330 tokens."""
    return make_tiny(folder, hidden=32, layers=2, heads=2, vocab=330, seed=seed, tie=tie, context=512)


def make_tokenizer(vocab: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE of exactly `vocab` entries: 3 special tokens, 256 bytes, and merges of made-up words."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[START, END, PAD],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    core.train_from_iterator(_made_up_text(), trainer)
    if core.get_vocab_size() != vocab:
        raise ValueError(f"the made-up text yields {core.get_vocab_size()} tokens, not {vocab}; ask for fewer")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=END, pad_token=PAD)
    tokenizer.chat_template = CHATML
    return tokenizer


def random_adapter(model_folder: Path | str, rank: int = 4, seed: int = 0, scale: float = 1.0) -> Adapter:
    """Non-zero factors for every linear layer of a saved model but its head; scale 1 changes weights by a tenth."""
    rng = np.random.default_rng(seed)
    factors: dict[str, Factors] = {}
    for name, (rows, columns) in sorted(linear_shapes(Path(model_folder)).items()):
        a = rng.standard_normal((rank, columns)).astype(np.float32) / np.float32(np.sqrt(columns))
        b = rng.standard_normal((rows, rank)).astype(np.float32) * np.float32(0.1 / np.sqrt(rank))
        factors[name] = Factors(a, b, scale)
    return Adapter(factors)


def linear_shapes(model_folder: Path) -> dict[str, tuple[int, int]]:
    """[out, in] of every linear layer but the head, by module name, from the saved weights alone."""
    shapes: dict[str, tuple[int, int]] = {}
    for path in sorted(model_folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as weights:
            for key in weights.keys():  # noqa: SIM118  (not a mapping)
                shape = weights.get_slice(key).get_shape()
                if len(shape) == 2 and key.endswith("_proj.weight"):
                    shapes[key.removesuffix(".weight")] = (shape[0], shape[1])
    return shapes


def num_parameters(model_folder: Path) -> int:
    """Parameters in the saved weights; a tied head counts once."""
    total = 0
    for path in sorted(model_folder.glob("*.safetensors")):
        header_bytes = int.from_bytes(path.read_bytes()[:8], "little")
        header = json.loads(path.read_bytes()[8 : 8 + header_bytes])
        total += sum(int(np.prod(entry["shape"])) for key, entry in header.items() if key != "__metadata__")
    return total


def _made_up_text() -> list[str]:
    rng = random.Random(0)
    syllables = [c + v for c in "bcdfghjklmnprstvwz" for v in ("a", "e", "i", "o", "u", "er", "an", "in")]
    words = ["".join(rng.choices(syllables, k=rng.randint(1, 4))) for _ in range(4000)]
    sentences = ["the answer is 12 . lookup oak and add 7 to 35 .", "system", "user", "assistant", "tool", "hello"]
    return [" ".join(rng.choices(words, k=12)) for _ in range(800)] + sentences * 50
