"""A training job from its configuration to its summary: policy, learner, rooms, loop, evaluations."""

from __future__ import annotations

import asyncio
import hashlib
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from palestra.envs.environment import Taskset
from palestra.envs.errors import ConfigError, IntegrityError
from palestra.envs.types import JSON
from palestra.rl.checkpoints import Checkpoints, base_digest
from palestra.rl.config import Config
from palestra.rl.evaluation import Report, report
from palestra.rl.exit_codes import STOP_SIGNALS
from palestra.rl.interrupt import unless_stopped
from palestra.rl.learner import Learner
from palestra.rl.learner_group import AnyLearner, open_learner
from palestra.rl.learner_plan import LearnerPlan
from palestra.rl.ledger import Ledger
from palestra.rl.lineage import check_ledger, check_tasks, groups_used, open_ledger
from palestra.rl.loop_settings import gap_watch, loop_settings, num_updates, second_watch
from palestra.rl.one_thread import compute
from palestra.rl.order import TaskOrder
from palestra.rl.policy import Policy, prepare_policy
from palestra.rl.preflight import Plan
from palestra.rl.probe import probe_rows
from palestra.rl.publish import Publisher
from palestra.rl.rooms import Rooms, episode_limit_s, open_cluster, open_rooms, with_backend
from palestra.rl.run_folder import RunFolder
from palestra.rl.step_metrics import evaluation_metrics
from palestra.rl.summary import Summary
from palestra.rl.tracking import Metrics, Tracker
from palestra.rl.train import Loop
from palestra.rollout.artefacts import beside
from palestra.rollout.collector import Collector, CollectorSettings
from palestra.rollout.load_renderer import load_renderer
from palestra.rollout.types import Sampling


@dataclass(slots=True)
class Start:
    """Where a life of the run begins: at 0, or at a checkpoint."""

    step: int = 0
    found: Path | None = None
    groups_used: int = 0  # up to then, dropped ones included; the checkpoint knows


async def run_job(plan: Plan, folder: RunFolder, start: Start, say: Callable[[str], None]) -> Summary:
    """Train, and write summary.json whatever happens. `summary.exit` says how it ended."""
    begun = time.monotonic()
    run_id = f"{plan.config.run.name}-{hashlib.sha256(str(folder.path.resolve()).encode()).hexdigest()[:8]}"
    config, why = with_backend(plan.config, run_id)
    sandbox = config.environment.sandbox.backend
    say(f"sandbox {sandbox} ({why})")
    summary = Summary(engine=config.rollout.engine.kind, sandbox=sandbox, sandbox_reason=why, seed=config.run.seed)
    stop = asyncio.Event()
    _listen(stop, say)
    torch.set_num_threads(config.optimizer.threads)
    try:
        policy = await unless_stopped(prepare_policy(config, plan.taskset, folder.model, say), stop)
        if policy is None:
            summary.exit = "interrupted"
            return summary
        summary.warm_start_s = policy.made_s
        _check_prompts(config, policy, plan.taskset)
        plan_of_learner = learner_plan(config, policy)
        async with (
            open_cluster(config) as cluster,
            open_learner(plan_of_learner, config, cluster) as learner,
            open_rooms(config, policy.folder, run_id, cluster) as rooms,
        ):
            _listen(stop, say)  # again: what was started may have taken the handlers
            summary.engine = rooms.facts.name
            say(f"engine {rooms.facts.name} on {rooms.facts.device}, {rooms.facts.dtype}, {rooms.facts.sync_mode} mode")
            work = _Work(replace(plan, config=config), folder, policy, learner, rooms, summary, stop, say, begun)
            summary.exit = "done" if await work.run(start) else "interrupted"
        summary.leaked_sandboxes = rooms.leaked
    finally:
        summary.wall_s = time.monotonic() - begun
        _write(folder, summary, say)
    return summary


def _write(folder: RunFolder, summary: Summary, say: Callable[[str], None]) -> None:
    """summary.json. On a full disk the first failure is the one to be told, not that this fails too."""
    failing = sys.exception() is not None
    try:
        folder.write_json("summary.json", summary.as_dict())
    except OSError as error:
        if not failing:
            raise
        say(f"summary.json cannot be written: {error}")


def learner_plan(config: Config, policy: Policy) -> LearnerPlan:
    """What the learner of the run is made from, on the policy's base weights."""
    return LearnerPlan.of(config, policy.folder, policy.start, num_updates(config))


def make_learner(config: Config, policy: Policy) -> Learner:
    """A learner of one rank, in this process. Raises ConfigError."""
    return learner_plan(config, policy).alone().make()


def max_gap(config: Config) -> float:
    """The limit on the difference of engine and trainer, in force."""
    asked = config.rollout.max_logprob_gap
    return asked if asked is not None else 1e-3 if config.model.dtype == "float32" else 0.2


@dataclass(slots=True)
class _Work:
    """What happens while the rooms are open."""

    plan: Plan
    folder: RunFolder
    policy: Policy
    learner: AnyLearner
    rooms: Rooms
    summary: Summary
    stop: asyncio.Event
    say: Callable[[str], None]
    begun: float

    async def run(self, start: Start) -> bool:
        """Restore, publish, evaluate, loop, evaluate. Returns whether the last step was reached."""
        config = self.plan.config
        checkpoints = Checkpoints(self.folder.checkpoints, base_digest(self.policy.folder), keep=config.checkpoint.keep)
        if start.found is not None:
            state, extra = await asyncio.to_thread(checkpoints.load, start.found)
            await compute(self.learner.load_state, state)
            counts = extra.get("counts")
            self.summary.go_on_from(counts if isinstance(counts, dict) else {})
            start.groups_used = groups_used(extra, start.found)
        ledger = open_ledger(self.folder.path / "ledger.sqlite")
        metrics = Metrics(self.folder.path / "metrics.jsonl", resume_after=start.step if self.folder.existed else None)
        tracking = config.tracking
        tracker = Tracker(
            self.folder.path, config.run.name, tracking.project, tracking.wandb, config.model_dump(mode="json")
        )
        done = False
        try:
            life = ledger.begin(step=start.step, now=time.time())
            check_ledger(ledger, start.step, start.groups_used)
            loop = self._loop(start, ledger, life, checkpoints, _Both(metrics, tracker))
            self.summary.proofs = loop.publisher.proofs
            await self._first_version(loop)
            if start.found is None:
                self.summary.success_before = await self._evaluate(loop, 0)
            else:
                self.summary.success_before = self._remembered()
            try:
                done = await loop.run()
            finally:
                await loop.collector.close()  # what generation had begun ahead, when the end came before its turn
                self._sum_up(loop, ledger)
            if done:
                self.summary.success_after = await self._evaluate(loop, loop.step)
                done = self.summary.success_after is not None or not config.evaluation.tasks
        finally:
            metrics.close()
            ledger.close()
            await asyncio.to_thread(tracker.close, 0 if done else 1)
        return done

    def _loop(self, start: Start, ledger: Ledger, life: int, checkpoints: Checkpoints, log: _Both) -> Loop:
        config = self.plan.config
        tasks = self.plan.taskset.split("train")
        order = TaskOrder(len(tasks), config.run.seed)

        def task_at(position: int) -> tuple[int, str]:
            index = order.index(position)
            return index, tasks[index].id

        check_tasks(ledger, task_at)
        collector = Collector(
            self.rooms.players,
            ledger,
            task_at,
            self.folder.trajectories,
            collector_settings(config),
            already_consumed=start.groups_used,
            already_replaced=start.groups_used - start.step * config.run.groups_per_step,
            life=life,
        )
        renderer = load_renderer(self.policy.folder, history=config.model.history)
        rows = probe_rows(renderer, self.plan.taskset, config.environment.budgets.context_tokens)
        loop = Loop(
            settings=loop_settings(config),
            collector=collector,
            learner=self.learner,
            algorithm=self.plan.algorithm,
            publisher=Publisher(self.rooms.engines, self.learner, rows, max_gap(config)),
            ledger=ledger,
            log=log,
            summary=self.summary,
            gap=gap_watch(config),
            second=second_watch(config),
            save=lambda step: self._save(checkpoints, step, loop.groups_used),
            evaluate=lambda step: self._evaluate(loop, step),
            trajectories=self.folder.trajectories,
            say=self.say,
            stop=self.stop,
            step=start.step,
            groups_used=start.groups_used,
        )
        return loop

    def _save(self, checkpoints: Checkpoints, step: int, groups_used: int) -> None:
        before = self.summary.success_before
        extra: dict[str, JSON] = {
            "success_before": None if before is None else dict(before.success.as_dict()),
            "counts": dict(self.summary.counts()),
            "groups_used": groups_used,
        }
        checkpoints.save(self.learner.state(), extra, step=step)
        self.say(f"step {step}: checkpoint written")

    async def _first_version(self, loop: Loop) -> None:
        """Publish what the learner has, and see that engines sample from it before anything is asked of them."""
        proof = await loop.publisher.publish(self.learner.step)
        loop.collector.version = self.learner.step
        row = loop.publisher.rows[0]
        end = load_renderer(self.policy.folder).end_ids
        await self.rooms.engines.generate(row, Sampling(max_tokens=1, seed=0, stop_ids=end), session="first")
        await self.rooms.engines.end_session("first")
        self.summary.first_token_s = time.monotonic() - self.begun
        self.say(
            f"version {proof.version} is served ({proof.mode}, {proof.matched_modules} modules, gap {proof.gap:.2g}); "
            f"first token sampled after {self.summary.first_token_s:.1f} s"
        )

    async def _evaluate(self, loop: Loop, step: int) -> Report | None:
        """Success on held-out tasks by the weights in force; None without such tasks, and when told to stop."""
        settings = self.plan.config.evaluation
        if not settings.tasks:
            return None
        folder = self.folder.path / "evaluations"
        folder.mkdir(exist_ok=True)
        file = folder / f"step_{step:06d}.jsonl"
        for old in (file, beside(file)):  # of an earlier life that played the same tasks with weights that are gone
            old.unlink(missing_ok=True)
        evaluating = loop.collector.evaluate(
            "test",
            self.plan.held_out(settings.tasks),
            settings.samples,
            temperature=settings.temperature,
            seed=self.plan.config.run.seed,
            file=file,
        )
        trajectories = await unless_stopped(evaluating, self.stop)
        if trajectories is None:
            return None
        found = report(trajectories)
        if found.versions and found.versions != (self.learner.step,):
            raise IntegrityError(f"evaluation of version {self.learner.step} was sampled by versions {found.versions}")
        loop.log.log(step, evaluation_metrics(found))
        success = found.success
        self.say(
            f"held-out success at step {step}: {success.mean:.3f} [{success.low:.3f}, {success.high:.3f}] on "
            f"{success.tasks} tasks; failures: {found.failures or 'none'}"
        )
        return found

    def _remembered(self) -> Report | None:
        """The evaluation before the first step, played by an earlier life of this run."""
        from palestra.rollout import record

        file = self.folder.path / "evaluations" / "step_000000.jsonl"
        try:
            return report(list(record.read(file))) if file.exists() else None
        except (ValueError, KeyError, TypeError) as error:
            self.say(f"{file} cannot be read, so the success before training is unknown: {error}")
            return None

    def _sum_up(self, loop: Loop, ledger: Ledger) -> None:
        """Into the summary, whatever the end was."""
        counters = self.rooms.engines.counters()
        self.summary.engine_replacements += counters.replacements
        self.summary.request_retries += counters.retries
        self.summary.steps, self.summary.weight_version = loop.step, self.learner.step
        self.summary.totals = ledger.totals()


def _check_prompts(config: Config, policy: Policy, taskset: Taskset) -> None:
    """Raise ConfigError when the first tasks leave the policy no room to say anything."""
    renderer = load_renderer(policy.folder, trust_remote_code=config.model.trust_remote_code)
    tasks, room = taskset.split("train"), config.environment.budgets.context_tokens
    lengths = [len(renderer.open(tasks[index].prompt)) for index in range(min(3, len(tasks)))]
    if min(lengths) >= room:
        raise ConfigError(
            f"environment.budgets.context_tokens is {room}, but the prompts of the first tasks have "
            f"{', '.join(map(str, lengths))} tokens; a longer row is needed to answer any of them"
        )


class _Both:
    """metrics.jsonl and the tracker."""

    def __init__(self, metrics: Metrics, tracker: Tracker) -> None:
        self._metrics, self._tracker = metrics, tracker

    def log(self, step: int, values: dict[str, float | int | str | None]) -> None:
        """One step, in both."""
        self._metrics.log(step, values)
        self._tracker.log(step, values)


def collector_settings(config: Config) -> CollectorSettings:
    """How the collector makes groups."""
    return CollectorSettings(
        group_size=config.rollout.group_size,
        groups_per_step=config.run.groups_per_step,
        max_groups=config.run.steps * config.run.groups_per_step,
        max_lag=config.run.max_lag,
        temperature=config.rollout.sampling.temperature,
        seed=config.run.seed,
        max_attempts=config.rollout.max_attempts,
        max_invalid_fraction=config.run.max_invalid_fraction,
        episode_s=episode_limit_s(config),
    )


def _listen(stop: asyncio.Event, say: Callable[[str], None]) -> None:
    """SIGTERM, SIGINT and SIGUSR1 end the run at the next safe point, with a checkpoint."""
    loop = asyncio.get_running_loop()

    def on_signal(number: int) -> None:
        if not stop.is_set():
            say(f"{signal.Signals(number).name}: stopping at the next safe point, with a checkpoint")
        stop.set()

    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, on_signal, number)
