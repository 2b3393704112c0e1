"""A base image made from Debian packages, where no registry of images can be reached."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from palestra.envs.errors import ConfigError, SandboxError
from palestra.envs.sandboxes.docker import DEFAULT_IMAGE, Engine

SUITE = "bookworm"
PACKAGES = ("python3", "python3-pytest", "git", "procps")
UNUSED = ("var/cache/apt", "var/lib/apt/lists", "usr/share/doc", "usr/share/man", "usr/share/locale", "dev")
SOURCES = ("/etc/apt/sources.list", "/etc/apt/sources.list.d")
BUILD_S = 1800.0
LAST_LINES = 15
TOLD = re.compile(r"I: (Retrieving|Validating|Extracting|Unpacking the|Configuring the|Base)")


def build_image(
    socket_path: str,
    tag: str = DEFAULT_IMAGE,
    *,
    mirror: str | None = None,
    force: bool = False,
    say: Callable[[str], None] = print,
) -> bool:
    """Make `tag` on the engine: Debian with python3, pytest, git and procps. False when it is there already.

    `mirror` None: the one that this system's apt uses, else debootstrap's own. Raises ConfigError when the tools or
    the rights are missing, SandboxError when a step fails.
    """
    engine = Engine(socket_path)
    if not force and engine.has_image(tag):
        say(f"{tag} is there already; --force makes it again")
        return False
    debootstrap = _debootstrap()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="palestra-image-") as folder:
        root = Path(folder) / "root"
        source = mirror or apt_mirror(SOURCES)
        argv = [debootstrap, "--variant=minbase", f"--include={','.join(PACKAGES)}", SUITE, str(root)]
        _watch([*argv, source] if source else argv, say)
        for path in UNUSED:
            shutil.rmtree(root / path, ignore_errors=True)
        for path in ("dev", "workspace"):
            (root / path).mkdir(exist_ok=True)
        say(f"I: Importing into the engine as {tag}")
        with subprocess.Popen(["tar", "-C", str(root), "-c", "."], stdout=subprocess.PIPE) as tar:
            assert tar.stdout is not None, "it was asked for as a pipe"
            engine.import_image(tar.stdout, tag, [f"LABEL palestra.packages={','.join(PACKAGES)}"])
        if tar.returncode != 0:
            raise SandboxError(f"packing the root file system failed: tar ended with {tar.returncode}")
    say(f"{tag} is ready after {time.monotonic() - began:.0f} s")
    return True


def apt_mirror(places: Iterable[str]) -> str | None:
    """The first Debian archive in apt's configuration, in either of its two formats; None where there is none."""
    files = [file for place in map(Path, places) for file in (sorted(place.glob("*")) if place.is_dir() else [place])]
    for file in files:
        if not file.is_file():
            continue
        text = file.read_text(errors="replace")
        for found in re.findall(r"^(?:URIs:\s*|deb\s+(?:\[[^]]*\]\s+)?)(\S+)", text, flags=re.MULTILINE):
            if re.fullmatch(r"https?://\S*/debian/?", found):
                return str(found)
    return None


def _debootstrap() -> str:
    path = shutil.which("debootstrap", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    if path is None:
        raise ConfigError("building an image needs debootstrap, which is not installed: apt-get install debootstrap")
    if os.geteuid() != 0:
        raise ConfigError("building an image needs root, since debootstrap unpacks files of every owner: use sudo")
    return path


def _watch(argv: list[str], say: Callable[[str], None]) -> None:
    """Run and pass the lines on. Raises SandboxError with the last of them when it fails or does not end in time."""
    lines: list[str] = []
    with subprocess.Popen(
        argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True
    ) as made:
        assert made.stdout is not None, "it was asked for as a pipe"
        watchdog = threading.Timer(BUILD_S, os.killpg, (made.pid, signal.SIGKILL))
        watchdog.start()
        for line in made.stdout:
            lines = [*lines, line.rstrip()][-LAST_LINES:]
            if TOLD.match(line):
                say(line.rstrip())
        made.wait()
        watchdog.cancel()
    if made.returncode != 0:
        how = (
            f"was ended after {BUILD_S:g} s" if made.returncode == -signal.SIGKILL else f"ended with {made.returncode}"
        )
        raise SandboxError(f"debootstrap {how}: {' / '.join(lines)}")
