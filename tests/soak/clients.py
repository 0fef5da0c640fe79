"""The kinds of clients of a soak: each sends one request and tells the ledger how it ended.

Polite ones read to the end; others are slow, leave, are cancelled, stopped by id, ask for too little time or for
nonsense. All run on one event loop and share a connection for each way of reaching the server, as a gateway's would.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
from tritandem_client import (
    AsyncClient,
    ConnectionFailed,
    RequestError,
    Result,
    ServerNotReady,
    Timeout,
)
from tritandem_client.errors import error_from_server

from .ledger import CLOSED, REFUSED, TIMEOUT, UNREACHABLE, Entry, Ledger
from .solo import Solo

WAYS = [(protocol, model) for protocol in ("grpc", "http") for model in ("scheduler", "ensemble")]
PATIENCE_S = 90.0  # no request may take so long: the queue is bounded, and each has a deadline well before
DEADLINE_MS = 45_000
TOPICS = ("the sea", "numbers", "a long winter", "bread", "trains", "the moon", "an old house", "rain")
PRIORITIES = ("interactive", "normal", "batch")
# What a server must refuse by name, as bodies of HTTP requests.
NONSENSE: list[dict[str, Any]] = [
    {"text_input": "x", "temperature": -1},
    {"text_input": "x", "top_p": 7},
    {"text_input": "x", "max_tokens": 0},
    {"text_input": "x", "max_tokens": 1_000_000},
    {"text_input": "x", "sampling_parameters": '{"nonsense": 1}'},
    {"text_input": "x", "sampling_parameters": "{"},
    {"text_input": "x", "priority_class": "urgent"},
    {"text_input": "x", "deadline_ms": -5},
    {"text_input": ""},
    {"input_ids": [10_000_000]},
    {"messages": "not json"},
    {"max_tokens": 4},
]


class Clients:
    """`async with`; made anew after the server was replaced, because channels remember failures."""

    def __init__(self, ledger: Ledger, solo: Solo, grpc_url: str, http_url: str, rng: random.Random) -> None:
        self._ledger, self._solo, self._rng = ledger, solo, rng
        self._clients = {
            way: AsyncClient(grpc_url if way[0] == "grpc" else http_url, protocol=way[0], model=way[1])  # type: ignore[arg-type]
            for way in WAYS
        }
        self._raw = httpx.AsyncClient(base_url=f"http://{http_url}", timeout=PATIENCE_S)

    async def close(self) -> None:
        for client in self._clients.values():
            with contextlib.suppress(Exception):  # of a server that is gone
                await client.close()
        await self._raw.aclose()

    async def learn_answers(self) -> None:
        """While nothing else runs. Raises RequestError."""
        await self._solo.learn(self._clients["grpc", "scheduler"])

    def kinds(self) -> dict[Callable[[str], Awaitable[None]], int]:
        """How to make a request of each kind, given its id, with its weight."""
        return {
            self.reads_a_stream: 36,
            self.asks_for_one_answer: 20,
            self.closes: 10,
            self.is_cancelled: 7,
            self.is_stopped_by_id: 8,
            self.has_little_time: 6,
            self.reads_slowly: 5,
            self.sends_nonsense: 7,
            self.sends_rubbish: 1,
        }

    def options(self, request_id: str, most_tokens: int = 32) -> dict[str, Any]:
        """Of an ordinary request; half of them must get exactly what they order."""
        rng = self._rng
        options: dict[str, Any] = {
            "request_id": request_id,
            "max_tokens": rng.randint(1, most_tokens),
            "priority": rng.choice(PRIORITIES),
            "tenant": f"tenant {rng.randrange(5)}",
            "deadline_ms": DEADLINE_MS,
            "timeout_s": PATIENCE_S,
        }
        if rng.random() < 0.5:
            options["sampling_parameters"] = {"ignore_eos": True}
        if rng.random() < 0.3:
            options |= {"temperature": 0.8, "seed": rng.randrange(2**31)}
        return options

    def prompt(self, options: dict[str, Any]) -> str:
        """One whose answer is known for those who want it greedy and to its last token, most of the time."""
        rng = self._rng
        known = list(self._solo.answers)
        if known and "sampling_parameters" in options and "temperature" not in options and rng.random() < 0.8:
            return rng.choice(known)
        words = " ".join(rng.choice(TOPICS) for _ in range(rng.randint(1, 40)))
        return f"Tell me about {rng.choice(TOPICS)}. {words}"

    # Kinds ----------------------------------------------------------------------------------------

    async def reads_a_stream(self, request_id: str) -> None:
        await self._stream("reads", self.options(request_id))

    async def asks_for_one_answer(self, request_id: str) -> None:
        options = self.options(request_id)
        client, entry, prompt = self._begin("one answer", options)
        async with self._told(entry):
            result = await client.generate(prompt, **options)
            self._end_well(entry, prompt, result)

    async def reads_slowly(self, request_id: str) -> None:
        await self._stream("slow", self.options(request_id), pause_s=self._rng.uniform(0.05, 0.5))

    async def has_little_time(self, request_id: str) -> None:
        options = self.options(request_id) | {"deadline_ms": self._rng.randint(1, 3000), "max_tokens": 200}
        options.pop("sampling_parameters", None)
        await self._stream("hurry", options)

    async def closes(self, request_id: str) -> None:
        """After a few chunks."""
        options = self.options(request_id, 200)
        client, entry, prompt = self._begin("closes", options)
        enough = self._rng.randint(1, 5)
        async with self._told(entry):
            async with client.stream(prompt, **options) as stream:
                async for _ in stream:
                    enough -= 1
                    if enough == 0:
                        self._end(entry, CLOSED)
                        return
            self._end_well(entry, prompt, stream.result)

    async def is_cancelled(self, request_id: str) -> None:
        """At any moment, as by a task that is cancelled."""
        options = self.options(request_id, 200)
        client, entry, prompt = self._begin("cancelled", options)
        async with self._told(entry):
            try:
                result = await asyncio.wait_for(client.generate(prompt, **options), self._rng.uniform(0.01, 4.0))
            except asyncio.TimeoutError:
                self._end(entry, CLOSED)
                return
            self._end_well(entry, prompt, result)

    async def is_stopped_by_id(self, request_id: str) -> None:
        other = self._clients[self._rng.choice(WAYS)]

        async def stop() -> None:
            await asyncio.sleep(self._rng.uniform(0.05, 3.0))
            with contextlib.suppress(RequestError, ConnectionFailed, ServerNotReady, Timeout):
                await other.stop(request_id, timeout_s=10.0)

        stopping = asyncio.create_task(stop())
        options = self.options(request_id, 200)
        await self._stream("stopped", options)
        await stopping

    async def sends_nonsense(self, request_id: str) -> None:
        body = self._rng.choice(NONSENSE) | {"request_id": request_id}
        await self._post(self._ledger.open(request_id, "nonsense", time.monotonic()), json=body)

    async def sends_rubbish(self, request_id: str) -> None:
        entry = self._ledger.open(request_id, "rubbish", time.monotonic())
        await self._post(entry, content=b'{"text_input": ')

    # Parts ----------------------------------------------------------------------------------------

    async def _post(self, entry: Entry, **message: Any) -> None:
        model = self._rng.choice(("scheduler", "ensemble"))
        async with self._told(entry):
            response = await self._raw.post(f"/v2/models/{model}/generate", **message)
            if response.status_code == 200:
                self._end(entry, str(response.json().get("outcome", "COMPLETED")))
                return
            text = str(response.json()["error"])
            words = [word for word in ("REJECTED_INVALID", "REJECTED_SATURATED", "FAILED", "EXPIRED") if word in text]
            if not words and isinstance(error_from_server(text), ServerNotReady):
                words = [UNREACHABLE]
            self._end(entry, words[0] if words else REFUSED, detail=text[:200])

    async def _stream(self, kind: str, options: dict[str, Any], pause_s: float = 0.0) -> None:
        client, entry, prompt = self._begin(kind, options)
        async with self._told(entry):
            stream = client.stream(prompt, **options)
            async for _ in stream:
                if pause_s:
                    await asyncio.sleep(pause_s)
            self._end_well(entry, prompt, stream.result)

    def _begin(self, kind: str, options: dict[str, Any]) -> tuple[AsyncClient, Entry, str]:
        way = self._rng.choice(WAYS)
        exact = options["max_tokens"] if "sampling_parameters" in options else 0
        label = f"{kind}, {way[0]} {way[1]}"
        entry = self._ledger.open(options["request_id"], label, time.monotonic(), exact)
        return self._clients[way], entry, self.prompt(options)

    def _end_well(self, entry: Entry, prompt: str, result: Result) -> None:
        entry.wrong = prompt in self._solo.answers and not self._solo.agrees(prompt, result.text)
        self._end(entry, result.outcome, result.num_output_tokens, result.text[:200] if entry.wrong else "")

    def _end(self, entry: Entry, outcome: str, tokens: int = 0, detail: str = "") -> None:
        self._ledger.close(entry, outcome, time.monotonic(), tokens, detail)

    @contextlib.asynccontextmanager
    async def _told(self, entry: Entry) -> Any:
        """Every way in which a request may fail, as a word in the ledger."""
        try:
            yield
        except RequestError as error:
            self._end(entry, error.outcome, detail=str(error)[:200])
        except (Timeout, httpx.ReadTimeout) as error:
            self._end(entry, TIMEOUT, detail=str(error)[:200])
        except (ConnectionFailed, ServerNotReady, httpx.HTTPError) as error:
            self._end(entry, UNREACHABLE, detail=f"{type(error).__name__}: {error}"[:200])
