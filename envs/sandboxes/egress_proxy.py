"""The way out of a box: one request of one client, passed on only to a place on the list, and for a bounded time.

Names are resolved here, once, and the connection goes to the address that was checked. A tunnel is for TLS, and its
client must ask for the very host that the tunnel is for; plain HTTP must name that host, too. What a server sends back
(a redirect, say) opens nothing: the client has to ask again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass

from palestra.envs.sandboxes.egress_parse import HANDSHAKE, BadRequestError, Request, parse_request, server_name
from palestra.envs.sandboxes.egress_rules import AllowList, DeniedError, canonical, literal

HEAD_BYTES = 32 * 2**10
HEAD_S = 10.0  # for the request's head, and for the first words of TLS
CONNECT_S = 10.0
IDLE_S = 60.0
LIFE_S = 900.0
CHUNK = 1 << 16

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass(slots=True)
class _Client:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    begun: bool = False  # what it reads from now on is the server's, so nothing of ours may be mixed in

    async def answer(self, status: str, text: str) -> None:
        """Tell it why; one whose exchange has begun only sees its end."""
        if self.begun:
            return
        body = f"palestra: {text}\n".encode(errors="replace")
        head = f"HTTP/1.1 {status}\r\nContent-Type: text/plain\r\nContent-Length: {len(body)}\r\nConnection: close"
        with contextlib.suppress(OSError):
            self.writer.write(head.encode() + b"\r\n\r\n" + body)
            await self.writer.drain()


async def serve(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, allowed: AllowList, audit: Callable[[DeniedError], None]
) -> None:
    """Answer one client to its end. Refusals are told to the client and to `audit`; nothing else is raised."""
    client = _Client(reader, writer)
    try:
        async with asyncio.timeout(LIFE_S):
            await _serve(client, allowed)
    except DeniedError as denied:
        audit(denied)
        await client.answer("403 Forbidden", str(denied))
    except BadRequestError as error:
        await client.answer("400 Bad Request", str(error))
    except (TimeoutError, OSError, EOFError, UnicodeError, asyncio.LimitOverrunError) as error:
        await client.answer("502 Bad Gateway", f"{type(error).__name__}: {error}")


async def _serve(client: _Client, allowed: AllowList) -> None:
    async with asyncio.timeout(HEAD_S):
        request = parse_request(await client.reader.readuntil(b"\r\n\r\n"))
    place = (canonical(request.host), request.port)
    if request.named is not None and (canonical(request.named[0]), request.named[1]) != place:
        raise DeniedError(request.host, request.port, f"the Host header names {request.named[0]!r} instead")
    server = await _connect(await allowed.addresses(request.host, request.port), request.port)
    try:
        if request.tunnel:
            await _tunnel(request, client, server)
        else:
            client.begun = True
            server[1].write(request.forwarded())
            await _exchange(client, server, request.body_bytes)
    finally:
        server[1].close()


async def _connect(addresses: list[str], port: int) -> Stream:
    """To the first address that answers."""
    last: Exception = OSError("the name has no address")
    for address in addresses:
        try:
            async with asyncio.timeout(CONNECT_S):
                return await asyncio.open_connection(address, port)
        except (OSError, TimeoutError) as error:
            last = error
    raise last


async def _tunnel(request: Request, client: _Client, server: Stream) -> None:
    client.begun = True
    client.writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
    async with asyncio.timeout(HEAD_S):
        hello, name = await _hello(request, client.reader)
    fits = literal(request.host) is not None if name is None else canonical(name) == canonical(request.host)
    if not fits:  # of an address a client asks for no name
        raise DeniedError(request.host, request.port, f"inside the tunnel TLS asks for {name!r}")
    server[1].write(hello)
    await _exchange(client, server, None)


async def _hello(request: Request, reader: asyncio.StreamReader) -> tuple[bytes, str | None]:
    """The first TLS message as it came, and the name in it."""
    raw, message = b"", b""
    while len(message) < 4 or len(message) < 4 + int.from_bytes(message[1:4], "big"):
        header = await reader.readexactly(5)  # kind, version, length
        if header[0] != HANDSHAKE or len(raw) > HEAD_BYTES:
            raise DeniedError(request.host, request.port, "what goes through the tunnel is not TLS")
        record = await reader.readexactly(int.from_bytes(header[3:5], "big"))
        raw, message = raw + header + record, message + record
    try:
        return raw, server_name(message)
    except ValueError as error:
        raise DeniedError(request.host, request.port, f"what goes through the tunnel is {error}") from error


async def _exchange(client: _Client, server: Stream, up_bytes: int | None) -> None:
    """Both ways at once, until the server has ended; at most `up_bytes` go up where that is a number."""
    pace = _Pace()
    sending = asyncio.create_task(_pump(client.reader, server[1], pace, up_bytes))
    try:
        await _pump(server[0], client.writer, pace, None)
    finally:
        sending.cancel()
        with contextlib.suppress(asyncio.CancelledError, OSError, TimeoutError):
            await sending


class _Pace:
    """When something last moved, either way."""

    def __init__(self) -> None:
        self.moved()

    def moved(self) -> None:
        self.at = asyncio.get_running_loop().time()

    def left(self) -> float:
        return self.at + IDLE_S - asyncio.get_running_loop().time()


async def _pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter, pace: _Pace, limit: int | None) -> None:
    while limit is None or limit > 0:
        try:
            async with asyncio.timeout(max(pace.left(), 0)):
                data = await source.read(CHUNK if limit is None else min(CHUNK, limit))
        except TimeoutError:
            if pace.left() > 0:
                continue  # the other way is busy
            raise
        if not data:
            break
        limit = None if limit is None else limit - len(data)
        pace.moved()
        sink.write(data)
        await sink.drain()
    if limit is None and sink.can_write_eof():
        sink.write_eof()
