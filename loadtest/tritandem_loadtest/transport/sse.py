"""HTTP streaming by server-sent events: Triton's `generate_stream` and OpenAI-style `/v1` endpoints.

Owns a pool of kept-alive HTTP/1.1 connections. Needs cooperative (monkey-patched) sockets to run many at once.
"""

from __future__ import annotations

import http.client
import json
import select
import time
from collections.abc import Mapping
from typing import Any, Protocol
from urllib.parse import urlsplit

from .. import stamps
from ..dialects import Dialect
from .grpc_messages import parameters, stage_times_ms, tensor_values
from .interface import Call, Decoded, Exchange

_READ_BYTES = 65536


class Endpoint(Protocol):
    """What differs between two kinds of HTTP server."""

    def request(self, call: Call) -> tuple[str, dict[str, Any]]:
        """(path, JSON body)."""

    def read_event(self, event: dict[str, Any], arrived_ns: int, into: Decoded) -> None:
        """Add what one event says."""


class SseTransport:
    """`url` is http(s)://HOST:PORT, or HOST:PORT for plain text."""

    def __init__(self, url: str, endpoint: Endpoint, headers: Mapping[str, str]) -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if not parts.hostname:
            raise ValueError(f"no host in {url!r}")
        self._host, self._port = parts.hostname, parts.port
        self._secure = parts.scheme == "https"
        self._endpoint = endpoint
        self._headers = {"Content-Type": "application/json", "Accept": "text/event-stream", **headers}
        self._idle: list[http.client.HTTPConnection] = []

    def open(self) -> None:
        """Connections are made by the first requests: how many will be needed is not known here."""

    def exchange(self, call: Call, timeout_s: float) -> Exchange:
        path, body = self._endpoint.request(call)
        data = json.dumps(body).encode()
        result = Exchange(sent_ns=time.monotonic_ns())
        connection = self._kept() or self._connect(timeout_s)
        try:
            connection.request("POST", path, data, self._headers)
            response = connection.getresponse()
            if response.status == 200:
                self._read_events(response, result, timeout_s)
            else:
                text = _error_text(response.read())
                result.outcome, result.error = stamps.outcome_of(text), text or f"HTTP status {response.status}"
            if response.isclosed() and not response.will_close and not result.outcome:
                self._idle.append(connection)
            else:
                connection.close()
        except TimeoutError:
            result.outcome, result.error = stamps.TIMEOUT, f"no end after {timeout_s:g} s"
            connection.close()
        except (OSError, http.client.HTTPException) as error:
            result.outcome, result.error = stamps.UNREACHABLE, f"{type(error).__name__}: {error}"
            connection.close()
        result.end_ns = time.monotonic_ns()
        return result

    def decode(self, exchange: Exchange) -> Decoded:
        """An event with a key `error` ends the stream with that error; `[DONE]` is no event."""
        result = Decoded()
        for arrived_ns, payload in exchange.messages:
            if payload == b"[DONE]":
                continue
            event = json.loads(payload)
            if "error" in event:
                result.error = _error_text(payload)
            else:
                self._endpoint.read_event(event, arrived_ns, result)
        return result

    def close(self) -> None:
        for connection in self._idle:
            connection.close()

    def _kept(self) -> http.client.HTTPConnection | None:
        """An idle connection that the server has not hung up on meanwhile, as servers do after a while."""
        while self._idle:
            connection = self._idle.pop()
            if not select.select([connection.sock], [], [], 0)[0]:
                return connection
            connection.close()
        return None

    def _connect(self, timeout_s: float) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        return kind(self._host, self._port, timeout=timeout_s)

    def _read_events(self, response: http.client.HTTPResponse, result: Exchange, timeout_s: float) -> None:
        rest = b""
        while data := response.read1(_READ_BYTES):
            now_ns = time.monotonic_ns()
            if now_ns - result.sent_ns > timeout_s * 1e9:
                raise TimeoutError
            *events, rest = (rest + data).replace(b"\r\n", b"\n").split(b"\n\n")
            for event in events:
                lines = [line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")]
                if lines:
                    result.messages.append((now_ns, b"\n".join(lines)))


class TritonGenerate:
    """`POST /v2/models/MODEL/generate_stream`: the tensors of a dialect as JSON keys. Requests have no id here: Triton
    takes every key that is no tensor for a request parameter."""

    def __init__(self, dialect: Dialect, model: str, ignore_eos: bool) -> None:
        self._dialect, self._model, self._ignore_eos = dialect, model, ignore_eos

    def request(self, call: Call) -> tuple[str, dict[str, Any]]:
        values = tensor_values(call, self._dialect, self._ignore_eos)
        body: dict[str, Any] = {tensor.name: value for tensor, value in values.items()}
        custom = parameters(call, self._dialect)
        if custom:
            body["parameters"] = custom
        return f"/v2/models/{self._model}/generate_stream", body

    def read_event(self, event: dict[str, Any], arrived_ns: int, into: Decoded) -> None:
        dialect = self._dialect
        tokens = event.get(dialect.count_output) if dialect.count_output else None
        if tokens is None:
            tokens = 1 if event.get(dialect.text_output) else 0
        into.input_tokens = event.get(dialect.input_count_output, into.input_tokens)
        into.cached_tokens = event.get(dialect.cached_count_output, into.cached_tokens)
        if dialect.stamps_output in event:
            into.server = stage_times_ms(event[dialect.stamps_output], dialect)
        elif any(event.get(name) for name in dialect.stamp_outputs):
            into.server = stage_times_ms([event.get(name, 0) for name in dialect.stamp_outputs], dialect)
        if tokens:
            into.arrived_ns.append(arrived_ns)
            into.tokens.append(int(tokens))


class OpenAi:
    """`POST /v1/completions`, or `/v1/chat/completions` for a call with messages. A text chunk is one token;
    the usage block that ends the stream corrects the total, on the last chunk."""

    def __init__(self, model: str, ignore_eos: bool) -> None:
        self._model, self._ignore_eos = model, ignore_eos

    def request(self, call: Call) -> tuple[str, dict[str, Any]]:
        body: dict[str, Any] = {
            "model": self._model,
            "max_tokens": call.max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            **call.options,
        }
        if self._ignore_eos:
            body["ignore_eos"] = True
        if call.messages:
            messages = [{"role": role, "content": text} for role, text in call.messages]
            return "/v1/chat/completions", {**body, "messages": messages}
        return "/v1/completions", {**body, "prompt": call.prompt}

    def read_event(self, event: dict[str, Any], arrived_ns: int, into: Decoded) -> None:
        for choice in event.get("choices", ()):
            if choice.get("text") or choice.get("delta", {}).get("content"):
                into.arrived_ns.append(arrived_ns)
                into.tokens.append(1)
        usage = event.get("usage")
        if usage:
            into.input_tokens = usage.get("prompt_tokens", 0)
            into.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
            missing = usage.get("completion_tokens", 0) - sum(into.tokens)
            if into.tokens and missing > 0:
                into.tokens[-1] += missing


def _error_text(payload: bytes) -> str:
    """The message inside the error bodies of Triton (`{"error": text}`, also as an event) and OpenAI
    (`{"error": {"message": ...}}`)."""
    try:
        error = json.loads(payload.strip().removeprefix(b"data:"))["error"]
    except (ValueError, KeyError, TypeError):
        return payload.decode("utf-8", "replace").strip()
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)
