"""Where a box may connect to: places by name and port, and what is refused even where a name is on the list."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from palestra.envs.errors import ConfigError

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
EMBEDDING = tuple(map(ipaddress.IPv6Network, ("64:ff9b::/96", "2002::/16", "2001::/32", "::/96")))
"""IPv6 addresses that stand for an IPv4 address, which may be of any kind."""
RESOLVE_S = 10.0
CHARS = 255  # kept of what a client asked for


class DeniedError(Exception):
    """A connection that is not allowed. `probe`: it went for the machine itself, its network or its metadata."""

    def __init__(self, host: str, port: int, reason: str, *, probe: bool = False) -> None:
        self.host, self.port, self.reason, self.probe = host[:CHARS], port, reason[:CHARS], probe
        super().__init__(f"{self.host}:{port}: {self.reason}")


@dataclass(frozen=True, slots=True)
class AllowList:
    """AllowList.of(["pypi.example:443", "10.0.0.5:8080"]). An address is allowed only where it stands here itself."""

    places: frozenset[tuple[str, int]]

    @classmethod
    def of(cls, network: Sequence[str]) -> AllowList:
        """Raises ConfigError for what is no host and port."""
        return cls(frozenset(map(_place, network)))

    def check(self, host: str, port: int) -> None:
        """Raises DeniedError unless the place is on the list."""
        if (canonical(host), port) not in self.places:
            address = literal(host)
            probe = (address is not None and not public(address)) or canonical(host) == "localhost"
            raise DeniedError(host, port, "not on the list of places that this box may reach", probe=probe)

    async def addresses(self, host: str, port: int) -> list[str]:
        """Where to connect to. Raises DeniedError when any of them is not public and not on the list, OSError."""
        self.check(host, port)
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(RESOLVE_S):
            found = await loop.getaddrinfo(canonical(host), port, type=socket.SOCK_STREAM)
        texts = list(dict.fromkeys(str(entry[4][0]) for entry in found))
        for text in texts:
            address = ipaddress.ip_address(text.partition("%")[0])
            if not public(address) and (str(_unwrapped(address)), port) not in self.places:
                raise DeniedError(host, port, f"the name leads to {text}, which is not public", probe=True)
        return texts


def canonical(host: str) -> str:
    """A name in lower case without its last dot; an address, however it is written, in its usual form."""
    address = literal(host)
    return host.lower().removesuffix(".") if address is None else str(_unwrapped(address))


def literal(host: str) -> Address | None:
    """The address that `host` is, also written as one number, in hexadecimal or with brackets; None for a name."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host.removeprefix("[").removesuffix("]").partition("%")[0])
    with contextlib.suppress(OSError, ValueError):
        return ipaddress.IPv4Address(socket.inet_aton(host.removesuffix(".")))
    return None


def public(address: Address) -> bool:
    """Whether it is of the internet: no loopback, private, link-local, metadata, multicast or reserved address."""
    plain = _unwrapped(address)
    if isinstance(plain, ipaddress.IPv6Address) and any(plain in network for network in EMBEDDING):
        return False
    return plain.is_global and not plain.is_multicast


def split_place(text: str, default_port: int | None = None) -> tuple[str, int]:
    """("::1", 80) of "[::1]:80". Raises ValueError."""
    host, colon, port = text.rpartition(":")
    if not colon or port.endswith("]"):
        host, port = text, ""
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not host or any(letter in host for letter in "@/?#\\ \t") or (port and not (port.isascii() and port.isdigit())):
        raise ValueError(f"{text!r} is no host and port")
    number = int(port) if port else default_port
    if number is None or not 0 < number < 65536:
        raise ValueError(f"{text!r} has no port between 1 and 65535")
    return host, number


def _place(text: str) -> tuple[str, int]:
    try:
        host, port = split_place(text)
    except ValueError as error:
        raise ConfigError(f'network: {error}; write "host:port", such as "mirror.example:443"') from error
    if "*" in host:
        raise ConfigError(f"network: {text!r} is a pattern; name each host that commands may reach")
    return canonical(host), port


def _unwrapped(address: Address) -> Address:
    return (address.ipv4_mapped or address) if isinstance(address, ipaddress.IPv6Address) else address
