"""`palestra sft`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import torch

from palestra.envs.errors import ConfigError
from palestra.rl.config import Config
from palestra.rl.exit_codes import DONE
from palestra.rl.export import write_merged
from palestra.rl.load_config import load_config
from palestra.rl.policy import ADAPTER, MERGED, Policy, prepare_policy
from palestra.rl.preflight import check
from palestra.rl.rooms import with_backend
from palestra.rl.run_folder import open_run
from palestra.rl.terminal import Terminal
from palestra.rl.warm_start import REPORT


def run_sft(path: Path, overrides: Sequence[str]) -> int:
    """Imitate as the configuration's [warm_start] says, into the run folder's `model`, where `train` goes on from."""
    config = load_config(path, overrides)
    if not config.warm_start.wanted:
        raise ConfigError(
            f"{path}: there is nothing to imitate: set warm_start.demonstrations to a few hundred scripted episodes, "
            "or warm_start.recorded to a run's folder"
        )
    plan = check(config)
    terminal = Terminal()
    folder = open_run(config)
    try:
        torch.set_num_threads(config.optimizer.threads)
        if config.warm_start.demonstrations:
            config, why = with_backend(config, f"{config.run.name}-sft")
            terminal.say(f"sandbox {config.environment.sandbox.backend} ({why})")
        policy = asyncio.run(prepare_policy(config, plan.taskset, folder.model, terminal.say))
        made = _usable(config, policy, folder.model, terminal)
    finally:
        folder.close()
    _tell_report(folder.model / REPORT, terminal)
    if policy.start is not None:
        terminal.plain(f"The adapter is in {folder.model / ADAPTER}, for model.lora.initial.")
    terminal.plain(f"The policy is in {made}, for model.path. Next: palestra train {path} goes on from it")
    return DONE


def _usable(config: Config, policy: Policy, model: Path, terminal: Terminal) -> Path:
    """A whole model: the trained base, or base and adapter merged, beside them."""
    if policy.start is None:
        return policy.folder
    merged = model / MERGED
    if not merged.is_dir():
        write_merged(policy.folder, policy.start, merged, config.model.dtype, config.model.trust_remote_code)
        terminal.say(f"policy: base and adapter merged in {merged}")
    return merged


def _tell_report(file: Path, terminal: Terminal) -> None:
    for name, value in json.loads(file.read_text(encoding="utf-8")).items():
        terminal.plain(f"{name:20} {value}")
