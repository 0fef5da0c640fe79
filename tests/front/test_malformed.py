"""Bodies and framings that no request may have, at every door: a 4xx that names the field, and nobody else notices."""

from __future__ import annotations

import contextlib
import json
import random
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tritandem.front import exchange
from tritandem.front.app import App
from tritandem.front.ask import MAX_BODY_BYTES

from tests.client.scripts import streaming
from tests.fakes.triton_protocol import Received
from tests.front.asgi import Reply, Visit
from tests.front.test_app import HELLO, House, house
from tests.front.test_tokenize import tokenizer
from tests.front.test_worker import ask, front

__all__ = ["house"]

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
SAMPLING = {"max_tokens": 4, "temperature": 0.5, "top_p": 0.9, "top_k": 3, "seed": 1, "stop": ["x"], "user": "me"}
# A sound body of each door; the tests spoil one field of it, or add a wrong one.
DOORS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        **HELLO, **SAMPLING, "n": 1, "stream": False, "logprobs": True, "top_logprobs": 2, "min_tokens": 0,
        "min_p": 0.1, "logit_bias": {"3": 1}, "allowed_token_ids": [1, 2], "stop_token_ids": [5], "ignore_eos": False,
        "presence_penalty": 0.1, "frequency_penalty": 0.1, "repetition_penalty": 1.1, "bad_words": ["y"],
        "stream_options": {"include_usage": False}, "tool_choice": "auto", "parallel_tool_calls": True, "model": "tiny",
    },
    "/v1/completions": {
        "prompt": "hello", **SAMPLING, "n": 1, "stream": False, "logprobs": 1, "echo": False, "model": "tiny",
    },
    "/v1/responses": {
        "input": "hello", "instructions": "Be brief.", "max_output_tokens": 4, "temperature": 0.5, "top_p": 0.9,
        "store": False, "stream": False, "tools": [], "parallel_tool_calls": True, "model": "tiny",
    },
    "/v1/messages": {
        **HELLO, "max_tokens": 4, "system": "Be brief.", "stop_sequences": ["x"], "temperature": 0.5, "top_p": 0.9,
        "top_k": 3, "stream": False, "metadata": {"user_id": "me"}, "model": "tiny",
    },
    "/v1/messages/count_tokens": {**HELLO, "system": "Be brief.", "model": "tiny"},
    "/tokenize": {"prompt": "hello", "add_special_tokens": False, "model": "tiny"},
    "/detokenize": {"tokens": [104], "model": "tiny"},
}  # fmt: skip
VALUES: tuple[Any, ...] = (
    {}, [], "", "x", 0, -1, 2**70, -(2**70), 1.5, -0.5, 1e300, float("nan"), float("inf"), True, False, [None], [[]],
    [{}], [-1], ["x", 1], {"a": {"b": []}}, {"type": "x"}, [{"role": 1, "content": 1}], [{"type": "text"}], "\ud800",
    "x" * 4000, [0] * 2000, {"x": 1}, [TOOL, 1], [[[[1]]]], "\x00", [""],
)  # fmt: skip


def model(request: Received) -> Any:
    return tokenizer(request) if request.model == "tokenizer" else streaming()(request)


def named(reply: Reply, path: str) -> tuple[str, str]:
    """What is said, and the field that it is said of; Anthropic's errors name it at the beginning of the message."""
    error = reply.json["error"]
    return error["message"], error["message"].partition(":")[0] if path.startswith("/v1/messages") else error["param"]


def spoilt(draw: random.Random) -> tuple[str, str, dict[str, Any]]:
    path = draw.choice(list(DOORS))
    field = draw.choice(list(DOORS[path]))
    return path, field, {**DOORS[path], field: draw.choice(VALUES)}


def test_of_thousands_of_wrong_values_each_is_answered_or_refused_by_name(house: House) -> None:
    draw = random.Random(11)

    async def script(app: App) -> int:
        refused = 0
        for _ in range(4000):
            path, field, body = spoilt(draw)
            reply = await Visit("POST", path, json.dumps(body).encode()).run(app)
            if reply.status == 200:
                continue
            refused += 1
            assert reply.status == 400 or (reply.status == 404 and isinstance(body["model"], str)), body
            message, param = named(reply, path)
            asked = f"{path} {field} = {body[field]!r}"[:300]
            assert param.split("[")[0].split(".")[0] in {field, *ALSO.get(field, ())}, f"{asked}: {message}"
        return refused

    assert house.run(model, script) > 1500


# Of two fields that do not go together either may be named.
ALSO = {
    "logprobs": ("top_logprobs", "echo"),
    "top_logprobs": ("logprobs",),
    "stop_sequences": ("stop",),
    "metadata": ("user", "metadata.user_id"),
    "parallel_tool_calls": ("tool_choice",),
}


@pytest.mark.parametrize("path", DOORS)
@pytest.mark.parametrize(
    ("spoil", "status"),
    [
        (lambda text: text[: len(text) // 2], 400),
        (lambda text: b"", 400),
        (lambda text: b"[" * 50_000, 400),
        (lambda text: text[:-1] + b',"x":' + b"[" * 300 + b"]" * 300 + b"}", 400),
        (lambda text: text[:-1] + b',"x":' + b'{"a":' * 300 + b"1" + b"}" * 300 + b"}", 400),
        (lambda text: text.replace(b"hello", b"\xff\xfe") if b"hello" in text else b'{"tokens": "\xff"}', 400),
        (lambda text: text + text, 400),
        (lambda text: b"\xef\xbb\xbf" + text, 400),
        (lambda text: text[:-1] + b',"x":1e999999}' + b"\x00", 400),
        (lambda text: b"[" + text + b"]", 400),
        (lambda text: b"null", 400),
        (lambda text: text[:-1] + b',"x":"' + b"a" * MAX_BODY_BYTES + b'"}', 413),
    ],
    ids=[
        "cut",
        "empty",
        "open",
        "deep list",
        "deep object",
        "no UTF-8",
        "twice",
        "BOM",
        "zero",
        "list",
        "null",
        "huge",
    ],
)
def test_what_is_no_sound_json_object_is_refused(
    house: House, path: str, spoil: Callable[[bytes], bytes], status: int
) -> None:
    reply = house.ask(model, "POST", path, spoil(json.dumps(DOORS[path]).encode()))
    assert reply.status == status
    assert named(reply, path)[1] in ("body", "x")


@pytest.mark.parametrize("path", DOORS)
def test_a_body_that_stays_away_is_not_waited_for(house: House, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "BODY_TIMEOUT_S", 0.05)

    async def script(app: App) -> Reply:
        visit = Visit("POST", path, b'{"model": ')
        visit.hold_body()
        return await visit.run(app)

    reply = house.run(model, script)
    assert (reply.status, named(reply, path)[1]) == (408, "body")


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
BODY = b'{"prompt": "x"}'
# What a proxy in front and this server might read differently: a request hidden in another one's body.
SMUGGLED = {
    "two lengths": b"Content-Length: 15\r\nContent-Length: 4\r\n\r\n" + BODY,
    "length and chunks": b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunks and length": b"Transfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n0\r\n\r\n",
    "unknown coding": b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    "chunks twice": b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    "space before the colon": b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
    "negative length": b"Content-Length: -1\r\n\r\n" + BODY,
    "signed length": b"Content-Length: +15\r\n\r\n" + BODY,
    "length in hexadecimal": b"Content-Length: 0xf\r\n\r\n" + BODY,
    "length beyond 64 bits": b"Content-Length: 99999999999999999999\r\n\r\n" + BODY,
    "chunk beyond 64 bits": b"Transfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\nx",
    "no chunk size": b"Transfer-Encoding: chunked\r\n\r\nxyz\r\n",
    "zero in a header": b"X-A: a\x00b\r\nContent-Length: 15\r\n\r\n" + BODY,
    "space in a name": b"X A: b\r\nContent-Length: 15\r\n\r\n" + BODY,
    "no colon": b"nonsense\r\nContent-Length: 15\r\n\r\n" + BODY,
    "HTTP/9.9": b"",
}


def test_smuggled_headers_are_refused_and_the_connection_ends(tmp_path: Path) -> None:
    with front(streaming(), tmp_path / "log") as (_, port, _said):
        for name, rest in SMUGGLED.items():
            sent = HEAD + rest if rest else HEAD.replace(b"1.1", b"9.9") + b"\r\n"
            with socket.create_connection(("127.0.0.1", port), 10) as raw:
                raw.sendall(sent + b"GET /v1/models HTTP/1.1\r\nHost: hidden\r\n\r\n")
                answered = b""
                with contextlib.suppress(ConnectionResetError):
                    while data := raw.recv(65536):
                        answered += data
            assert answered.startswith(b"HTTP/1.1 4"), (name, answered)
            assert answered.count(b"HTTP/1.1 ") == 1, (name, answered)
        assert ask(port).status == 200
