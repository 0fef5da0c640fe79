"""Hostile neighbours of a soak: bad bytes, forged inner tensors and calls, floods. They may fail as they like; they
must get an end, nothing that is not theirs, and honest requests must not notice.

Not among them: what ends the process of an old Triton whatever runs in it (docs/security.md).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import httpx

from .ledger import CLOSED, ENDED, OBEYED, REFUSED, TIMEOUT, UNREACHABLE, Entry, Ledger

PATIENCE_S = 60.0
FLOOD = 150  # requests at once: more than may wait
STREAM_CALL = "/inference.GRPCInferenceService/ModelStreamInfer"
# Bodies that no strict reader takes: bytes that are no UTF-8 where a text is read, JSON that ends early or never began.
BAD_BODIES = (
    b'{"text_input":"x","max_tokens":2,"tenant":"\xff"}',
    b'{"text_input":"x","max_tokens":2,"request_id":"\xc3("}',
    b'{"text_input":"\xed\xa0\x80","max_tokens":2}',
    b'{"text_input":"x","max_tokens":2,"stop_words":["\xff"]}',
    b'{"text_input":"x","sampling_parameters":"{\\"seed\\": \xff}"}',
    b'{"messages":"[{\\"role\\": \\"\xfe\\"}]","text_input":""}',
    b'{"text_input": ',
    b"\x00\x01\x02\xff" * 64,
)
# What only the tokenizer may say to the scheduler.
FORGED_TENSORS: tuple[dict[str, Any], ...] = (
    {"refusal": "REJECTED_INVALID: : given " * 8000},
    {"refusal": "x" * 1_000_000},
    {"text_input": "a", "tokenized_ns": [1, 2, 3, 0, 0]},
    {"text_input": "a", "input_ids": [1], "tokenized_ns": [1, 2, 3, 0, 0], "refusal": ""},
)
# What only our own processes may ask of the inner models: others' tokens, cancellations, submissions.
FORGED_CALLS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("engine", "generate_stream", {"header": [3, 0]}),
    ("engine", "generate_stream", {"header": [0, 0, 3, 0]}),
    ("engine", "generate", {"header": [2, 3000, *range(1, 3001)]}),
    ("engine", "generate", {"header": [1, 1, *range(1, 18)], "tokens": [1]}),
    ("engine_calls", "generate", {"header": [2, 3000, *range(1, 3001)], "engine": "engine"}),
    ("engine_calls", "generate", {"header": [4, 0], "engine": "engine_calls"}),
)
# gRPC messages that are none: no protobuf, an id that is no UTF-8, a request without tensors.
BAD_MESSAGES = (b"\xff" * 64, b"\x0a\x09scheduler\x1a\x02\xff\xfe", b"\x0a\x09scheduler")


class Hostile:
    """Every request is an entry of a ledger of their own; made anew with the server, as honest clients are."""

    def __init__(self, ledger: Ledger, grpc_url: str, http_url: str, rng: random.Random) -> None:
        self._ledger, self._rng, self._grpc_url, self._http_url = ledger, rng, grpc_url, http_url
        limits = httpx.Limits(max_connections=None)
        self._http = httpx.AsyncClient(base_url=f"http://{http_url}/v2/models", timeout=PATIENCE_S, limits=limits)

    async def close(self) -> None:
        await self._http.aclose()

    def acts(self) -> tuple[Callable[[str], Awaitable[None]], ...]:
        return (
            self.sends_bad_bytes,
            self.sends_bad_messages,
            self.poses_as_the_tokenizer,
            self.calls_inner_models,
            self.floods,
            self.sends_endless_ids,
            self.hangs_up,
        )

    async def sends_bad_bytes(self, act_id: str) -> None:
        model = self._rng.choice(("scheduler", "ensemble"))
        for body in BAD_BODIES:
            await self._post("bad bytes", act_id, f"/{model}/generate", body, ENDED)

    async def sends_bad_messages(self, act_id: str) -> None:
        for message in BAD_MESSAGES:
            async with (
                self._told("bad messages", act_id) as entry,
                grpc.aio.insecure_channel(self._grpc_url) as channel,
            ):
                answers = channel.stream_stream(STREAM_CALL)(iter([message]), timeout=PATIENCE_S)
                async for _ in answers:
                    break
                answers.cancel()
                self._end(entry, ENDED)

    async def poses_as_the_tokenizer(self, act_id: str) -> None:
        body = json.dumps(self._rng.choice(FORGED_TENSORS)).encode()
        await self._post("forged tensors", act_id, "/scheduler/generate", body, OBEYED)

    async def calls_inner_models(self, act_id: str) -> None:
        for model, call, body in FORGED_CALLS:
            await self._post("forged calls", act_id, f"/{model}/{call}", json.dumps(body).encode(), OBEYED)

    async def floods(self, act_id: str) -> None:
        """One tenant, more requests at once than may wait."""
        body = json.dumps({"text_input": "flood " * 50, "max_tokens": 8, "tenant": "flood", "request_id": act_id})
        path = f"/{self._rng.choice(('scheduler', 'ensemble'))}/generate"
        await asyncio.gather(*(self._post("flood", act_id, path, body.encode(), ENDED) for _ in range(FLOOD)))

    async def sends_endless_ids(self, act_id: str) -> None:
        body = json.dumps({"stop": True, "request_id": "i" * 2_000_000})
        await self._post("endless ids", act_id, "/scheduler/generate", body.encode(), ENDED)

    async def hangs_up(self, act_id: str) -> None:
        """In the middle of a head, of a body, and before the first byte of an answer."""
        host, port = self._http_url.split(":")
        body = b'{"text_input":"x","max_tokens":30}'
        head = b"POST /v2/models/scheduler/generate HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
        for sent in (head[:40], head + body[:9], head + body):
            async with self._told("hangs up", act_id) as entry:
                _, writer = await asyncio.wait_for(asyncio.open_connection(host, int(port)), PATIENCE_S)
                writer.write(sent)
                await writer.drain()
                writer.transport.abort()
                self._end(entry, CLOSED)

    async def _post(self, kind: str, act_id: str, path: str, body: bytes, answered: str) -> None:
        """`answered`: the word for an answer that is no refusal."""
        async with self._told(kind, act_id) as entry:
            async with self._http.stream("POST", path, content=body) as response:
                # One line: a stream of others' tokens would not end.
                text = await anext(response.aiter_text(), "")
            refused = response.status_code != 200 or '"error"' in text
            self._end(entry, REFUSED if refused else answered, text[:200])

    def _end(self, entry: Entry, outcome: str, detail: str = "") -> None:
        self._ledger.close(entry, outcome, time.monotonic(), detail=detail)

    @contextlib.asynccontextmanager
    async def _told(self, kind: str, act_id: str) -> AsyncIterator[Entry]:
        entry = self._ledger.open(f"{act_id}.{len(self._ledger.entries)}", kind, time.monotonic())
        try:
            yield entry
        except (httpx.TimeoutException, asyncio.TimeoutError) as error:
            self._end(entry, TIMEOUT, repr(error)[:200])
        except grpc.aio.AioRpcError as error:
            timed_out = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            self._end(entry, TIMEOUT if timed_out else REFUSED, str(error.details())[:200])
        except (httpx.HTTPError, OSError) as error:
            self._end(entry, UNREACHABLE, repr(error)[:200])
