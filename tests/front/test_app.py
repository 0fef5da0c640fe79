"""The application between ASGI and a real gRPC connection, with a scripted model behind it."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tritandem.contracts.errors import ConfigError, Outcome
from tritandem.front import exchange, relay
from tritandem.front.app import ENDPOINTS, App, Site
from tritandem.front.ask import MAX_BODY_BYTES
from tritandem.front.books import Books
from tritandem.front.formats.choose import AS_IT_STANDS, Formats
from tritandem.front.keys import Keys, read_keys
from tritandem_client import AsyncClient

from tests.client.scripts import chunk, hanging, last, saying, streaming
from tests.fakes.triton_grpc import FakeTritonGrpc
from tests.fakes.triton_protocol import Model, Received
from tests.front.asgi import Reply, Visit

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = {"messages": [{"role": "user", "content": "hello"}]}
Script = Callable[[App], Awaitable[Any]]


class House:
    """A front with a scripted server behind it: `run(script)` gives what the script returns."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self.server: Any = None
        self.books = Books(ENDPOINTS)

    def run(
        self,
        model: Model,
        script: Script,
        keys: Keys | None = None,
        origins: tuple[str, ...] = (),
        formats: Formats = AS_IT_STANDS,
    ) -> Any:
        self.server = self._stack.enter_context(FakeTritonGrpc(model))
        site = Site(("tiny", "alias"), keys or Keys({}), origins, formats)

        async def inside() -> Any:
            async with AsyncClient(self.server.url, timeout_s=None, stop_on_close=True) as client:
                return await asyncio.wait_for(script(App(site, client, self.books)), 30)

        return asyncio.run(inside())

    def ask(self, model: Model, method: str, path: str, body: Any = None, **more: Any) -> Reply:
        """The reply to one request."""
        headers = more.pop("headers", {})
        reply: Reply = self.run(model, lambda app: Visit(method, path, body, headers).run(app), **more)
        return reply

    @property
    def requests(self) -> list[Received]:
        return [one for one in self.server.visitors.requests if not one.is_stop]

    def counted(self, endpoint: str, outcome: str) -> int:
        [line] = [x for x in self.books.metrics().splitlines() if f'"{endpoint}",outcome="{outcome}"' in x]
        return int(line.split()[-1])


@pytest.fixture
def house() -> Iterator[House]:
    with ExitStack() as stack:
        yield House(stack)


def test_a_chat_is_answered_in_one_piece(house: House) -> None:
    reply = house.ask(streaming(), "POST", CHAT, {**HELLO, "model": "alias"}, headers={"x-request-id": "mine"})
    assert reply.status == 200
    assert reply.json["model"] == "alias"
    assert reply.json["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Paris.", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    assert reply.json["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}
    assert (reply.headers["x-request-id"], reply.headers["content-type"]) == ("mine", "application/json")
    assert house.counted(CHAT, "COMPLETED") == 1
    [request] = house.requests
    assert json.loads(request.parameters["messages"]) == HELLO["messages"]
    assert request.request_id == reply.json["id"], "an id of its own: clients may send theirs twice"


def test_a_stream_begins_with_the_role_and_ends_with_usage_and_done(house: House) -> None:
    body = {**HELLO, "stream": True, "stream_options": {"include_usage": True}}
    events = house.ask(streaming(), "POST", CHAT, body).events
    deltas = [event["choices"][0]["delta"] for event in events[:-1]]
    assert deltas == [
        {"role": "assistant", "content": ""},
        {"content": "Par"},
        {"content": "is"},
        {"content": "."},
        {},
    ]
    assert [event["choices"][0]["finish_reason"] for event in events[:-1]] == [None, None, None, None, "stop"]
    assert (events[-1]["choices"], events[-1]["usage"]["completion_tokens"]) == ([], 3)
    assert len({event["id"] for event in events}) == 1


def choosing(texts: tuple[str, ...]) -> Any:
    """A model that gives each of `n` answers its text: word by word in turns, or all in one response."""

    def model(request: Received) -> Any:
        n = request.inputs.get("n", [1])[0]
        said = {"num_input_tokens": ("UINT32", [5]), "cached_tokens": ("UINT32", [3])}
        if "stream" not in request.inputs:
            logprobs = [json.dumps([{"7": {"logprob": -float(i), "decoded_token": "x"}}]) for i in range(n)]
            yield {
                **said,
                "text_output": ("BYTES", list(texts[:n])),
                "finish_reason": ("BYTES", ["length"] * n),
                "num_output_tokens": ("UINT32", [2] * n),
                **({"logprobs": ("BYTES", logprobs)} if "return_logprobs" in request.inputs else {}),
            }
            return
        words = [text.split() for text in texts[:n]]
        for number in range(max(map(len, words))):
            for index in range(n):
                if number < len(words[index]):
                    ended = {"finish_reason": ("BYTES", ["stop"])} if number + 1 == len(words[index]) else {}
                    yield {
                        **said,
                        "text_output": ("BYTES", [words[index][number]]),
                        "num_output_tokens": ("UINT32", [1]),
                        "sequence_index": ("INT32", [index]),
                        **ended,
                    }

    return model


def test_several_prompts_and_choices_each_have_their_index(house: House) -> None:
    body = {"prompt": ["a", "b"], "n": 2, "echo": True, "seed": 5}
    reply = house.ask(choosing(("one", "two")), "POST", COMPLETIONS, body)
    assert [(one["index"], one["text"]) for one in reply.json["choices"]] == [
        (0, "aone"),
        (1, "atwo"),
        (2, "bone"),
        (3, "btwo"),
    ]
    assert reply.json["usage"]["prompt_tokens"] == 10, "each prompt once"
    assert reply.json["usage"]["completion_tokens"] == 8
    sent = sorted((one.prompt, one.inputs["seed"][0], one.inputs["n"][0]) for one in house.requests)
    assert sent == [("a", 5, 2), ("b", 5, 2)], "one request for each prompt: the model makes the answers"


def test_streamed_choices_each_begin_and_end_by_themselves(house: House) -> None:
    body = {**HELLO, "n": 3, "stream": True, "stream_options": {"include_usage": True}}
    events = house.ask(choosing(("a b c", "d", "e f")), "POST", CHAT, body).events
    choices = [event["choices"][0] for event in events[:-1]]
    for index, text in enumerate(("abc", "d", "ef")):
        own = [choice for choice in choices if choice["index"] == index]
        assert own[0]["delta"]["role"] == "assistant"
        assert "".join(choice["delta"].get("content", "") for choice in own) == text
        assert [choice["finish_reason"] for choice in own].count("stop") == 1
        assert own[-1]["finish_reason"] == "stop"
    assert events[-1]["usage"]["completion_tokens"] == 6


def test_of_more_answers_the_likeliest_are_told(house: House) -> None:
    body = {"prompt": "a", "n": 2, "best_of": 4}
    reply = house.ask(choosing(("first", "second", "third", "fourth")), "POST", COMPLETIONS, body)
    assert [(one["index"], one["text"], one["logprobs"]) for one in reply.json["choices"]] == [
        (0, "first", None),
        (1, "second", None),
    ]
    assert reply.json["usage"]["completion_tokens"] == 8, "of all that were made"


def scoring(request: Received) -> Any:
    """A model that scores the prompt "ab" where that is asked for."""
    if request.model == "tokenizer":
        yield {"text_output": ("BYTES", ["ab"]), "refusal": ("BYTES", [""])}
        return
    asked, n = json.loads(request.inputs.get("sampling_parameters", ["{}"])[0]), request.inputs.get("n", [1])[0]
    alternatives = {"9": {"logprob": -0.5, "rank": 1, "decoded_token": "c"}}
    chosen = {"7": {"logprob": -2.0, "rank": 2, "decoded_token": "b"}}
    prompt = [{"3": {"logprob": None, "rank": None, "decoded_token": "a"}}, chosen | alternatives]
    more = {"prompt_logprobs": ("BYTES", [json.dumps(prompt)])} if "prompt_logprobs" in asked else {}
    logprobs = {"logprobs": ("BYTES", [json.dumps([alternatives])])}
    if "stream" not in request.inputs:
        every = {**last("d", 1, "length"), **logprobs}
        own = ("text_output", "finish_reason", "logprobs", "num_output_tokens")
        yield {**every, **{name: (every[name][0], every[name][1] * n) for name in own}, **more}
        return
    for index in range(n):
        yield {
            **last("d", 1, "length"),
            **logprobs,
            **(more if not index else {}),
            "sequence_index": ("INT32", [index]),
        }


PROMPT_SCORES = {
    "tokens": ["a", "b"],
    "token_logprobs": [None, -2.0],
    "top_logprobs": [None, {"c": -0.5}],
    "text_offset": [0, 1],
}


@pytest.mark.parametrize("prompt", ["ab", [3, 7]])
@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_with_log_probabilities_begins_with_the_prompts(house: House, prompt: Any, stream: bool) -> None:
    body = {"prompt": prompt, "n": 2, "echo": True, "logprobs": 1, "max_tokens": 1, "stream": stream}
    reply = house.ask(scoring, "POST", COMPLETIONS, body)
    answer = {"tokens": ["c"], "token_logprobs": [-0.5], "top_logprobs": [{"c": -0.5}], "text_offset": [2]}
    both = {name: [*values, *answer[name]] for name, values in PROMPT_SCORES.items()}
    if stream:
        told = [event["choices"][0] for event in reply.events]
        for index in range(2):
            first, second, end = (choice for choice in told if choice["index"] == index)
            assert (first["text"], first["logprobs"]) == ("ab", PROMPT_SCORES)
            assert (second["text"], second["logprobs"]) == ("d", answer)
            assert end["finish_reason"] == "length"
    else:
        assert [(one["text"], one["logprobs"]) for one in reply.json["choices"]] == [("abd", both)] * 2
    assert sum("prompt_logprobs" in str(request.inputs) for request in house.requests) == 1, "one prompt, scored once"


@pytest.mark.parametrize("stream", [False, True])
def test_without_a_token_to_generate_the_prompt_alone_is_told(house: House, stream: bool) -> None:
    body = {"prompt": [3, 7], "echo": True, "logprobs": 1, "max_tokens": 0, "stream": stream}
    reply = house.ask(scoring, "POST", COMPLETIONS, {**body, "stream_options": {"include_usage": True}})
    if stream:
        first, end = (event["choices"][0] for event in reply.events[:-1])
        usage = reply.events[-1]["usage"]
    else:
        [first], usage = reply.json["choices"], reply.json["usage"]
        end = first
    assert (first["text"], first["logprobs"], end["finish_reason"]) == ("ab", PROMPT_SCORES, "length")
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (5, 0)


def test_scores_of_the_prompt_have_vllms_form_too(house: House) -> None:
    [choice] = house.ask(scoring, "POST", CHAT, {**HELLO, "prompt_logprobs": 1}).json["choices"]
    assert choice["prompt_logprobs"] == [
        None,
        {
            "9": {"logprob": -0.5, "rank": 1, "decoded_token": "c"},
            "7": {"logprob": -2.0, "rank": 2, "decoded_token": "b"},
        },
    ]


def test_what_is_not_of_the_body_travels_too(house: House) -> None:
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    headers = {"x-deadline-ms": "5000", "x-priority": "batch", "traceparent": trace}
    assert house.ask(streaming(), "POST", CHAT, {**HELLO, "user": "ann"}, headers=headers).status == 200
    parameters = house.requests[0].parameters
    assert {name: value for name, value in parameters.items() if name != "messages"} == {
        "deadline_ms": 5000,
        "priority_class": "batch",
        "tenant": "ann",
        "traceparent": trace,
    }


def test_an_unknown_field_is_named_in_a_header_and_once_in_the_log(
    house: House, capsys: pytest.CaptureFixture[str]
) -> None:
    async def twice(app: App) -> list[Reply]:
        body = {**HELLO, "session_id": "1", "a\r\nb": 1}
        return [await Visit("POST", CHAT, body).run(app) for _ in range(2)]

    for reply in house.run(streaming(), twice):
        assert (reply.status, reply.headers["x-ignored-fields"]) == (200, "session_id, ?")
    assert capsys.readouterr().out.count('"field": "session_id"') == 1


@pytest.mark.parametrize(
    ("said", "status", "outcome"),
    [
        ("REJECTED_INVALID: top_p: given 7.0, allowed: a number in (0, 1]", 400, "REJECTED_INVALID"),
        ("REJECTED_SATURATED: too many requests wait; retry after 2.0 s", 429, "REJECTED_SATURATED"),
        ("REJECTED_SATURATED: the server is draining; retry after 5.0 s", 503, "REJECTED_SATURATED"),
        ("EXPIRED: the deadline has passed", 504, "EXPIRED"),
        ("FAILED: internal error", 500, "FAILED"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_has_its_status_in_streams_too(
    house: House, said: str, status: int, outcome: str, stream: bool
) -> None:
    reply = house.ask(saying(RuntimeError(said)), "POST", CHAT, {**HELLO, "stream": stream})
    assert reply.status == status
    assert reply.json["error"].keys() == {"message", "type", "param", "code"}
    assert ("retry-after" in reply.headers) == (status in (429, 503))
    assert house.counted(CHAT, outcome) == 1


def test_an_error_in_a_running_stream_is_its_last_event(house: House) -> None:
    model = saying(chunk("Par"), RuntimeError("FAILED: the engine broke"))
    reply = house.ask(model, "POST", CHAT, {**HELLO, "stream": True})
    assert reply.status == 200
    assert reply.events[-1]["error"]["code"] == "failed"
    assert house.counted(CHAT, "FAILED") == 1


def test_a_server_that_is_not_there_is_a_503(house: House) -> None:
    async def script(app: App) -> tuple[Reply, Reply]:
        await asyncio.to_thread(house.server.die)
        return await Visit("POST", CHAT, HELLO).run(app), await Visit("GET", "/health").run(app)

    asked, health = house.run(streaming(), script)
    assert (asked.status, asked.json["error"]["code"], asked.headers["retry-after"]) == (503, "unavailable", "1")
    assert health.status == 503


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_stops_its_request_by_id(house: House, stream: bool) -> None:
    async def script(app: App) -> float:
        visit = Visit("POST", CHAT, {**HELLO, "stream": stream})
        running = asyncio.ensure_future(visit.run(app))
        if stream:
            await visit.arrived.wait()
        await asyncio.to_thread(house.server.visitors.wait_for, lambda request: not request.is_stop)
        visit.leave()
        left_s = asyncio.get_running_loop().time()
        await running
        stop = await asyncio.to_thread(house.server.visitors.wait_for, lambda request: request.is_stop)
        assert stop.request_id == house.requests[0].request_id
        return asyncio.get_running_loop().time() - left_s

    assert house.run(hanging(chunk("a")), script) < 5.0
    assert house.requests[0].gone.wait(5)
    assert house.counted(CHAT, "CANCELLED") == 1


def test_a_slow_reader_is_waited_for(house: House) -> None:
    async def script(app: App) -> Reply:
        visit = Visit("POST", CHAT, {**HELLO, "stream": True})
        visit.read.clear()
        running = asyncio.ensure_future(visit.run(app))
        await visit.arrived.wait()
        assert not (await asyncio.wait((running,), timeout=0.3))[0]
        assert visit.reply.body.count(b"data: ") == 2, "the role and the first text; no more was taken"
        visit.read.set()
        return await running

    assert len(house.run(saying(*(chunk(f"{i} ") for i in range(500)), last()), script).events) > 2
    assert house.counted(CHAT, "COMPLETED") == 1


def test_a_waiting_stream_is_kept_alive(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "KEEP_ALIVE_S", 0.05)

    async def script(app: App) -> Reply:
        visit = Visit("POST", CHAT, {**HELLO, "stream": True})
        running = asyncio.ensure_future(visit.run(app))
        await visit.arrived.wait()
        visit.leave()
        return await running

    assert house.run(hanging(), script).body.startswith(b": waiting\n\n")


def test_draining_finishes_what_runs_and_refuses_the_rest(house: House) -> None:
    async def script(app: App) -> tuple[Reply, Reply]:
        visit = Visit("POST", CHAT, {**HELLO, "stream": True})
        running = asyncio.ensure_future(visit.run(app))
        await visit.arrived.wait()
        drained = asyncio.ensure_future(app.drain())
        await asyncio.sleep(0)
        late = await Visit("POST", CHAT, HELLO).run(app)
        assert (await Visit("GET", "/health").run(app)).status == 503
        assert (await Visit("GET", "/health/live").run(app)).status == 200
        assert not drained.done()
        visit.leave()
        await drained
        return await running, late

    running, late = house.run(hanging(chunk("a")), script)
    assert running.status == 200
    assert (late.status, late.json["error"]["code"], late.headers["connection"]) == (503, "draining", "close")


def test_keys_name_tenant_and_class(house: House, tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text('[sk-a]\ntenant = "search"\nclass = "normal"\n[sk-b]\n')
    keys = read_keys(file)

    async def script(app: App) -> list[int]:
        async def status(*, path: str = CHAT, **headers: str) -> int:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            method = "POST" if path == CHAT else "GET"
            body = {**HELLO, "user": "mallory"}
            return (await Visit(method, path, body, named).run(app)).status

        return [
            await status(),
            await status(authorization="Bearer sk-c"),
            await status(authorization="Basic sk-a"),
            await status(path="/v1/models"),
            await status(path="/health"),
            await status(authorization="Bearer sk-a", x_priority="interactive"),
            await status(authorization="Bearer sk-a", x_priority="batch"),
            await status(authorization="bearer sk-b"),
        ]

    assert house.run(streaming(), script, keys=keys) == [401, 401, 401, 401, 200, 400, 200, 200]
    assert [request.parameters["tenant"] for request in house.requests] == ["search", "mallory"]
    assert [request.parameters["priority_class"] for request in house.requests] == ["batch", "normal"]


@pytest.mark.parametrize(
    "text", ["", "x", "a = 1", "[k]\nname = 1", "[k]\nclass = 'high'", "[k]\ntenant = ''"], ids=repr
)
def test_a_wrong_file_of_keys_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(text)
    with pytest.raises(ConfigError, match="--openai-keys"):
        read_keys(tmp_path / "keys")


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "param"),
    [
        ("POST", CHAT, {**HELLO, "model": "other"}, 404, "model"),
        ("GET", "/v1/models/other", None, 404, "model"),
        ("POST", "/v1/embeddings", {}, 404, None),
        ("GET", CHAT, None, 405, None),
        ("POST", CHAT, b"x" * (MAX_BODY_BYTES + 1), 413, "body"),
        ("POST", CHAT, b"{", 400, "body"),
    ],
)
def test_what_is_not_served_is_said(
    house: House, method: str, path: str, body: Any, status: int, param: str | None
) -> None:
    reply = house.ask(streaming(), method, path, body)
    assert (reply.status, reply.json["error"]["param"]) == (status, param)


def test_a_client_that_leaves_over_its_body_is_counted_so(house: House) -> None:
    async def script(app: App) -> Reply:
        visit = Visit("POST", CHAT, HELLO)
        visit.hold_body()
        visit.leave()
        return await visit.run(app)

    assert house.run(streaming(), script).status == 0
    assert house.counted(CHAT, "CANCELLED") == 1


def test_a_fault_of_ours_is_a_500_and_its_whole_story_in_the_log(
    house: House, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delattr(relay.Relay, "answer")
    reply = house.ask(streaming(), "POST", CHAT, HELLO)
    assert (reply.status, reply.json["error"]["message"]) == (500, "internal error (AttributeError)")
    assert "app.py" in capsys.readouterr().out
    assert house.counted(CHAT, "FAILED") == 1


def test_a_body_that_does_not_come_is_not_waited_for(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "BODY_TIMEOUT_S", 0.05)

    async def script(app: App) -> Reply:
        visit = Visit("POST", CHAT, HELLO)
        visit.hold_body()
        return await visit.run(app)

    reply = house.run(streaming(), script)
    assert (reply.status, reply.json["error"]["param"]) == (408, "body")


@pytest.mark.parametrize("headers", [{"x-deadline-ms": "soon"}, {"x-deadline-ms": "0"}, {"x-priority": "high"}])
def test_a_wrong_header_is_named(house: House, headers: dict[str, str]) -> None:
    reply = house.ask(streaming(), "POST", CHAT, HELLO, headers=headers)
    assert (reply.status, [reply.json["error"]["param"]]) == (400, list(headers))


def test_pages_of_other_origins_may_ask_only_when_told_so(house: House) -> None:
    async def script(app: App) -> list[Reply]:
        asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
        return [
            await Visit("OPTIONS", CHAT, None, {"origin": origin, **asked}).run(app)
            for origin in ("http://one", "http://two")
        ]

    one, two = house.run(streaming(), script, origins=("http://one",))
    assert one.headers["access-control-allow-origin"] == "http://one"
    assert "access-control-allow-origin" not in two.headers


def test_the_description_names_every_field(house: House) -> None:
    paths = house.ask(streaming(), "GET", "/openapi.json").json["paths"]
    body = paths[CHAT]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert {"messages", "max_completion_tokens", "top_logprobs"} <= body["properties"].keys()
    assert body["required"] == ["messages"]


def test_workers_count_together() -> None:
    shared = os.memfd_create("counters")
    books = [Books(ENDPOINTS, shared, worker) for worker in range(2)]
    os.close(shared)
    for each in books:
        each.note(CHAT, Outcome.COMPLETED)
    assert f'{{endpoint="{CHAT}",outcome="COMPLETED"}} 2' in books[0].metrics()
