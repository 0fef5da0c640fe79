"""One connection as the wire has it: what bounds it, and what of it is no request. Real sockets, uvicorn's own loop."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvicorn
from tritandem.front import protocol
from uvicorn.server import ServerState

BODY = b'{"prompt": "hi"}'
POST = b"POST /asked HTTP/1.1\r\nHost: x\r\n"
GET = b"GET /next HTTP/1.1\r\nHost: x\r\n\r\n"
SIZED = b"Content-Length: %d\r\n\r\n%s" % (len(BODY), BODY)
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n" % (len(BODY), BODY)
UPGRADE = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AA\r\n"

Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
Application = Callable[[Any, Any, Any], Awaitable[None]]


def visit(script: Script, app: Application) -> None:
    async def run() -> None:
        config = uvicorn.Config(app, lifespan="off", ws="none", log_config=None)
        config.load()
        state = ServerState()
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: protocol.BoundedHttp(config, state, {}), "127.0.0.1", 0)
        async with server:
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            await asyncio.wait_for(script(reader, writer), 20)
            writer.close()

    asyncio.run(run())


async def respond(send: Any, body: bytes) -> None:
    head = [(b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": head})
    await send({"type": "http.response.body", "body": body})


async def tell(scope: Any, receive: Any, send: Any) -> None:
    """Answers with what came."""
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
    names = [name.decode() for name, _ in scope["headers"]]
    await respond(send, json.dumps([scope["path"], names, body.decode()]).encode())


async def answer(reader: asyncio.StreamReader) -> Any:
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    length = int(head.split(b"content-length: ")[1].split(b"\r\n")[0])
    body = await reader.readexactly(length)
    return json.loads(body) if b" 200 " in head else int(head.split()[1])


@pytest.mark.parametrize("framed", [SIZED, CHUNKED + b"\r\n"], ids=["sized", "chunked"])
@pytest.mark.parametrize("step", [1, 9, 10_000])
def test_a_body_after_a_wish_to_upgrade_is_that_requests_body(framed: bytes, step: int) -> None:
    sent = POST + UPGRADE + framed + GET

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for at in range(0, len(sent), step):
            writer.write(sent[at : at + step])
            await writer.drain()
            await asyncio.sleep(0)
        path, names, body = await answer(reader)
        assert (path, body.encode()) == ("/asked", BODY)
        assert "upgrade" in names
        assert (await answer(reader))[0] == "/next"

    visit(script, tell)


def test_what_such_a_body_reads_like_is_no_request() -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(POST + UPGRADE + b"Content-Length: %d\r\n\r\n" % len(GET))
        await asyncio.sleep(0.1)
        writer.write(GET + GET)
        assert (await answer(reader))[2].encode() == GET
        assert (await answer(reader))[0] == "/next"

    visit(script, tell)


def test_trailers_are_no_headers() -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(POST + CHUNKED + b"authorization: Bearer other\r\nx-priority: interactive\r\n\r\n" + GET)
        assert (await answer(reader))[1] == ["host", "transfer-encoding"]
        assert (await answer(reader))[1] == ["host"]

    visit(script, tell)


def test_trailers_are_bounded() -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(POST + CHUNKED)
        await asyncio.sleep(0.1)
        writer.write(b"x: " + b"a" * 2 * protocol.MAX_HEADER_BYTES)
        assert await answer(reader) == 400
        with contextlib.suppress(ConnectionResetError):  # of one that went on sending
            assert await reader.read() == b""

    async def wait_for_the_end(scope: Any, receive: Any, send: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    visit(script, wait_for_the_end)


@pytest.mark.parametrize("more", [b"1\r\na\r\n", b""], ids=["a body without end", "line ends alone"])
def test_what_belongs_to_no_running_request_does_not_hold_a_connection(
    more: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "HEADER_TIMEOUT_S", 0.3)

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(POST + b"Transfer-Encoding: chunked\r\n\r\n" if more else GET)
        assert await answer(reader) == "refused"
        end = asyncio.ensure_future(reader.read())
        while not end.done():
            writer.write(more or b"\r\n")
            await asyncio.wait((end,), timeout=0.05)
        with contextlib.suppress(ConnectionResetError):  # of one that went on sending
            assert end.result() == b""

    async def refuse(scope: Any, receive: Any, send: Any) -> None:
        await respond(send, b'"refused"')

    visit(script, refuse)


def test_who_leaves_with_requests_in_line_has_left_the_running_one() -> None:
    told = asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(GET * 3)
        await writer.drain()
        writer.close()
        await told.wait()

    async def wait_for_the_end(scope: Any, receive: Any, send: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        told.set()

    visit(script, wait_for_the_end)


def test_who_takes_nothing_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "STUCK_S", 0.3)
    told = asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(GET * 10)
        writer.transport.pause_reading()
        await told.wait()

    async def say_much(scope: Any, receive: Any, send: Any) -> None:
        await respond(send, b"a" * (8 << 20))
        if (await receive())["type"] == "http.disconnect":
            told.set()

    visit(script, say_much)
