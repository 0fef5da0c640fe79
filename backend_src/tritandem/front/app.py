"""The ASGI application: which endpoint answers, who may ask, how a request ends.

Every request ends once: with one response, one line in the log, one count. Belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tritandem_client import AsyncClient, TritandemClientError

from ..contracts.errors import Outcome
from .ask import MAX_BODY_BYTES, OPENAI_TEMPERATURE, Ask, no_model, parse_body, read_ask, refuse_other_models
from .books import Books
from .chat import ChatShape
from .chat_turns import ChatTurns
from .completions import CompletionShape
from .errors import ApiError, ClientGone, draining, from_client, invalid, not_honoured
from .exchange import Exchange, Receive, Send
from .fields import CHAT, text
from .formats.choose import AS_IT_STANDS, NONE, Formats, plain
from .formats.text import Reading, Text
from .formats.turn import Turn
from .keys import Caller, Keys
from .limits import HEADERS, Meter
from .messages import Messages
from .monologue import Monologue
from .narrator import Endpoint, as_bytes
from .openapi import document
from .relay import Relay
from .responses import Responses
from .shapes import DONE, Envelope, Shape
from .structures import with_marks, with_structure
from .tokenize import Lookup, count_tokens, detokenize, tokenize

SHAPES: Mapping[str, Shape] = {"/v1/chat/completions": ChatShape(), "/v1/completions": CompletionShape()}
TALKS: Mapping[str, Endpoint] = {"/v1/responses": Responses(), "/v1/messages": Messages()}
COUNT = "/v1/messages/count_tokens"
LOOKUPS: Mapping[str, Lookup] = {"/tokenize": tokenize, "/detokenize": detokenize, COUNT: count_tokens}
# Whose errors have a shape of their own, and whose keys may have a header of their own.
MANNERS: Mapping[str, Endpoint] = {**TALKS, COUNT: TALKS["/v1/messages"]}
ENDPOINTS = (*SHAPES, *TALKS, *LOOKUPS, "/v1/models")
MAX_DEADLINE_MS = 86_400_000
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}", re.ASCII)
_FIELD_NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)
_EXPOSED = ", ".join(("x-request-id", "x-ignored-fields", "retry-after", *HEADERS))


@dataclass(frozen=True, slots=True)
class Site:
    """What is served to whom: names of the model, keys, origins whose pages may ask, how the model calls and thinks."""

    models: tuple[str, ...]
    keys: Keys
    origins: tuple[str, ...] = ()
    formats: Formats = AS_IT_STANDS
    context_tokens: int | None = None
    temperature: float | None = OPENAI_TEMPERATURE  # of who names none; None: the server has one of the model's authors


class App:
    def __init__(self, site: Site, client: AsyncClient, books: Books, meter: Meter | None = None) -> None:
        self._site, self._client, self._books, self._meter = site, client, books, meter or Meter()
        self._since = int(time.time())
        self._running = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self.draining = False
        self._open: dict[tuple[str, str], Callable[[Exchange], Awaitable[None]]] = {
            ("GET", "/health"): self._ready,
            ("GET", "/health/ready"): self._ready,
            ("GET", "/health/live"): self._live,
            ("GET", "/metrics"): self._metrics,
            ("GET", "/openapi.json"): self._openapi,
        }

    async def drain(self) -> None:
        """Take no new request; returns when none runs any more."""
        self.draining = True
        await self._idle.wait()

    async def __call__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"{scope['type']} is not served")
        exchange = Exchange(scope, receive, send)
        self._running += 1
        self._idle.clear()
        try:
            await self._answer(exchange)
        finally:
            self._running -= 1
            if not self._running:
                self._idle.set()

    async def _answer(self, exchange: Exchange) -> None:
        self._mark(exchange)
        if exchange.method == "OPTIONS" and exchange.header("access-control-request-method"):
            await exchange.respond(204, b"")
            return
        if page := self._open.get((exchange.method, exchange.path)):
            await page(exchange)
            return
        begun_s = time.monotonic()
        line: dict[str, Any] = {"id": exchange.headers["x-request-id"]}
        try:
            outcome = await self._serve(exchange, line)
        except ApiError as error:
            outcome, line["error"] = error.outcome, str(error)
            if not isinstance(error, ClientGone):
                await _say(exchange, error)
            line["status"] = error.status
        except Exception as error:  # a fault of ours: the client hears its kind, the log all of it
            failed = ApiError(500, f"internal error ({type(error).__name__})", "server_error", outcome=Outcome.FAILED)
            outcome, line["error"], line["status"] = failed.outcome, traceback.format_exc(limit=-5), 500
            await _say(exchange, failed)
        line.setdefault("status", exchange.status)
        line["ms"] = round((time.monotonic() - begun_s) * 1e3, 3)
        self._books.note(exchange.path if exchange.path in ENDPOINTS else "other", outcome, **line)

    async def _serve(self, exchange: Exchange, line: dict[str, Any]) -> Outcome:
        """Raises ApiError."""
        shape, talk = SHAPES.get(exchange.path), TALKS.get(exchange.path)
        listing = exchange.path == "/v1/models" or exchange.path.startswith("/v1/models/")
        lookup = LOOKUPS.get(exchange.path)
        if not (shape or talk or lookup or listing):
            raise ApiError(404, f"there is no {exchange.method} {exchange.path} here", code="unknown_url")
        allowed = "GET" if listing else "POST"
        if exchange.method != allowed:
            said = f"{exchange.path}: given {exchange.method}, allowed: {allowed}"
            raise ApiError(405, said, code="method_not_allowed", headers={"allow": allowed})
        caller = self._site.keys.caller(_authorization(exchange))
        if listing:
            await self._models(exchange)
            return Outcome.COMPLETED
        if self.draining:
            raise draining()
        with self._meter.admitted(caller.key, caller.limits, exchange.headers) as bill:
            try:
                if lookup:
                    return await self._look_up(exchange, lookup)
                if talk:
                    return await self._converse(exchange, talk, caller, line)
                assert shape is not None
                return await self._complete(exchange, shape, caller, line)
            finally:
                bill.tokens = line.get("prompt_tokens", 0) + line.get("output_tokens", 0)

    async def _complete(self, exchange: Exchange, shape: Shape, caller: Caller, line: dict[str, Any]) -> Outcome:
        ask = read_ask(shape.door, parse_body(await exchange.read_body(MAX_BODY_BYTES)), self._site.temperature)
        refuse_other_models(ask, self._site.models)
        grammar = _grammar(ask, self._site.formats)
        ask = with_marks(with_structure(ask, self._site.formats), self._site.formats)
        options = self._prepare(exchange, ask, shape.id_prefix, caller, line)
        turns = ChatTurns(grammar, ask.parallel_calls) if grammar else None
        envelope = Envelope(shape, options["request_id"], ask.model or self._site.models[0], int(time.time()))
        relay = Relay(ask, shape, envelope, self._client, options, turns)
        return await self._run(exchange, relay, ask, line)

    async def _look_up(self, exchange: Exchange, lookup: Lookup) -> Outcome:
        document = parse_body(await exchange.read_body(MAX_BODY_BYTES))
        model = document.get("model")
        if model is not None and text("model", model) not in self._site.models:
            raise no_model(model, self._site.models)
        try:
            said = await lookup(self._client, document, secrets.token_hex(12), self._site.context_tokens)
        except ApiError as error:
            if talk := MANNERS.get(exchange.path):
                error.rename(talk.param)
            raise
        except TritandemClientError as error:
            raise from_client(error, {"input_ids": "tokens"}) from error
        await exchange.respond(200, json.dumps(said).encode())
        return Outcome.COMPLETED

    async def _converse(self, exchange: Exchange, talk: Endpoint, caller: Caller, line: dict[str, Any]) -> Outcome:
        document = parse_body(await exchange.read_body(MAX_BODY_BYTES))
        try:
            ask = read_ask(CHAT, talk.to_chat(document), self._site.temperature)
            refuse_other_models(ask, self._site.models)
            grammar = _grammar(ask, self._site.formats)
            ask = with_marks(with_structure(ask, self._site.formats), self._site.formats)
            options = self._prepare(exchange, ask, talk.id_prefix, caller, line)
            model, turn = ask.model or self._site.models[0], Turn(grammar or plain, ask.parallel_calls)
            narrator = talk.narrator(document, ask, options["request_id"], model, int(time.time()))
            return await self._run(exchange, Monologue(ask, turn, narrator, self._client, options), ask, line)
        except ApiError as error:
            error.rename(talk.param)
            raise

    def _prepare(
        self, exchange: Exchange, ask: Ask, id_prefix: str, caller: Caller, line: dict[str, Any]
    ) -> dict[str, Any]:
        """The client's options beside those of the body. Raises ApiError."""
        options = _service_options(exchange, caller, ask.user)
        # An id of its own: who is told to stop by it is this request and no other, whatever clients send twice.
        request_id = options["request_id"] = id_prefix + secrets.token_hex(12)
        line.update(request=request_id, stream=ask.stream)
        if ask.unknown:
            unknown = tuple(name if _FIELD_NAME.fullmatch(name) else "?" for name in ask.unknown[:32])
            exchange.headers["x-ignored-fields"] = ", ".join(unknown)
            self._books.name_unknown(unknown)
        return options

    async def _run(self, exchange: Exchange, relay: Relay | Monologue, ask: Ask, line: dict[str, Any]) -> Outcome:
        """Until it is answered, or the client has gone. Raises ApiError."""
        work = asyncio.ensure_future(relay.stream(exchange) if ask.stream else relay.answer(exchange))
        leaving = asyncio.ensure_future(exchange.gone(events=ask.stream))
        try:
            await asyncio.wait((work, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise ClientGone
            work.result()
        except TritandemClientError as error:
            raise from_client(error, ask.names) from error
        finally:
            # Whatever still runs in the engine is cancelled by this, and stopped by its id.
            for task in (work, leaving):
                task.cancel()
            await asyncio.gather(work, leaving, return_exceptions=True)
            heard = relay.heard
            line["prompt_tokens"] = sum(one.num_input_tokens for one in heard)
            line["output_tokens"] = sum(one.num_output_tokens for one in heard)
        stopped = any(one.outcome == Outcome.STOPPED.value for one in relay.results)
        return Outcome.STOPPED if stopped else Outcome.COMPLETED

    def _mark(self, exchange: Exchange) -> None:
        """Headers that every response has."""
        asked = exchange.header("x-request-id") or ""
        exchange.headers["x-request-id"] = asked if _REQUEST_ID.fullmatch(asked) else secrets.token_hex(12)
        if self.draining:
            exchange.headers["connection"] = "close"
        origin = exchange.header("origin")
        if origin and ("*" in self._site.origins or origin in self._site.origins):
            exchange.headers |= {
                "access-control-allow-origin": origin,
                "access-control-allow-methods": "GET, POST, OPTIONS",
                "access-control-allow-headers": exchange.header("access-control-request-headers") or "*",
                "access-control-expose-headers": _EXPOSED,
                "vary": "origin",
            }

    async def _models(self, exchange: Exchange) -> None:
        served = [
            {"id": name, "object": "model", "created": self._since, "owned_by": "tritandem"}
            for name in self._site.models
        ]
        if exchange.path == "/v1/models":
            await exchange.respond(200, json.dumps({"object": "list", "data": served}).encode())
            return
        name = exchange.path.removeprefix("/v1/models/")
        for one in served:
            if one["id"] == name:
                await exchange.respond(200, json.dumps(one).encode())
                return
        raise no_model(name, self._site.models)

    async def _live(self, exchange: Exchange) -> None:
        await exchange.respond(200, b'{"status": "live"}')

    async def _ready(self, exchange: Exchange) -> None:
        health = None if self.draining else await self._client.health()
        if health:
            await exchange.respond(200, b'{"status": "ready"}')
            return
        reason = "draining" if health is None else health.reason
        await exchange.respond(503, json.dumps({"status": "not ready", "reason": reason}).encode())

    async def _metrics(self, exchange: Exchange) -> None:
        await exchange.respond(200, self._books.metrics().encode(), "text/plain; version=0.0.4; charset=utf-8")

    async def _openapi(self, exchange: Exchange) -> None:
        await exchange.respond(200, document())


async def _say(exchange: Exchange, error: ApiError) -> None:
    """As a response, or as the last event of a stream that has begun."""
    talk, request_id = MANNERS.get(exchange.path), exchange.headers["x-request-id"]
    if exchange.status:
        if exchange.status == 200 and talk:
            await exchange.end_events(as_bytes(iter((talk.error_event(error, request_id),))))
        elif exchange.status == 200:
            await exchange.end_events(b"data: " + error.body() + b"\n\n" + DONE)
        return
    exchange.headers |= error.headers
    await exchange.respond(error.status, talk.error(error, request_id) if talk else error.body())


def _authorization(exchange: Exchange) -> str:
    """Anthropic's clients have a header of their own."""
    key = exchange.header("x-api-key") if exchange.path in MANNERS else None
    return exchange.header("authorization") or (f"Bearer {key}" if key else "")


def _grammar(ask: Ask, formats: Formats) -> Callable[[Text], Reading[None]] | None:
    """How the answers of this request are read; None: as they stand. Raises ApiError."""
    if ask.door != CHAT:
        return None
    if ask.tools and formats.tools == NONE:
        allowed = "none: no form in which this model calls is known (--openai-tool-parser names one)"
        raise not_honoured("tools", f"{len(ask.tools)} tools", allowed)
    return formats.grammar(ask.tools, bool(ask.tools))


def _service_options(exchange: Exchange, caller: Caller, user: str | None) -> dict[str, Any]:
    """Who asks, how urgently, and on whose trace."""
    options: dict[str, Any] = {"tenant": caller.tenant or user}
    options["priority"] = caller.choose(exchange.header("x-priority"))
    if (deadline := exchange.header("x-deadline-ms")) is not None:
        if not re.fullmatch(r"[0-9]{1,9}", deadline) or not 1 <= int(deadline) <= MAX_DEADLINE_MS:
            raise invalid("x-deadline-ms", deadline, f"a whole number in [1, {MAX_DEADLINE_MS}]")
        options["deadline_ms"] = int(deadline)
    if (trace := exchange.header("traceparent")) is not None:
        options["traceparent"] = trace
    return {name: value for name, value in options.items() if value is not None}
