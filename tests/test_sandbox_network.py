"""A box reaches what is on its list, through the proxy, and nothing else; and the proxy is not talked round."""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from palestra.envs.errors import ConfigError, SandboxError
from palestra.envs.sandboxes import egress, egress_proxy
from palestra.envs.sandboxes.contract import BoxSpec, Sandbox
from palestra.envs.sandboxes.egress_parse import BadRequestError, parse_request, server_name
from palestra.envs.sandboxes.egress_rules import AllowList, DeniedError, canonical, literal, public
from palestra.envs.sandboxes.owner import Owner
from palestra.envs.sandboxes.pool import PoolSettings, SandboxPool
from palestra.envs.tool_environment import ToolEnvironment
from palestra.envs.tools import Tool, ToolContext
from palestra.envs.types import JSON, Action, Message, Task, ToolCall
from sandbox_support import DOCKER, NAMESPACE, SPEC, backend

every_kind = pytest.mark.parametrize("kind", [NAMESPACE, DOCKER])
SAY = """
import socket, sys
with socket.create_connection(("127.0.0.1", 3128), timeout=10) as line:
    line.sendall(sys.stdin.buffer.read())
    while data := line.recv(65536):
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
"""
GET = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1], timeout=10).read().decode())"


def hello(name: str | None) -> bytes:
    """What a TLS client says first."""
    context = ssl.create_default_context()
    context.check_hostname = False
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = context.wrap_bio(incoming, outgoing, server_hostname=name)
    with contextlib.suppress(ssl.SSLWantReadError):
        client.do_handshake()
    return outgoing.read()


@contextlib.asynccontextmanager
async def upstream() -> AsyncIterator[tuple[int, list[bytes]]]:
    """A server of the host that answers whatever it is told and keeps it; its port."""
    heard: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(await reader.read(65536))
        body = b"hello from outside"
        head = b"HTTP/1.1 302 Found\r\nLocation: http://169.254.169.254/\r\n" if b"/away" in heard[-1] else b""
        writer.write((head or b"HTTP/1.1 200 OK\r\n") + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1], heard


@contextlib.asynccontextmanager
async def box_with(kind: str, *network: str) -> AsyncIterator[Sandbox]:
    """A box that may reach these places."""
    made = backend(kind)
    box = await made.open(replace(SPEC, network=network), episode="e")
    try:
        yield box
    finally:
        await box.close()
        assert await made.owned() == []


async def said(box: Sandbox, data: bytes) -> bytes:
    """What the proxy answers to these bytes."""
    ended = await box.run(["python3", "-c", SAY], timeout_s=20, stdin=data)
    return ended.stdout


@every_kind
def test_a_listed_place_is_reached_and_no_other(kind: str) -> None:
    """Rows C04, G04."""

    async def body() -> None:
        async with upstream() as (port, heard), box_with(kind, f"localhost:{port}", f"127.0.0.1:{port}") as box:
            env = {"no_proxy": ""}
            ended = await box.run(["python3", "-c", GET, f"http://localhost:{port}/x?y"], timeout_s=20, env=env)
            assert ended.stdout == b"hello from outside\n", ended.stderr
            assert heard[0].startswith(b"GET /x?y HTTP/1.1\r\nHost: localhost:")
            assert b"Connection: close" in heard[0]
            assert box.denials() == ()
            for address in (f"http://example.org:{port}/", f"http://localhost:{port + 1}/", "http://172.17.0.1:8265/"):
                ended = await box.run(["python3", "-c", GET, address], timeout_s=20, env=env)
                assert b"403" in ended.stderr
                assert ended.seconds < 5
            assert [(denial.port, denial.probe) for denial in box.denials()] == [
                (port, False),
                (port + 1, True),
                (8265, True),
            ]
            assert len(heard) == 1
            away = await said(box, b"GET http://localhost:%d/away HTTP/1.1\r\n\r\n" % port)
            assert b"302" in away  # told, and not followed
            assert b"403" in await said(box, b"GET http://169.254.169.254/ HTTP/1.1\r\n\r\n")

    asyncio.run(body())


@every_kind
def test_there_is_no_other_way_out_and_a_reset_leaves_no_connection(kind: str) -> None:
    """Rows G02, I01: no interface, no trace of an episode's connections, and a box that serves the next one."""

    async def body() -> None:
        async with upstream() as (port, _), box_with(kind, f"localhost:{port}", f"127.0.0.1:{port}") as box:
            probe = "import socket; socket.create_connection(('169.254.169.254', 80), timeout=5)"
            ended = await box.run(["python3", "-c", probe], timeout_s=20)
            assert b"unreachable" in ended.stderr
            assert ended.seconds < 4
            names = await box.run(["ls", "/sys/class/net"], timeout_s=10)
            assert names.stdout in (b"lo\n", b"")
            inside = await box.run(["/bin/sh", "-c", "ls -A /run/palestra; echo $HTTPS_PROXY"], timeout_s=10)
            assert inside.stdout == b"http://127.0.0.1:3128\n"
            cold = await box.digest()
            hold = "import socket, time\nall = [socket.create_connection(('127.0.0.1', 3128)) for n in range(8)]\n"
            hold += f"all[0].sendall(b'CONNECT localhost:{port} HTTP/1.1\\r\\n\\r\\n')\ntime.sleep(60)"
            for _ in range(3):
                assert (await box.run(["python3", "-c", hold], timeout_s=1)).timed_out
                await said(box, b"GET http://10.0.0.1/ HTTP/1.1\r\n\r\n")
                assert len(box.denials()) == 1
                await box.reset()
                assert box.denials() == ()
                assert await box.digest() == cold
            assert b"hello" in await said(box, b"GET http://localhost:%d/ HTTP/1.1\r\n\r\n" % port)

    asyncio.run(body())


@pytest.mark.parametrize("kind", [NAMESPACE])
def test_the_proxy_is_not_talked_round(kind: str) -> None:
    """Row G05: each is refused, and what is a denial is noted."""

    async def body() -> None:
        async with upstream() as (port, heard), box_with(kind, f"localhost:{port}", f"127.0.0.1:{port}") as box:
            place = b"localhost:%d" % port
            tunnel = b"CONNECT " + place + b" HTTP/1.1\r\n\r\n"
            denied = {
                "another Host": b"GET http://" + place + b"/ HTTP/1.1\r\nHost: evil.example\r\n\r\n",
                "another Host of a tunnel": b"CONNECT " + place + b" HTTP/1.1\r\nHost: evil.example:443\r\n\r\n",
                "an address": b"CONNECT 93.184.216.34:443 HTTP/1.1\r\n\r\n",
                "a number": b"GET http://2852039166/ HTTP/1.1\r\n\r\n",
                "an IPv6 address": b"CONNECT [::ffff:169.254.169.254]:80 HTTP/1.1\r\n\r\n",
                "another name in TLS": tunnel + hello("evil.example"),
                "no name in TLS": tunnel + hello(None),
                "an endless name": b"GET http://" + b"x" * 9000 + b"/ HTTP/1.1\r\n\r\n",
                "a zero byte": b"GET http://a\0b/ HTTP/1.1\r\n\r\n",
                "no TLS in a tunnel": tunnel + b"GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n",
            }
            for name, data in denied.items():
                before = len(box.denials())
                answer = await said(box, data)
                assert b"hello from outside" not in answer, name
                assert len(box.denials()) == before + 1, name
            assert max(len(denial.host) for denial in box.denials()) <= 255
            malformed = {
                "another scheme": b"GET ftp://" + place + b"/ HTTP/1.1\r\n\r\n",
                "a websocket": b"GET ws://" + place + b"/ HTTP/1.1\r\n\r\n",
                "no place": b"GET / HTTP/1.1\r\nHost: " + place + b"\r\n\r\n",
                "user and host": b"GET http://localhost@" + place + b"/ HTTP/1.1\r\n\r\n",
                "two Hosts": b"GET http://" + place + b"/ HTTP/1.1\r\nHost: " + place + b"\r\nHost: evil\r\n\r\n",
                "chunks": b"POST http://" + place + b"/ HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
                "two lengths": b"POST http://"
                + place
                + b"/ HTTP/1.1\r\ncontent-length: 1\r\nContent-Length: 2\r\n\r\n",
                "a folded line": b"GET http://" + place + b"/ HTTP/1.1\r\nx: 1\r\n Host: evil\r\n\r\n",
            }
            for name, data in malformed.items():
                assert (await said(box, data)).startswith(b"HTTP/1.1 400"), name
            assert heard == [] or all(not data for data in heard)  # nothing but connections that ended at once
            second = b"GET http://" + place + b"/1 HTTP/1.1\r\n\r\nGET http://evil.example/2 HTTP/1.1\r\n\r\n"
            assert b"hello" in await said(box, second)
            assert b"evil" not in heard[-1]
            assert b"hello from outside" in await said(box, tunnel + hello("localhost"))

    asyncio.run(body())


def test_connections_are_bounded_in_number_and_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Row G05, long-lived tunnels."""
    monkeypatch.setattr(egress_proxy, "IDLE_S", 1.0)
    monkeypatch.setattr(egress_proxy, "HEAD_S", 2.0)

    async def body() -> None:
        async with upstream() as (port, _), box_with("namespace", f"localhost:{port}", f"127.0.0.1:{port}") as box:
            flood = "import socket\nall = [socket.create_connection(('127.0.0.1', 3128)) for n in range(64)]\n"
            flood += "[one.settimeout(1) for one in all]\nended = 0\n"
            flood += "for one in all:\n  try: ended += one.recv(1) == b''\n  except TimeoutError: break\n"
            flood += "print(ended)"
            backwards = flood.replace("in all:", "in all[::-1]:")
            ended = await box.run(["python3", "-c", backwards], timeout_s=20)
            assert int(ended.stdout) == 64 - egress.CONNECTIONS
            silent = "import socket\none = socket.create_connection(('127.0.0.1', 3128), timeout=10)\n"
            silent += "print(one.recv(100)[:12])"
            ended = await box.run(["python3", "-c", silent], timeout_s=20)
            assert ended.stdout == b"b'HTTP/1.1 502'\n"
            assert ended.seconds < 5

    asyncio.run(body())


@pytest.mark.parametrize(
    "written",
    ["169.254.169.254", "2852039166", "0xa9fea9fe", "0251.0376.0251.0376", "[::ffff:169.254.169.254]", "169.254.43518"],
)
def test_an_address_is_known_however_it_is_written(written: str) -> None:
    """Row G02."""
    assert canonical(written) == "169.254.169.254"
    address = literal(written)
    assert address is not None
    assert not public(address)
    with pytest.raises(DeniedError) as caught:
        AllowList.of(["example.org:80"]).check(written, 80)
    assert caught.value.probe


def test_names_lead_only_to_public_addresses_unless_the_address_is_listed_too() -> None:
    """Row G05, names that are made to lead inside."""

    async def body() -> None:
        with pytest.raises(DeniedError, match="not public"):
            await AllowList.of(["localhost:80"]).addresses("LOCALHOST.", 80)
        both = AllowList.of(["localhost:80", "127.0.0.1:80", "[::1]:80"])
        assert "127.0.0.1" in await both.addresses("localhost", 80)
        with pytest.raises(DeniedError, match="not on the list"):
            await both.addresses("localhost", 81)

    asyncio.run(body())
    inside = (
        "127.0.0.1 10.1.2.3 192.168.0.1 100.64.0.1 0.0.0.0 224.0.0.1 ::1 fe80::1 fd00::1 64:ff9b::a00:1 2002:a00:1::"
    )
    for text in inside.split():
        address = literal(text)
        assert address is not None, text
        assert not public(address), text
    for text in ("93.184.216.34", "2606:2800:220:1::1"):
        address = literal(text)
        assert address is not None
        assert public(address)


@pytest.mark.parametrize("entry", ["example.org", "*.example.org:443", "example.org:0", "http://example.org:80", ":80"])
def test_an_entry_that_is_no_place_is_refused(entry: str) -> None:
    async def body() -> None:
        async with SandboxPool(PoolSettings(run="t"), backend("namespace")) as pool:
            with pytest.raises(ConfigError, match="network: "):
                await pool.acquire(BoxSpec(network=(entry,)), {}, episode="e")

    asyncio.run(body())


def test_the_name_in_tls_is_read_from_what_a_client_really_says() -> None:
    assert server_name(hello("files.example.org")[5:]) == "files.example.org"
    assert server_name(hello(None)[5:]) is None
    for broken in (b"", b"\x02" + hello("a.example")[6:], hello("a.example")[5:60]):
        with pytest.raises(ValueError, match="hello"):
            server_name(broken)


def test_a_request_is_passed_on_without_what_is_for_the_proxy() -> None:
    head = b"POST http://a.example:8080/x HTTP/1.1\r\nHost: a.example:8080\r\nProxy-Authorization: x\r\n"
    head += b"Connection: keep-alive, X-Secret\r\nX-Secret: y\r\nUpgrade: websocket\r\nContent-Length: 3\r\n\r\n"
    request = parse_request(head)
    assert request.body_bytes == 3
    assert request.forwarded() == (
        b"POST /x HTTP/1.1\r\nHost: a.example:8080\r\nConnection: close\r\ncontent-length: 3\r\n\r\n"
    )
    with pytest.raises(BadRequestError):
        parse_request(b"GET http://a.example/ HTTP/2\r\n\r\n")


def test_a_box_whose_way_out_cannot_be_opened_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing_comes(host: object) -> object:
        raise OSError("the box handed no socket over")

    monkeypatch.setattr(egress, "_taken", nothing_comes)

    async def body() -> None:
        made = backend("namespace")
        with pytest.raises(SandboxError):
            await made.open(replace(SPEC, network=("example.org:80",)), episode="e")
        assert await made.owned() == []

    asyncio.run(body())


def test_the_folder_of_a_dead_owners_gate_is_found_and_a_live_ones_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    us = Owner.this_process()
    gates = [egress.Gate("g", ["a.example:80"], owner) for owner in (us, replace(us, started=us.started + 1))]
    try:
        assert egress.abandoned() == [gates[1].folder]
        egress.remove(gates[1].folder)
        assert os.listdir(tmp_path) == [gates[0].folder.name]
    finally:
        for gate in gates:
            gate.close()
    assert os.listdir(tmp_path) == []


def test_an_episode_that_went_for_the_metadata_address_is_flagged() -> None:
    """Rows G02, G04: the refusal reaches the artefact, and with it the trajectory."""

    async def body() -> None:
        async def fetch(arguments: Mapping[str, JSON], context: ToolContext) -> str:
            ended = await context.run(["python3", "-c", GET, str(arguments["address"])])
            return (ended.stdout + ended.stderr).decode()

        address: dict[str, JSON] = {"type": "string"}
        schema: dict[str, JSON] = {"type": "object", "properties": {"address": address}, "required": ["address"]}
        tool = Tool("fetch", "Fetch an address.", schema, fetch, timeout_s=20)
        async with SandboxPool(PoolSettings(run="t", max_boxes=1), backend("namespace")) as pool:
            probe = ("http://169.254.169.254/latest", ("control_plane_probe",))
            for asked, flags in (("http://no.example/", ()), probe, ("http://no.example/", ())):
                spec = replace(SPEC, network=("a.example:80",))
                environment = ToolEnvironment(Task("t", (Message("user", "go"),)), (tool,), pool, spec=spec)
                await environment.start()
                step = await environment.step(Action("", (ToolCall("c1", "fetch", {"address": asked}),)))
                assert "403" in step.results[0].content
                assert (await environment.export()).flags == flags
                await environment.close()

    asyncio.run(body())
