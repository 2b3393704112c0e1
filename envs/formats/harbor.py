"""Harbor task folders: `task.toml`, `instruction.md`, `environment/`, `tests/test.sh`, `solution/solve.sh`.

Schema 1.2 to 1.4 and the older spellings. Unknown keys are ignored, as the format says. What is known and cannot be
honoured is refused with what to do, or, where the task keeps its meaning, done otherwise and said in `notes`.
"""

from __future__ import annotations

import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from palestra.envs.errors import ConfigError
from palestra.envs.formats.dockerfile import Recipe, read_dockerfile
from palestra.envs.formats.harbor_settings import Table, megabytes, read_toml, seconds
from palestra.envs.formats.task_files import Files, read_files, read_text
from palestra.envs.sandboxes.contract import Limits
from palestra.envs.sandboxes.egress_rules import AllowList

DEFAULT_WORKDIR = "/app"
_SYSTEM = ("/bin", "/boot", "/dev", "/etc", "/lib", "/proc", "/run", "/sbin", "/sys", "/tmp", "/usr")
_OURS = ("/tests", "/logs", "/solution")  # in the box of a judge, or of nobody
_SCRATCH_SHARE = 4  # of the memory, which what is written counts as
_LEAST_MEMORY = 128 * 2**20
_PLAIN_SCRATCH = Limits().scratch_bytes


@dataclass(frozen=True, slots=True)
class Artifact:
    """What leaves the box to be judged: a path in the workspace, without what the patterns match below it."""

    source: str  # "." is the whole workspace
    exclude: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class HarborTask:
    """One task, whole and in memory. HarborTask("hello", "Write hello to /app/hello.txt.", ...)"""

    id: str
    instruction: str
    tests: Files  # below /tests, with "test.sh" among them; never in a policy's box
    solution: Files = field(default_factory=Files)  # with "solve.sh" where there is one
    image: str | None = None  # None: the sandbox's default
    workdir: str = DEFAULT_WORKDIR
    files: Files = field(default_factory=Files)  # in the workspace at the start
    env: Mapping[str, str] = field(default_factory=dict)  # of the policy's commands
    verifier_env: Mapping[str, str] = field(default_factory=dict)
    limits: Limits = field(default_factory=Limits)
    network: tuple[str, ...] = ()
    artifacts: tuple[Artifact, ...] = (Artifact("."),)
    agent_timeout_s: float = 900.0
    verifier_timeout_s: float = 600.0
    notes: tuple[str, ...] = ()  # what is done otherwise than the folder says


def read_task(folder: Path, *, hosts: Sequence[str] | None = None) -> HarborTask:
    """The task in `folder`. `hosts`: what a task that asks for the whole network may reach instead, "host:port" each;
    None refuses it. Raises ConfigError."""
    if folder.is_symlink() or not folder.is_dir():
        raise ConfigError(f"{folder}: expected a folder with task.toml, and not a symbolic link")
    table = read_toml(folder / "task.toml")
    environment, verifier, agent = table.inner("environment"), table.inner("verifier"), table.inner("agent")
    _refuse_the_rest(folder, table, environment)
    notes = _notes(environment, verifier, agent)
    recipe = _recipe(folder, environment, notes)
    workdir = _workdir(environment.place, recipe.workdir)
    tests = read_files(folder / "tests")
    if "test.sh" not in tests.contents:
        raise ConfigError(f"{folder}: no tests/test.sh, which is what judges the task")
    return HarborTask(
        id=folder.name,
        instruction=_without_canary(read_text(folder / "instruction.md")),
        tests=tests,
        solution=read_files(folder / "solution"),
        image=environment.text("docker_image") or None,
        workdir=workdir,
        files=recipe.files,
        env={**recipe.env, **environment.variables("env")},
        verifier_env=verifier.variables("env"),
        limits=_limits(environment, notes),
        network=_network(table, environment, agent, hosts, notes),
        artifacts=_artifacts(table, workdir),
        agent_timeout_s=seconds(agent, "timeout_sec", 900.0),
        verifier_timeout_s=seconds(verifier, "timeout_sec", 600.0),
        notes=tuple(notes),
    )


def _refuse_the_rest(folder: Path, table: Table, environment: Table) -> None:
    """What changes a task when it is left out."""
    if table.value("steps") or (folder / "steps").exists():
        raise ConfigError(f"{folder}: a task of several steps, which is not read; make a folder of each step")
    if environment.number("gpus", 0) or environment.value("gpu_types"):
        raise ConfigError(f"{environment.place}: gpus are asked for, and a box has none; set gpus = 0")
    system = environment.text("os") or "linux"
    if system != "linux":
        raise ConfigError(f"{environment.place}: os is {system!r}; boxes are linux")
    for name in ("docker-compose.yaml", "docker-compose.yml"):
        if (folder / "environment" / name).exists():
            raise ConfigError(f"{folder}: environment/{name} starts several containers, and a task has one box")
    for key, why in (
        ("mcp_servers", "starts servers beside the box"),
        ("healthcheck", "waits for a service that something must start"),
    ):
        if environment.value(key):
            raise ConfigError(f"{environment.place}.{key} {why}, which is not done here")
    if table.inner("verifier").value("collect"):
        raise ConfigError(f"{table.place}: verifier.collect runs hooks in the policy's box; list files as artifacts")


def _notes(environment: Table, verifier: Table, agent: Table) -> list[str]:
    """What is done otherwise, of what does not change the task."""
    notes = []
    mode = verifier.text("environment_mode") or "shared"
    if mode not in ("shared", "separate"):
        raise ConfigError(f"{verifier.place}.environment_mode is {mode!r}; use shared or separate")
    if mode == "shared":
        notes.append("verifier.environment_mode shared: judged in a separate box, on what the artifacts name")
    if verifier.value("environment"):
        notes.append("verifier.environment: the judge's box is like the policy's, without a network")
    for table in (agent, verifier):
        if table.text("user"):
            notes.append(f"{table.place}.user {table.text('user')}: commands run as the box's own user")
    if environment.text("skills_dir"):
        notes.append("environment.skills_dir: nothing is told of it")
    return notes


def _recipe(folder: Path, environment: Table, notes: list[str]) -> Recipe:
    """What the box is made of: a built image, else what the Dockerfile says, else the default image alone."""
    image, workdir = environment.text("docker_image"), environment.text("workdir") or None
    path = folder / "environment" / "Dockerfile"
    if image:
        notes.append(
            f"environment.docker_image: what it has at {workdir or DEFAULT_WORKDIR} is hidden by the workspace"
        )
        return Recipe(image, workdir)
    if not path.exists():
        return Recipe("", workdir)
    recipe = read_dockerfile(path, workdir)
    notes.append(f"environment/Dockerfile FROM {recipe.base}: not pulled; the box has the sandbox's default image")
    return recipe


def _workdir(place: str, found: str | None) -> str:
    workdir = posixpath.normpath(found or DEFAULT_WORKDIR)
    top = "/" + workdir.split("/")[1] if workdir.startswith("/") else ""
    if top in ("", "/", *_SYSTEM, *_OURS) or workdir == "/var":
        raise ConfigError(f"{place}.workdir is {workdir}; use an absolute path that is no folder of the system's")
    return workdir


def _limits(environment: Table, notes: list[str]) -> Limits:
    plain = Limits()
    memory = megabytes(environment, "memory_mb", "memory") or plain.memory_bytes
    if memory < _LEAST_MEMORY:
        least = _LEAST_MEMORY // 2**20
        raise ConfigError(f"{environment.place}: memory is {memory // 2**20} MB; a box needs {least} MB or more")
    asked = megabytes(environment, "storage_mb", "storage")
    scratch = min(asked or _PLAIN_SCRATCH, max(_PLAIN_SCRATCH, memory // _SCRATCH_SHARE), memory // 2)
    if asked and scratch < asked:
        given = f"{scratch // 2**20} MB can be written, in memory"
        notes.append(f"environment.storage {asked // 2**20} MB: {given}; ask for more memory_mb to get more")
    return Limits(memory_bytes=memory, cpus=environment.number("cpus", plain.cpus), scratch_bytes=scratch)


def _network(
    table: Table, environment: Table, agent: Table, hosts: Sequence[str] | None, notes: list[str]
) -> tuple[str, ...]:
    """Where the policy's commands may connect to. Nothing said: nowhere, which is noted."""
    asks = agent if agent.text("network_mode") else environment
    mode = asks.text("network_mode")
    if not mode and environment.value("allow_internet") is not None:
        mode = "public" if environment.value("allow_internet") else "no-network"
    if not mode:
        notes.append("environment.network_mode is not said: no network")
        return ()
    if mode == "no-network":
        return ()
    if mode == "allowlist":
        return _checked([place for host in asks.texts("allowed_hosts") for place in _places(host)])
    if mode != "public":
        raise ConfigError(f"{asks.place}.network_mode is {mode!r}; use public, no-network or allowlist")
    if hosts is None:
        raise ConfigError(
            f"{table.place}: asks for the whole network, which no box gets; set the option hosts to what it may reach "
            "instead, an empty list for nothing"
        )
    notes.append(f"network_mode public: reaches {', '.join(hosts) or 'nothing'}")
    return _checked(hosts)


def _checked(places: Sequence[str]) -> tuple[str, ...]:
    """The places, each a host and a port. Raises ConfigError."""
    AllowList.of(places)
    return tuple(places)


def _places(host: str) -> tuple[str, ...]:
    return (host,) if ":" in host else (f"{host}:443", f"{host}:80")


def _artifacts(table: Table, workdir: str) -> tuple[Artifact, ...]:
    raw = table.value("artifacts")
    if not raw:
        return (Artifact("."),)
    if not isinstance(raw, list):
        raise ConfigError(f"{table.place}: artifacts is {raw!r}; expected a list of paths or tables")
    return tuple(_artifact(table.place, item, workdir) for item in raw)


def _artifact(place: str, item: object, workdir: str) -> Artifact:
    table = Table(f"{place}: artifacts", item if isinstance(item, Mapping) else {"source": item})
    source = table.text("source")
    full = posixpath.normpath(posixpath.join(workdir, source))
    if not source or not (full == workdir or full.startswith(f"{workdir}/")):
        raise ConfigError(f"{table.place} names {source!r}; only what is below {workdir} can leave the box")
    return Artifact(full[len(workdir) + 1 :] or ".", tuple(table.texts("exclude")))


def _without_canary(text: str) -> str:
    """The prompt, without the lines at its head that mark the text for those who search training data for it."""
    lines = text.split("\n")
    while lines and ("canary" in lines[0].lower() or not lines[0].strip()):
        lines = lines[1:]
    return "\n".join(lines).strip()
