"""`palestra doctor`: what works on this machine, one line each, and what to do about what does not."""

from __future__ import annotations

import asyncio
import importlib.metadata
import importlib.util
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from palestra.envs.errors import PalestraError
from palestra.envs.sandboxes.backends import BackendName, choose_backend
from palestra.envs.sandboxes.contract import BoxSpec
from palestra.rl.exit_codes import DONE, FAILED

if TYPE_CHECKING:
    from palestra.rl.config import Config

ENOUGH_DISK = 20 * 2**30
ENOUGH_SHM = 2**30


@dataclass(frozen=True, slots=True)
class Finding:
    """One line. `works` None: not needed for every run, and not there."""

    what: str
    works: bool | None
    said: str
    remedy: str = ""


def run_doctor(path: Path | None) -> int:
    """Print the findings. Exit code 1 when something that every run needs does not work."""
    config = None
    if path is not None and importlib.util.find_spec("torch"):  # without it there is nothing to configure yet
        from palestra.rl.load_config import load_config

        config = load_config(path / "config.toml" if path.is_dir() else path)
    failed = 0
    for finding in _findings(config):
        mark = {True: "ok  ", False: "FAIL", None: "-   "}[finding.works]
        print(f"{mark} {finding.what:22} {finding.said}", flush=True)
        if finding.works is not True and finding.remedy:
            print(f"     {'':22} -> {finding.remedy}")
        failed += finding.works is False
    return FAILED if failed else DONE


def _findings(config: Config | None) -> Iterator[Finding]:
    yield Finding("python", sys.version_info >= (3, 11), sys.version.split()[0], "use Python 3.11 or newer")
    for package, extra in (("torch", "learn"), ("transformers", "learn"), ("peft", "learn")):
        yield _package(package, extra, needed=True)
    for package, extra in (("vllm", "vllm"), ("ray", "ray"), ("wandb", "track"), ("docker", "docker")):
        yield _package(package, extra, needed=False)
    yield _devices()
    for kind in ("docker", "namespace"):
        yield from _sandbox(kind)
    yield _space("disk", Path.cwd(), ENOUGH_DISK, "free space, or set run.folder to another disk")
    yield _space("memory file system", Path("/dev/shm"), ENOUGH_SHM, "give containers --shm-size, or remount /dev/shm")
    if config is not None:
        yield from _configured(config)


def _package(name: str, extra: str, *, needed: bool) -> Finding:
    if importlib.util.find_spec(name) is None:
        return Finding(name, False if needed else None, "not installed", f"pip install 'palestra[{extra}]'")
    distributions = importlib.metadata.packages_distributions().get(name, [name])
    return Finding(name, True, importlib.metadata.version(distributions[0]))


def _devices() -> Finding:
    if importlib.util.find_spec("torch") is None:
        return Finding("devices", None, "unknown without torch")
    import torch

    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        return Finding("devices", True, f"{len(names)} GPUs: {', '.join(sorted(set(names)))}")
    return Finding("devices", True, f"no GPU; {os.cpu_count()} CPUs, so keep model.dtype float32")


def _sandbox(kind: BackendName) -> Iterator[Finding]:
    """A box is opened, and asked what it can do: isolation is what is enforced, not what was configured."""
    try:
        said = asyncio.run(_try_box(kind))
    except (PalestraError, OSError) as error:
        remedy = "palestra sandbox build-image" if "image" in str(error) else "apt-get install docker.io / bubblewrap"
        yield Finding(f"sandbox {kind}", None, str(error).splitlines()[0], remedy)
        return
    for what, works, words in said:
        yield Finding(f"sandbox {kind}", works, f"{what}: {words}", "do not run untrusted policies in it")


async def _try_box(kind: BackendName) -> list[tuple[str, bool, str]]:
    backend, _ = await asyncio.to_thread(choose_backend, kind, run="doctor")
    box = await backend.open(BoxSpec(), episode="doctor")
    try:
        status = await box.run(["cat", "/proc/self/status"], timeout_s=10)
        routes = await box.run(["cat", "/proc/net/route"], timeout_s=10)
        root = await box.run(["touch", "/usr/palestra-was-here"], timeout_s=10)
    finally:
        await box.close()
    fields = dict(line.split(":", 1) for line in status.stdout.decode().splitlines() if ":" in line)
    caps = {fields.get(name, "?").strip().strip("0") for name in ("CapEff", "CapPrm")}
    uid = fields.get("Uid", "? ?").split()[1]
    return [
        ("command", status.ok, f"runs in {1000 * status.seconds:.1f} ms as uid {uid}"),
        ("capabilities", caps == {""}, "none" if caps == {""} else f"has {caps}"),
        (
            "privileges",
            fields.get("NoNewPrivs", "").strip() == "1",
            f"NoNewPrivs {fields.get('NoNewPrivs', '?').strip()}",
        ),
        (
            "network",
            len(routes.stdout.splitlines()) <= 1,
            "no route out" if len(routes.stdout.splitlines()) <= 1 else "routes",
        ),
        ("system files", not root.ok, "read-only" if not root.ok else "writable"),
    ]


def _space(what: str, place: Path, enough: int, remedy: str) -> Finding:
    try:
        free = shutil.disk_usage(place).free
    except OSError as error:
        return Finding(what, None, str(error), remedy)
    return Finding(what, free >= enough, f"{free / 2**30:.1f} GiB free at {place}", remedy)


def _configured(config: Config) -> Iterator[Finding]:
    """What a configuration needs beyond the machine: tasks, model, template, and an engine that agrees."""
    from palestra.rl.job import make_learner
    from palestra.rl.policy import prepare_policy
    from palestra.rl.preflight import check
    from palestra.rl.rooms import with_backend

    def of(what: str, work: Callable[[], str], remedy: str) -> Finding:
        try:
            return Finding(what, True, work(), remedy)
        except PalestraError as error:
            return Finding(what, False, str(error), remedy)

    yield of("configuration", lambda: "; ".join(check(config).lines()[1:3]), "correct the file")
    plan = check(config)
    decided, _ = with_backend(config, "doctor")
    policy = asyncio.run(prepare_policy(decided, plan.taskset, None, print))
    yield of("template", lambda: _template(config, policy.folder), "use another chat template, or model.history")
    learner = make_learner(decided, policy)
    yield of("engine and trainer", lambda: _agreement(decided, plan.taskset, policy.folder, learner), "see docs")


def _template(config: Config, folder: Path) -> str:
    from transformers import AutoTokenizer

    from palestra.rollout.load_renderer import load_renderer
    from palestra.rollout.template_check import check_template
    from palestra.rollout.tokens import ChatTokenizer

    tokenizer = cast(ChatTokenizer, AutoTokenizer.from_pretrained(folder))
    report = check_template(load_renderer(folder, history=config.model.history), tokenizer)
    if not report.exact:
        raise PalestraError(report.problems[0])
    return "extends exactly" + ("" if report.keeps_on_user else "; it would rewrite history on a user message")


def _agreement(config: Config, taskset: object, folder: Path, learner: object) -> str:
    from palestra.rl.job import max_gap
    from palestra.rl.make_engine import EnginePlan, make_engine
    from palestra.rl.probe import probe_rows
    from palestra.rl.publish import Publisher
    from palestra.rollout.load_renderer import load_renderer
    from palestra.rollout.pool import EnginePool
    from palestra.rollout.replicas import Replicas

    async def body() -> str:
        plan = EnginePlan.of(config, folder)
        engines = EnginePool(Replicas("engine", 1, lambda index: make_engine(plan, index)))
        facts = await engines.start()
        try:
            rows = probe_rows(load_renderer(folder), taskset, config.environment.budgets.context_tokens)  # type: ignore[arg-type]
            proof = await Publisher(engines, learner, rows, max_gap(config)).publish(0)  # type: ignore[arg-type]
        finally:
            await engines.close()
        return f"{facts.name} ({proof.mode}): largest difference of log-probabilities {proof.gap:.2g}"

    return asyncio.run(body())
