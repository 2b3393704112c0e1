"""In a box for judging: plain data as JSON and back, and frames of it over a socket. Standard library alone.

Whatever arrives is built here out of built-in types: no class, no code and no method of the sender comes with it.
"""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

MAX_FRAME = 16 * 2**20
BIG = 1 << 63


class Raised(Exception):
    """The function raised something that is no built-in exception."""


class Opaque:
    """A value that is no plain data; equal to nothing but itself."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __repr__(self) -> str:
        return f"<a value of type {self.kind}, which is no plain data>"


def encode(value: Any) -> Any:
    """Plain data as JSON: a container is a list whose first item names its kind. Other things become opaque."""
    if value is None or isinstance(value, bool | float | str):
        return value if type(value) in (type(None), bool, float, str) else encode(_base(value))
    if isinstance(value, int):
        return int(value) if -BIG < value < BIG else ["int", hex(value)]
    if isinstance(value, bytes | bytearray):
        return ["bytes", bytes(value).hex()]
    if isinstance(value, complex):
        return ["complex", value.real, value.imag]
    if isinstance(value, dict):
        return ["dict", *([encode(key), encode(item)] for key, item in value.items())]
    for name, kind in (("list", list), ("tuple", tuple), ("set", set), ("frozenset", frozenset)):
        if isinstance(value, kind):
            return [name, *(encode(item) for item in value)]
    return ["opaque", type(value).__name__[:100]]


def _base(value: Any) -> Any:
    return float.__float__(value) if isinstance(value, float) else str.__str__(value)


def decode(value: Any) -> Any:
    """The plain data. Raises ValueError, TypeError, IndexError or RecursionError for what `encode` does not make."""
    if not isinstance(value, list):
        if isinstance(value, dict):
            raise TypeError("an object, where only lists stand")
        return value
    kind, *items = value
    if kind == "dict":
        return {decode(key): decode(item) for key, item in items}
    containers = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
    if kind in containers:
        return containers[kind](decode(item) for item in items)
    if kind == "int":
        return int(items[0], 16)
    if kind == "bytes":
        return bytes.fromhex(items[0])
    if kind == "complex":
        return complex(items[0], items[1])
    if kind == "opaque":
        return Opaque(str(items[0]))
    raise ValueError(f"a value of the kind {kind!r}")


def send(line: socket.socket, frame: Any) -> None:
    """One frame. Raises OSError, ValueError (too long)."""
    data = json.dumps(frame).encode("ascii")
    if len(data) > MAX_FRAME:
        raise ValueError(f"{len(data)} bytes, more than the {MAX_FRAME} of a frame")
    line.sendall(struct.pack(">I", len(data)) + data)


def receive(line: socket.socket) -> Any:
    """The next frame. Raises OSError, EOFError, ValueError (no frame), RecursionError."""
    size = struct.unpack(">I", _exactly(line, 4))[0]
    if size > MAX_FRAME:
        raise ValueError(f"a frame of {size} bytes, more than {MAX_FRAME}")
    return json.loads(_exactly(line, size))


def _exactly(line: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        chunk = line.recv(min(1 << 16, size - len(data)))
        if not chunk:
            raise EOFError("the other end hung up")
        data += chunk
    return bytes(data)
