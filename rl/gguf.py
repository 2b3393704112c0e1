"""A model out of an installed Python package that holds a GGUF file: dequantised once, kept as a float32 folder."""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
from transformers.utils import logging

from palestra.envs.errors import ConfigError


def folder_of_package(package: str, cache: Path) -> Path:
    """The cached folder of a package's model, made on first use: complete or absent. Raises ConfigError."""
    file = _gguf_file(package)
    folder = cache / "models" / f"{package}-{_version(package)}-{file.stem}-float32"
    if not (folder / "config.json").is_file():
        _convert(file, folder)
    return folder


def _gguf_file(package: str) -> Path:
    spec = importlib.util.find_spec(package.replace("-", "_"))  # found, not imported: it may start a runtime of its own
    if spec is None or spec.origin is None:
        raise ConfigError(
            f"model.path package:{package}: the package is not installed; run `pip install {package} gguf`"
        )
    files = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if len(files) != 1:
        raise ConfigError(f"model.path package:{package}: expected one GGUF file in the package, found {len(files)}")
    return files[0]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """transformers draws a bar for every load; the program's own screen says what is going on."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


@no_progress_bars()
def _convert(file: Path, folder: Path) -> None:
    """Dequantise into a folder beside the place and rename, so that two processes may do it at once."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        model = AutoModelForCausalLM.from_pretrained(
            file.parent,
            gguf_file=file.name,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.float32,
        )
        model.save_pretrained(draft)
        AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(draft)
        draft.chmod(0o755)
        os.rename(draft, folder)
    except (ImportError, OSError) as error:
        if not (folder / "config.json").is_file():  # else another process was faster, and its folder is as good
            raise ConfigError(f"{file}: cannot be made into a model folder at {folder}: {error}") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
