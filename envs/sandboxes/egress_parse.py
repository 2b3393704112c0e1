"""What a client of the proxy says before anything is passed on: a request's head, and the first words of TLS."""

from __future__ import annotations

import re
from dataclasses import dataclass

from palestra.envs.sandboxes.egress_rules import split_place

TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
HOP_BY_HOP = {"connection", "expect", "keep-alive", "te", "trailer", "upgrade", "host"}  # and every proxy-*
HANDSHAKE, CLIENT_HELLO, SERVER_NAME = 22, 1, 0


class BadRequestError(Exception):
    """Not a request that the proxy passes on, and what it does pass on."""


@dataclass(frozen=True, slots=True)
class Request:
    """Request("GET", "pypi.example", 80, "/simple/", (("accept", "*/*"),), 0, "pypi.example")"""

    method: str
    host: str
    port: int
    path: str  # "" of a CONNECT
    headers: tuple[tuple[str, str], ...]  # names in lower case; those that are for the proxy are left out
    body_bytes: int
    named: tuple[str, int] | None  # what the Host header says; None: there is none

    @property
    def tunnel(self) -> bool:
        """Whether it asks for a tunnel."""
        return self.method == "CONNECT"

    def forwarded(self) -> bytes:
        """The head for the server: one request of one connection, for the host that was checked."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        place = host if self.port == 80 else f"{host}:{self.port}"
        rows = [f"{self.method} {self.path} HTTP/1.1", f"Host: {place}", "Connection: close"]
        rows += [f"{name}: {value}" for name, value in self.headers]
        return "\r\n".join([*rows, "", ""]).encode("latin-1")


def parse_request(head: bytes) -> Request:
    """Raises BadRequestError for what could be read in two ways, and for what is neither a tunnel nor plain HTTP."""
    first, *rows = head.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
    match = re.fullmatch(r"([A-Z]+) (\S+) HTTP/1\.[01]", first)
    if match is None:
        raise BadRequestError("expected a request line of HTTP/1.1")
    method, target = match.groups()
    fields = [_field(row) for row in rows]
    tunnel = method == "CONNECT"
    if not tunnel and not target.lower().startswith("http://"):
        raise BadRequestError("expected CONNECT host:port, or a whole http:// address")
    place, slash, path = ("", "", "") if tunnel else target[len("http://") :].partition("/")
    if any(mark in place for mark in "?#"):
        raise BadRequestError("expected a path in the address")
    try:
        host, port = split_place(target) if tunnel else split_place(place, 80)
        hosts = [split_place(value, port if tunnel else 80) for name, value in fields if name == "host"]
    except ValueError as error:
        raise BadRequestError(str(error)) from error
    if len(hosts) > 1:
        raise BadRequestError("expected one Host")
    dropped = HOP_BY_HOP | {
        word.strip().lower() for name, value in fields if name == "connection" for word in value.split(",")
    }
    kept = tuple(field for field in fields if field[0] not in dropped and not field[0].startswith("proxy-"))
    return Request(method, host, port, slash + path or "/", kept, _body_bytes(fields), hosts[0] if hosts else None)


def _field(row: str) -> tuple[str, str]:
    name, colon, value = row.partition(":")
    if not colon or TOKEN.fullmatch(name) is None or any(letter in value for letter in "\r\n\0"):
        raise BadRequestError("expected headers of the form `name: value`")
    return name.lower(), value.strip()


def _body_bytes(fields: list[tuple[str, str]]) -> int:
    if any(name == "transfer-encoding" for name, _ in fields):
        raise BadRequestError("expected a body with a Content-Length")
    lengths = {value for name, value in fields if name == "content-length"}
    if not lengths:
        return 0
    (length,) = lengths if len(lengths) == 1 else ("",)
    if not (length.isascii() and length.isdigit()):
        raise BadRequestError("expected one Content-Length")
    return int(length)


def server_name(hello: bytes) -> str | None:
    """The name that a TLS client asks for, from its whole first message. Raises ValueError when it is no such message.

    `hello` is the handshake message: type, 24-bit length, version, random, session, ciphers, compressions, extensions.
    """
    try:
        if hello[0] != CLIENT_HELLO:
            raise ValueError("not a client's hello")
        at = 4 + 2 + 32
        at += 1 + hello[at]
        at += 2 + int.from_bytes(hello[at : at + 2], "big")
        at += 1 + hello[at]
        end = at + 2 + int.from_bytes(hello[at : at + 2], "big")
        at += 2
        while at + 4 <= min(end, len(hello)):
            kind, size = int.from_bytes(hello[at : at + 2], "big"), int.from_bytes(hello[at + 2 : at + 4], "big")
            if kind == SERVER_NAME:
                length = int.from_bytes(hello[at + 7 : at + 9], "big")
                return hello[at + 9 : at + 9 + length].decode("ascii")
            at += 4 + size
    except (IndexError, UnicodeDecodeError) as error:
        raise ValueError("not a client's hello") from error
    return None
