"""The policy that a run starts from: a model that exists, or one made on the spot, and its warm start by imitation.

What was made is kept in the cache under a digest of everything that it was made from, so that the next run with the
same settings starts at once; the run folder gets a copy of its own.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import json
import shutil
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import palestra.envs
import palestra.rl
import palestra.rollout
from palestra.envs.environment import Taskset
from palestra.rl.config import Config
from palestra.rl.lora import read_peft_folder
from palestra.rl.model import cache_folder, resolve_model
from palestra.rl.new_policy import NewPolicySettings, new_policy
from palestra.rl.records import records_digest
from palestra.rl.warm_start import warm_start
from palestra.rollout.adapters import Adapter
from palestra.rollout.seeds import derive_seed

BASE, ADAPTER, MERGED = "base", "adapter", "merged"
TOKENIZER_EPISODES = 2000


@dataclass(frozen=True, slots=True)
class Policy:
    """Base weights in a folder that engines load too, and the adapter to start from."""

    folder: Path
    start: Adapter | None
    made_s: float  # seconds spent on making it now; 0 when it was there


async def prepare_policy(config: Config, taskset: Taskset, place: Path | None, say: Callable[[str], None]) -> Policy:
    """The policy in `place`, made when it is not there yet. `place` is complete or absent.

    `place` belongs to one run and its settings. Who only looks has none, and takes the policy from the cache, where it
    is found by everything that it was made from.
    """
    if config.model.path != "new" and not config.warm_start.wanted:
        initial = config.model.lora.initial
        return Policy(resolve_model(config.model.path), read_peft_folder(Path(initial)) if initial else None, 0.0)
    if place is not None and _is_made(place):
        return _read(config, place, 0.0)
    begun = time.monotonic()
    cached = cache_folder() / "policies" / digest(config)
    async with _alone(cached, say):  # two runs that start together make it once
        if _is_made(cached):
            say(f"policy: made before with these settings, taken from {cached}")
        else:
            await _make(config, taskset, cached, say)
    if place is not None:
        _copy(cached, place)
    return _read(config, place or cached, time.monotonic() - begun)


@asynccontextmanager
async def _alone(place: Path, say: Callable[[str], None]) -> AsyncIterator[None]:
    """While nobody else on this file system makes the same. The lock dies with its process."""
    place.parent.mkdir(parents=True, exist_ok=True)
    with place.with_name(f".{place.name}.lock").open("w", encoding="utf-8") as file:
        waiting = False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not waiting:
                    say(f"policy: another process is making the same; waiting for {place}")
                waiting = True
                await asyncio.sleep(0.5)
        yield


async def _make(config: Config, taskset: Taskset, place: Path, say: Callable[[str], None]) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    draft = place.with_name(f".{place.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir()
    if config.model.path == "new":
        base = new_policy(
            draft / "new",
            NewPolicySettings(**config.model.new.model_dump()),
            _texts(taskset, config.run.seed),
            seed=config.run.seed,
        )
        say(f"policy: a new one, {config.model.new.layers} layers of {config.model.new.hidden_size}")
    else:
        base = resolve_model(config.model.path)
    if config.warm_start.wanted:
        await warm_start(config, taskset, base, draft, say)
    elif config.model.path == "new":
        base.rename(draft / BASE)
    shutil.rmtree(draft / "new", ignore_errors=True)
    draft.rename(place)


def _read(config: Config, place: Path, seconds: float) -> Policy:
    base = place / BASE if (place / BASE).is_dir() else resolve_model(config.model.path)
    start = read_peft_folder(place / ADAPTER) if (place / ADAPTER).is_dir() else None
    return Policy(base, start, seconds)


def _texts(taskset: Taskset, seed: int) -> list[str]:
    """What the tokenizer is trained on: prompts and demonstrations of training tasks."""
    tasks = taskset.split("train")
    texts = []
    for number in range(TOKENIZER_EPISODES):
        task = tasks[derive_seed(seed, "tokenizer", number) % len(tasks)]
        texts += [message.content for message in task.prompt]
        texts += taskset.demonstration(task, derive_seed(seed, "tokenizer", number, "way"))
    return texts


def digest(config: Config) -> str:
    """Of everything that the policy is made from: settings, and the project's own source."""
    sha = hashlib.sha256()
    values = config.model_dump(include={"model", "warm_start", "environment"}) | {"seed": config.run.seed}
    values["environment"].pop("sandbox")
    sha.update(json.dumps(values, sort_keys=True).encode())
    for package in (palestra.envs, palestra.rollout, palestra.rl):
        root = Path(package.__file__ or "").parent
        for path in sorted(root.rglob("*.py")):
            sha.update(str(path.relative_to(root)).encode())
            sha.update(path.read_bytes())
    for path in _environment_source(config.environment.name):
        sha.update(path.read_bytes())
    for folder in (config.model.path, config.model.lora.initial):
        if folder is not None and Path(folder).expanduser().is_dir():
            sha.update(_folder_digest(Path(folder).expanduser()).encode())
    if config.warm_start.recorded is not None:
        sha.update(records_digest(Path(config.warm_start.recorded).expanduser()).encode())
    return sha.hexdigest()[:32]


def _environment_source(name: str) -> Sequence[Path]:
    """The Python files of a user's environment: of its whole package, or its one module."""
    module = name.partition(":")[0]
    if ":" not in name or module.split(".")[0] == "palestra":
        return ()
    top = sys.modules.get(module.split(".")[0]), sys.modules.get(module)
    file = next((Path(found.__file__) for found in top if found is not None and found.__file__), None)
    if file is None:
        return ()
    return sorted(file.parent.rglob("*.py")) if file.name == "__init__.py" else (file,)


def _folder_digest(folder: Path) -> str:
    """Of a model's or an adapter's weights and settings."""
    sha = hashlib.sha256()
    for path in sorted([*folder.glob("*.json"), *folder.glob("*.safetensors")]):
        with path.open("rb") as file:
            sha.update(path.name.encode() + hashlib.file_digest(file, "sha256").digest())
    return sha.hexdigest()


def _is_made(place: Path) -> bool:
    """Places are renamed into being, so what is there is complete."""
    return place.is_dir()


def _copy(source: Path, target: Path) -> None:
    draft = target.with_name(f".{target.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    shutil.copytree(source, draft)
    draft.rename(target)
