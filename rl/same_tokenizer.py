"""Whether recorded ids mean to a model what they meant to the one that was recorded."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from transformers import AutoConfig, AutoTokenizer

from palestra.envs.errors import ConfigError
from palestra.rl.config import Config
from palestra.rl.load_config import load_config
from palestra.rl.model import resolve_model
from palestra.rollout.load_renderer import load_renderer
from palestra.rollout.renderer import Renderer
from palestra.rollout.types import Trajectory


@dataclass(frozen=True, slots=True)
class Reader:
    """A model as a reader of records: its vocabulary, its longest row, and its tokenizer."""

    folder: Path
    num_ids: int  # rows of the embeddings
    context_tokens: int | None
    renderer: Renderer

    @classmethod
    def of(cls, config: Config, folder: Path) -> Reader:
        """The model in `folder`, without its weights. Raises ConfigError."""
        trust = config.model.trust_remote_code
        try:
            settings = AutoConfig.from_pretrained(folder, trust_remote_code=trust).get_text_config()
        except (OSError, ValueError) as error:
            raise ConfigError(f"{folder}: the model's config.json cannot be read: {error}") from error
        renderer = load_renderer(folder, history=config.model.history, trust_remote_code=trust)
        limit = getattr(settings, "max_position_embeddings", None)
        return cls(folder, int(settings.vocab_size), int(limit) if limit else None, renderer)

    def check(self, trajectory: Trajectory, where: str) -> None:
        """Raise ConfigError when an id is not in the vocabulary, or when the sampled ids spell another text here."""
        for sample in trajectory.samples:
            if len(sample) and not 0 <= int(sample.ids.min()) <= int(sample.ids.max()) < self.num_ids:
                raise ConfigError(
                    f"{where}: holds the ids {int(sample.ids.min())} to {int(sample.ids.max())}, but the model in "
                    f"{self.folder} has the ids 0 to {self.num_ids - 1}; the episodes were recorded with another model"
                )
        for turn in trajectory.turns:
            sample = trajectory.samples[turn.sample]
            spelled = self.renderer.encoder.text(sample.ids[sample.sampled & (sample.turn == turn.index)].tolist())
            if not spelled.startswith(turn.text):
                raise ConfigError(
                    f"{where}: turn {turn.index} says {turn.text[:60]!r}, but its ids spell {spelled[:60]!r} with the "
                    f"tokenizer in {self.folder}; the episodes were recorded with another tokenizer"
                )


def check_recorder(place: Path, config: Config, folder: Path) -> None:
    """Compare a run that recorded with what is going to learn: environment, tokenizer and chat template.

    Of records that lie by themselves nothing is known but their ids, which `Reader.check` looks at. Raises ConfigError.
    """
    if not (place / "config.toml").is_file():
        return
    recorder = load_config(place / "config.toml")
    ours, theirs = config.environment, recorder.environment
    if (ours.name, ours.options) != (theirs.name, theirs.options):
        raise ConfigError(
            f"warm_start.recorded: {place} was recorded in the environment {theirs.name} with the options "
            f"{theirs.options}, this configuration has {ours.name} with {ours.options}; its training tasks may be held "
            "out here, so record with the same environment and options"
        )
    source = _model_folder(place, recorder)
    if source is not None and source != folder and tokenizer_digest(source) != tokenizer_digest(folder):
        raise ConfigError(
            f"warm_start.recorded: {place} was recorded with the tokenizer and chat template in {source}, and those in "
            f"{folder} differ; set model.path to the model that recorded"
        )


def tokenizer_digest(folder: Path) -> str:
    """SHA-256 of what ids mean: every id's word, and the chat template that put words between the turns."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    meaning = [sorted(tokenizer.get_vocab().items()), tokenizer.chat_template]
    return hashlib.sha256(json.dumps(meaning, ensure_ascii=True).encode()).hexdigest()


def _model_folder(place: Path, recorder: Config) -> Path | None:
    """Where the recording model lies, if that is known without asking a network."""
    made = place / "model" / "base"
    if made.is_dir():
        return made.resolve()
    path = recorder.model.path
    if path.startswith("package:") or Path(path).expanduser().is_dir():
        return resolve_model(path)
    return None
