"""An episode as it is commonly done with the Docker package: a container made for it, its exec calls, its removal.

Only for measuring against. The container has no network, which starts faster than one with it, and no other hardening.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence

from palestra.envs.errors import SandboxError
from palestra.envs.sandboxes.docker import DEFAULT_IMAGE, plain_client
from palestra.envs.sandboxes.owner import Owner, Tag

LIFETIME_S = 600.0


def plain_times(
    socket_path: str, argv: Sequence[str], cwd: str, env: Mapping[str, str], *, commands: int, episodes: int
) -> tuple[list[float], list[float]]:
    """Seconds of each command, and of each whole episode of so many commands. Raises SandboxError when one fails."""
    client = plain_client(socket_path)
    of_commands, of_episodes = [], []
    try:
        for number in range(episodes):
            began = time.perf_counter()
            tag = Tag(Owner.this_process(), "bench", secrets.token_hex(8), str(number), time.time() + LIFETIME_S)
            container = client.containers.create(
                DEFAULT_IMAGE, ["sleep", str(LIFETIME_S)], network_mode="none", labels=tag.labels()
            )
            try:
                container.start()
                for _ in range(commands):
                    asked = time.perf_counter()
                    code, _ = container.exec_run(list(argv), workdir=cwd, environment=dict(env))
                    of_commands.append(time.perf_counter() - asked)
                    if code != 0:
                        raise SandboxError(f"{argv[0]} ended with {code} in a plain container, expected 0")
            finally:
                container.remove(force=True)
            of_episodes.append(time.perf_counter() - began)
    finally:
        client.close()
    return of_commands, of_episodes
