"""Imitation before the first step: of scripted episodes, played for real in the environment, and of recorded ones.

Both are of training tasks only. A scripted episode's observations come from real tools in real boxes; its turns are
encoded as the policy would sample them; only episodes that the held-out verifier scores as solved are copied.
"""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch

from palestra.envs.environment import Taskset
from palestra.rl.config import Config
from palestra.rl.demonstrations import play_demonstrations
from palestra.rl.imitation import Imitation, imitate, imitation_loss, set_apart
from palestra.rl.learner import Learner, LearnerSettings, UpdateStats
from palestra.rl.lora import LoraSettings, read_peft_folder, save_peft_folder
from palestra.rl.model import load_model
from palestra.rl.objective import Objective
from palestra.rl.one_thread import compute
from palestra.rl.optimizer import OptimizerSettings
from palestra.rl.recorded import Chosen, choose
from palestra.rl.surrogates import Reinforce
from palestra.rollout import record
from palestra.rollout.types import Trajectory

REPORT = "imitation.json"


@dataclass(frozen=True, slots=True)
class ImitationReport:
    """What was copied and what came of it; kept with the policy as imitation.json. Losses are means per token."""

    demonstrations: int  # scripted episodes that were solved
    recorded: dict[str, object] | None  # read, used, and left out by reason
    copied_episodes: int
    copied_tokens: int  # sampled ones, in one pass
    updates: int
    last_epoch_loss: float  # as trained, label smoothing included
    validation_episodes: int
    validation_tasks: int
    validation_loss: list[float]  # before, then after each epoch; empty without validation episodes


async def warm_start(config: Config, taskset: Taskset, base: Path, draft: Path, say: Callable[[str], None]) -> None:
    """Write what imitation makes of the model in `base` to `draft`: new base weights, or an adapter; and its report."""
    chosen = None
    if config.warm_start.recorded is not None:
        chosen = await asyncio.to_thread(choose, config, taskset)
        say(f"warm start: {chosen.words()}")
    demonstrations: list[Trajectory] = []
    if config.warm_start.demonstrations:
        demonstrations = await play_demonstrations(config, taskset, base)
        await asyncio.to_thread(record.append, draft / "demonstrations.jsonl", demonstrations)
        say(f"warm start: {len(demonstrations)} demonstrations played and solved")
    episodes = [*demonstrations, *(chosen.episodes if chosen else ())]
    copied, measured = set_apart(episodes, config.warm_start.validation_episodes, random.Random(config.run.seed))
    say(f"warm start: {sum(t.sampled_tokens for t in copied)} tokens to copy in {len(copied)} episodes")
    learner = _learner(config, base, len(copied))
    halt = threading.Event()
    try:
        course = await compute(_imitate, config, learner, copied, measured, _Teller(halt, say))
    except asyncio.CancelledError:
        halt.set()  # a thread cannot be cancelled, and the process would wait for its last update
        raise
    if config.warm_start.train == "full":
        await compute(_save_base, learner, base, draft / "base")
    else:
        lora = _lora(config)
        await asyncio.to_thread(save_peft_folder, learner.adapter(), draft / "adapter", lora, config.model.path)
    report = _report(len(demonstrations), chosen, copied, measured, course)
    (draft / REPORT).write_text(json.dumps(asdict(report), indent=2) + "\n", encoding="utf-8")


def _learner(config: Config, base: Path, count: int) -> Learner:
    settings = config.warm_start
    updates = settings.epochs * -(-count // settings.demonstrations_per_batch)
    loaded = load_model(
        str(base),
        dtype=config.model.dtype,
        device="cuda" if torch.cuda.is_available() else "cpu",
        trust_remote_code=config.model.trust_remote_code,
    )
    learner_settings = LearnerSettings(
        train=settings.train,
        lora=_lora(config),
        optimizer=OptimizerSettings(
            learning_rate=settings.learning_rate,
            schedule="linear",
            total_steps=updates,
            warmup_steps=max(1, updates // 10),
            beta2=0.98,  # short runs: the second moment must follow
        ),
        gradient_checkpointing=config.model.gradient_checkpointing,
    )
    initial = config.model.lora.initial
    start = read_peft_folder(Path(initial)) if initial and settings.train == "lora" else None
    return Learner(loaded.model, learner_settings, seed=config.run.seed, start=start)


def _lora(config: Config) -> LoraSettings:
    lora = config.model.lora
    return LoraSettings(lora.rank, lora.alpha, lora.rank_stabilised)


@dataclass(frozen=True, slots=True)
class _Teller:
    """Says how far it is, until it is told to stop."""

    halt: threading.Event
    say: Callable[[str], None]

    def update(self, total: int, stats: UpdateStats) -> None:
        """About ten lines in all."""
        if self.halt.is_set():
            raise InterruptedError("told to stop during the warm start")
        if stats.step % max(1, total // 10) == 0 or stats.step == total:
            rate = stats.action_tokens / max(stats.seconds, 1e-9)
            self.say(
                f"warm start: update {stats.step}/{total}, loss per token {stats.loss:.4f}, {rate:.0f} tokens copied/s"
            )


@dataclass(frozen=True, slots=True)
class _Course:
    """How imitation went."""

    updates: list[UpdateStats]
    epochs: int
    validation_loss: list[float]


def _imitate(
    config: Config, learner: Learner, copied: Sequence[Trajectory], measured: Sequence[Trajectory], teller: _Teller
) -> _Course:
    settings = Imitation(
        epochs=config.warm_start.epochs,
        trajectories_per_step=config.warm_start.demonstrations_per_batch,
        tokens_per_micro_batch=config.optimizer.tokens_per_micro_batch,
        objective=Objective(
            surrogate=Reinforce(),
            correction=None,
            mode="imitation",
            label_smoothing=config.warm_start.label_smoothing,
        ),
    )
    losses: list[float] = []

    def measure() -> None:
        if measured:
            losses.append(imitation_loss(learner, measured, settings))
            apart = f"{losses[-1]:.4f} on {len(measured)} episodes that are not copied"
            teller.say(f"warm start: after {len(losses) - 1} epochs, loss per token {apart}")

    measure()
    total = settings.num_updates(len(copied))
    rng = random.Random(config.run.seed)
    updates = imitate(learner, copied, settings, rng, partial(teller.update, total), measure)
    return _Course(updates, settings.epochs, losses)


def _report(
    demonstrations: int,
    chosen: Chosen | None,
    copied: Sequence[Trajectory],
    measured: Sequence[Trajectory],
    course: _Course,
) -> ImitationReport:
    last = course.updates[-(len(course.updates) // course.epochs) :]
    return ImitationReport(
        demonstrations=demonstrations,
        recorded=chosen.counts() if chosen else None,
        copied_episodes=len(copied),
        copied_tokens=sum(t.sampled_tokens for t in copied),
        updates=len(course.updates),
        last_epoch_loss=sum(u.loss * u.action_tokens for u in last) / sum(u.action_tokens for u in last),
        validation_episodes=len(measured),
        validation_tasks=len({t.task_id for t in measured}),
        validation_loss=course.validation_loss,
    )


def _save_base(learner: Learner, old: Path, place: Path) -> None:
    """The trained weights with the tokenizer and the settings of the model that they came from."""
    learner.save_model(str(place))
    for path in old.iterdir():
        if (
            path.is_file()
            and not path.name.endswith((".safetensors", ".index.json"))
            and not (place / path.name).exists()
        ):
            shutil.copy(path, place / path.name)
