"""A model folder's renderer: its tokenizer, its template and the ids that end a turn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import cast

from transformers import AutoTokenizer

from palestra.envs.errors import ConfigError
from palestra.rollout.renderer import History, Renderer
from palestra.rollout.tokens import ChatTokenizer


def load_renderer(folder: str | Path, *, history: History = "append", trust_remote_code: bool = False) -> Renderer:
    """The renderer of the tokenizer in `folder`. Raises ConfigError when the folder cannot be used for chat."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder}: no tokenizer can be loaded from here: {error}") from error
    if not tokenizer.is_fast:
        raise ConfigError(f"{folder}: its tokenizer has no fast (tokenizer.json) form, which exact ids need")
    chat = cast(ChatTokenizer, tokenizer)
    return Renderer(chat, end_ids(Path(folder), tokenizer.eos_token_id), history=history)


def end_ids(folder: Path, tokenizer_end: int | None) -> tuple[int, ...]:
    """Every id that ends a turn: the generation settings name several for some models, the tokenizer only one.

    The tokenizer's comes first: it is what a chat template closes a turn with.
    """
    ids = [] if tokenizer_end is None else [tokenizer_end]
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        if path.is_file():
            found = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
            ids += found if isinstance(found, list) else [] if found is None else [found]
    if not ids:
        raise ConfigError(f"{folder}: neither the tokenizer nor the generation settings name an end token")
    return tuple(dict.fromkeys(ids))
