"""What a cluster needs to know of the machine it starts on: an address, free ports, a folder with a short name.

`python -m palestra.rollout.hosts {address,ports,folder}` prints one of them, for launch scripts.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import socket
import struct
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from pathlib import Path

from palestra.envs.errors import ConfigError

SOCKET_PATH_BYTES = 107  # Linux: sun_path holds 108 bytes, the last of them zero
RAY_SUFFIX = "/session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store"  # what Ray appends to its folder
SIOCGIFADDR = 0x8915
PORTS_PER_JOB = 32
FIRST_PORT, LAST_PORT = 20_000, 32_767  # above the well-known ones, below the range that Linux hands out by itself


def short_folder(preferred: str | None, *, prefix: str = "palestra-") -> Path:
    """A new private folder, short enough for Ray's sockets: inside `preferred` (or TMPDIR) where that fits, else in a
    node-local one. Raises ConfigError with the numbers when none fits."""
    limit = SOCKET_PATH_BYTES - len(RAY_SUFFIX)
    candidates = [preferred or tempfile.gettempdir(), "/tmp", "/var/tmp", "/dev/shm"]
    found: list[str] = []
    for base in dict.fromkeys(candidates):
        length = len(os.fsencode(os.path.join(base, prefix + "12345678")))  # as tempfile names them
        if length > limit:
            found.append(f"{base} gives {length} bytes")
        elif not os.access(base, os.W_OK | os.X_OK):
            found.append(f"{base} is not writable")
        else:
            return Path(tempfile.mkdtemp(prefix=prefix, dir=base))
    raise ConfigError(
        f"no folder is short enough for Ray's sockets: of {SOCKET_PATH_BYTES} bytes Ray needs {len(RAY_SUFFIX)}, which "
        f"leaves {limit} for the folder; {'; '.join(found)}. Set a short node-local folder, such as /tmp"
    )


def port_is_free(port: int) -> bool:
    """Whether a server could listen on `port`, on all addresses of this host."""
    with closing(socket.socket()) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def pick_ports(job: str, count: int, *, is_free: Callable[[int], bool] = port_is_free) -> list[int]:
    """`count` free ports, sought from a base that belongs to the job's number, so that two jobs on one host rarely
    ask for the same and a restarted job finds its own again. Raises ConfigError when the host has none."""
    number = int("".join(filter(str.isdigit, job)) or "0")
    span = LAST_PORT - FIRST_PORT + 1
    base = number * PORTS_PER_JOB % span
    order: Iterable[int] = (FIRST_PORT + (base + i) % span for i in range(span))
    ports: list[int] = []
    for port in order:
        if len(ports) == count:
            break
        if is_free(port):
            ports.append(port)
    if len(ports) < count:
        raise ConfigError(f"only {len(ports)} ports are free between {FIRST_PORT} and {LAST_PORT}; {count} are needed")
    return ports


def host_address(
    interface: str | None,
    *,
    interfaces: Callable[[], Sequence[tuple[str, str]]] | None = None,
    lookup: Callable[[], Sequence[str]] | None = None,
) -> str:
    """The IPv4 address at which other nodes reach this host: of `interface`; without one, what the host's own name
    means, or its only address. Raises ConfigError where that is none or several, and when `interface` is absent.

    `interfaces` gives (name, IPv4 address) pairs of this host and `lookup` what its name resolves to.
    """
    known = (interfaces or _interfaces)()
    if interface is not None:
        chosen = [address for name, address in known if name == interface]
        if not chosen:
            raise ConfigError(f"{socket.gethostname()} has no IPv4 address on interface {interface!r}; {_told(known)}")
        return chosen[0]
    outside = dict.fromkeys(address for _, address in known if not address.startswith("127."))
    named = [address for address in dict.fromkeys((lookup or _lookup)()) if address in outside]
    for candidates in (named, list(outside)):
        if len(candidates) == 1:
            return candidates[0]
    raise ConfigError(
        f"{socket.gethostname()} has {len(outside)} addresses that other nodes might reach, and its name means "
        f"{len(named)} of them: choose an interface; {_told(known)}"
    )


def _told(known: Sequence[tuple[str, str]]) -> str:
    return "it has " + (", ".join(f"{name} {address}" for name, address in known) or "none")


def _interfaces() -> list[tuple[str, str]]:
    """The first IPv4 address of each interface that has one (SIOCGIFADDR, netdevice(7))."""
    found: list[tuple[str, str]] = []
    with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:
                continue  # an interface without an IPv4 address
            found.append((name, socket.inet_ntoa(answer[20:24])))
    return found


def _lookup() -> list[str]:
    """The IPv4 addresses of this host's name; none when nobody knows it."""
    try:
        return socket.gethostbyname_ex(socket.gethostname())[2]
    except OSError:
        return []


def main(arguments: Sequence[str]) -> int:
    """Print an address, ports or a new folder. Exit code 2 with a sentence when there is none."""
    parser = argparse.ArgumentParser(prog="python -m palestra.rollout.hosts", description=main.__doc__)
    words = parser.add_subparsers(dest="word", required=True)
    words.add_parser("address").add_argument("--interface")
    ports = words.add_parser("ports")
    ports.add_argument("--job", required=True)
    ports.add_argument("--count", type=int, default=1)
    words.add_parser("folder").add_argument("--inside")
    asked = parser.parse_args(arguments)
    try:
        if asked.word == "address":
            print(host_address(asked.interface or None))
        elif asked.word == "ports":
            print(*pick_ports(asked.job, asked.count))
        else:
            print(short_folder(asked.inside or None))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
