"""What tests need to know about the machine: which services answer here, and why one does not."""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import socket
import subprocess
from pathlib import Path

import pytest

DOCKER_SOCKET = "/var/run/docker.sock"


def data_folder() -> Path:
    """Where the public data lies: PALESTRA_DATA, else `../shared/data` beside the checkout."""
    return Path(os.environ.get("PALESTRA_DATA") or Path(__file__).resolve().parents[2] / "shared" / "data")


@functools.cache
def missing(service: str) -> str | None:
    """Why `service` cannot be used here, or None when it can."""
    if service in ("vllm", "ray", "docker_sdk"):
        package = "docker" if service == "docker_sdk" else service
        return None if importlib.util.find_spec(package) else f"the package {package} is not installed"
    if service == "docker":
        return _missing_docker()
    if service == "bwrap":
        return None if shutil.which("bwrap") else "bubblewrap is not installed"
    if service == "slurm":
        absent = [word for word in ("slurmctld", "slurmd", "munged", "sbatch") if not _which(word)]
        return f"not installed: {', '.join(absent)}" if absent else None
    if service == "data":
        return None if data_folder().is_dir() else f"no folder {data_folder()}; set PALESTRA_DATA"
    raise ValueError(f"unknown service {service!r}")


def require(service: str) -> None:
    """Skip the test with the reason when `service` is absent; under CI=true that is a failure."""
    reason = missing(service)
    if reason is None:
        return
    if os.environ.get("CI") == "true":
        pytest.fail(f"{service} must be there in CI: {reason}")
    pytest.skip(f"{service}: {reason}")


def _which(word: str) -> str | None:
    return shutil.which(word) or shutil.which(word, path="/usr/sbin:/sbin")


def _missing_docker() -> str | None:
    try:
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(2)
            client.connect(os.environ.get("PALESTRA_DOCKER_SOCKET", DOCKER_SOCKET))
    except OSError as error:
        return f"no Docker engine answers: {error}"
    answer = subprocess.run(["docker", "version"], capture_output=True, timeout=20, check=False)
    return None if answer.returncode == 0 else "the Docker engine does not answer `docker version`"
