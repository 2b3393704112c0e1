"""Tokenizers of several kinds and chat templates of several families, in miniature; made in under a second each."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tiny_models import CHATML, END, START, _made_up_text, make_tokenizer

CONTROLS = ["<unk>", "<s>", "</s>", START, END]


def wrapped(core: Tokenizer, unknown: str) -> PreTrainedTokenizerFast:
    made = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=END, unk_token=unknown)
    made.chat_template = CHATML
    return made


def texts() -> list[str]:
    return [*_made_up_text()[:200], "system\nuser\nassistant\ntool\n<|im_end|>"]


def unigram(scheme: str) -> PreTrainedTokenizerFast:
    """Like sentencepiece: spaces are part of words, compatibility forms are folded, controls are in the vocabulary."""
    core = Tokenizer(models.Unigram())
    core.normalizer = normalizers.NFKC()
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    core.decoder = decoders.Metaspace(prepend_scheme=scheme)
    core.train_from_iterator(
        texts(),
        trainers.UnigramTrainer(vocab_size=400, special_tokens=CONTROLS, unk_token="<unk>", show_progress=False),
    )
    return wrapped(core, "<unk>")


def wordpiece() -> PreTrainedTokenizerFast:
    """Words and their ends, lower case, no bytes: what the vocabulary lacks is unknown."""
    core = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    core.normalizer = normalizers.BertNormalizer(lowercase=True)
    core.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    core.decoder = decoders.WordPiece()
    controls = ["[UNK]", "[CLS]", "[SEP]", START, END]
    core.train_from_iterator(
        texts(), trainers.WordPieceTrainer(vocab_size=500, special_tokens=controls, show_progress=False)
    )
    return wrapped(core, "[UNK]")


def folded_words() -> PreTrainedTokenizerFast:
    """Whole words after compatibility folding: full-width characters that spell a control token become it."""
    words = {word: i for i, word in enumerate(["[UNK]", END, START, "<", "|im_end|>", "ok", "user", "assistant", "§"])}
    core = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    core.normalizer = normalizers.NFKC()
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.add_special_tokens([AddedToken(each, normalized=False, special=True) for each in ("[UNK]", END, START, "§")])
    return wrapped(core, "[UNK]")


def sentencepiece_bpe() -> PreTrainedTokenizerFast:
    """Merges over spaces as characters, and bytes for what is unknown; a mark where a conversation begins."""
    core = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    words = [word for text in texts() for word in text.split(" ")]
    plain = [f"<0x{i:02X}>" for i in range(256)]
    core.train_from_iterator(
        words, trainers.BpeTrainer(vocab_size=700, special_tokens=[*CONTROLS, *plain], show_progress=False)
    )
    full = json.loads(core.to_str())
    full["added_tokens"] = [token for token in full["added_tokens"] if token["content"] not in plain]
    return wrapped(Tokenizer.from_str(json.dumps(full)), "<unk>")


KINDS: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    "byte-level": lambda: make_tokenizer(600),
    "unigram, first": lambda: unigram("first"),
    "unigram, always": lambda: unigram("always"),
    "wordpiece": wordpiece,
    "folded words": folded_words,
    "sentencepiece bpe": sentencepiece_bpe,
}


@dataclass(frozen=True)
class Family:
    """A chat template and the tokens that it is written with."""

    template: str
    controls: tuple[str, ...]
    end: str  # as the tokenizer says
    more_ends: tuple[str, ...] = ()
    eats_space: tuple[str, ...] = ()  # tokens with rstrip

    def tokenizer(self) -> PreTrainedTokenizerFast:
        made = make_tokenizer(600)
        tokens = [AddedToken(each, special=True, rstrip=each in self.eats_space) for each in self.controls]
        made.add_special_tokens({"additional_special_tokens": tokens, "bos_token": "<s>", "eos_token": self.end})
        made.chat_template = self.template
        return made

    def end_ids(self, made: PreTrainedTokenizerFast) -> list[int]:
        return [made.convert_tokens_to_ids(each) for each in (self.end, *self.more_ends)]


_ALTERNATE = (
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
)
FAMILIES = {
    # strips contents, writes what tools say as JSON, and ends turns with a token that the tokenizer does not name
    "headers": Family(
        "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ 'ipython' if m.role == 'tool' else m.role }}"
        "<|end_header_id|>{{ '\n\n' }}{% if m.role == 'tool' %}{{ m.content | tojson }}{% else %}"
        "{{ m.content | trim }}{% endif %}<|eot_id|>{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>{{ '\n\n' }}{% endif %}",
        ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>"),
        "<|end_of_text|>",
        ("<|eom_id|>",),
    ),
    # results in a row are one user message
    "merged results": Family(
        "{% for m in messages %}{% if m.role == 'tool' %}"
        "{% if messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
        "{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
        "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>{{ '\n' }}{% endif %}"
        "{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
        (),
        END,
    ),
    # knows neither system nor tool messages, nor two user messages in a row
    "strict alternation": Family(
        "{{ bos_token }}{% for m in messages %}" + _ALTERNATE + "{% if m.role == 'user' %}"
        "{{ '[INST] ' + m.content + ' [/INST]' }}{% elif m.role == 'assistant' %}{{ m.content + eos_token }}"
        "{% else %}{{ raise_exception('only user and assistant') }}{% endif %}{% endfor %}",
        ("[INST]", "[/INST]"),
        "</s>",
    ),
    "no system, stripped": Family(
        "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "{% for m in messages %}" + _ALTERNATE + "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role)"
        " + '\n' + m.content | trim + '<end_of_turn>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}",
        ("<start_of_turn>", "<end_of_turn>"),
        "<eos>",
    ),
    # a turn ends with the token that opens the next one
    "opening ends": Family(
        "{% for m in messages %}{{ '<|' + ('observation' if m.role == 'tool' else m.role) + '|>\n' + m.content }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}",
        ("<|user|>", "<|observation|>", "<|assistant|>", "<|system|>"),
        "<|endoftext|>",
        ("<|user|>", "<|observation|>"),
    ),
    # control tokens that swallow the newline behind them, and an end that is only written when nothing follows
    "swallowed newlines": Family(
        "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}",
        ("<|user|>", "<|system|>", "<|tool|>", "<|assistant|>", "<|end|>"),
        "<|endoftext|>",
        eats_space=("<|end|>", "<|user|>"),
    ),
    # a system message is silently left out
    "silent system": Family(
        "{% for m in messages %}{% if m.role != 'system' %}{{ '<|im_start|>' + m.role + '\n' + m.content }}<|im_end|>"
        "{{ '\n' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
        (),
        END,
    ),
    # prints the name of the tool that answers
    "named tools": Family(
        "{% for m in messages %}{{ '<|im_start|>' + m.role + (' ' + m.name if m.name else '') + '\n' + m.content }}"
        "<|im_end|>{{ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
        (),
        END,
    ),
}
