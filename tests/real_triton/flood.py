"""One tenant's flood beside honest requests, stops and deadlines: `python -m tests.real_triton.flood URL`.

The flood comes over a few gRPC streams, as fast as a client can write. Counts how each of its requests ends and how
often, and how long everybody waits for an answer. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

STREAMS = 16
PATIENCE_S = 300.0
HONEST_EVERY_S = 0.4
COMPLETED = "COMPLETED"


def request(request_id: str, text: str = "", max_tokens: int = 0, stop: bool = False, **parameters: Any) -> Any:
    made = service_pb2.ModelInferRequest(model_name="scheduler", id=request_id)

    def add(name: str, datatype: str, raw: bytes) -> None:
        made.inputs.add(name=name, datatype=datatype, shape=[1, 1])
        made.raw_input_contents.append(raw)

    if stop:
        add("stop", "BOOL", b"\1")
    else:
        add("text_input", "BYTES", len(text).to_bytes(4, "little") + text.encode())
        add("max_tokens", "INT32", max_tokens.to_bytes(4, "little"))
        add("stream", "BOOL", b"\1")
    for name, value in parameters.items():
        field = "int64_param" if isinstance(value, int) else "string_param"
        setattr(made.parameters[name], field, value)
    made.parameters["triton_enable_empty_final_response"].bool_param = True
    return made


def outcome(response: Any) -> str:
    """How a request ends with this response; "": it does not."""
    if response.error_message:
        return str(response.error_message).partition(":")[0]
    return COMPLETED if response.infer_response.parameters["triton_final_response"].bool_param else ""


class Flood:
    """`ends`: how often each request ended, by id. `waits_s`: seconds to each end, by outcome."""

    def __init__(self, url: str, requests: int, max_tokens: int) -> None:
        self.sent_s: dict[str, float] = {}
        self.ends: Counter[str] = Counter()
        self.waits_s: defaultdict[str, list[float]] = defaultdict(list)
        self.words: set[str] = set()
        self._url, self._each, self._max_tokens = url, requests // STREAMS, max_tokens
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._run, args=(i,), daemon=True) for i in range(STREAMS)]

    def __enter__(self) -> Flood:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for thread in self._threads:
            thread.join(PATIENCE_S)

    def _run(self, number: int) -> None:
        over = threading.Event()

        def requests() -> Iterator[Any]:
            for i in range(self._each):
                request_id = f"{number}-{i}"
                self.sent_s[request_id] = time.monotonic()
                yield request(request_id, f"Tell me about {number} and {i}.", self._max_tokens, tenant="flood")
            over.wait(PATIENCE_S)

        with grpc.insecure_channel(self._url, [("grpc.use_local_subchannel_pool", 1)]) as channel:
            left = self._each
            for response in service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer(requests()):
                if how := outcome(response):
                    now_s, request_id = time.monotonic(), response.infer_response.id
                    with self._lock:
                        self.ends[request_id] += 1
                        self.waits_s[how].append(now_s - self.sent_s[request_id])
                        if how != COMPLETED:
                            self.words.add(response.error_message)
                    left -= 1
                if not left:
                    over.set()


class Honest:
    """Now and then an interactive request, a stop and a deadline of a second; `waits_s`: to each one's first answer."""

    def __init__(self, url: str) -> None:
        self.waits_s: defaultdict[str, list[float]] = defaultdict(list)
        self._channel = grpc.insecure_channel(url)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._over = threading.Event()
        self._calls: list[threading.Thread] = []
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Honest:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        for call in self._calls:
            call.join(PATIENCE_S)
        self._channel.close()

    def _run(self) -> None:
        number = 0
        while not self._over.wait(HONEST_EVERY_S):
            number += 1
            question = "What is the capital of France?"
            interactive = {"tenant": "honest", "priority_class": "interactive"}
            for kind, one in (
                ("first token", request(f"honest-{number}", question, 4, **interactive)),
                ("stop", request(f"nobody-{number}", stop=True)),
                ("deadline of 1 s", request(f"late-{number}", question, 200, tenant="late", deadline_ms=1000)),
            ):
                call = threading.Thread(target=self._call, args=(kind, one), daemon=True)
                call.start()
                self._calls.append(call)

    def _call(self, kind: str, one: Any) -> None:
        begun_s, over = time.monotonic(), threading.Event()

        def requests() -> Iterator[Any]:
            yield one
            over.wait(PATIENCE_S)

        first = True
        for response in self._stub.ModelStreamInfer(requests(), timeout=PATIENCE_S):
            if first:
                refused = response.error_message and kind == "first token"
                self.waits_s["refusal" if refused else kind].append(time.monotonic() - begun_s)
                first = False
            if outcome(response):
                over.set()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("url", help="gRPC")
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--max-tokens", type=int, default=64)
    args = parser.parse_args()
    with Honest(args.url) as honest:
        time.sleep(5 * HONEST_EVERY_S)
        alone = {kind: max(waits) for kind, waits in honest.waits_s.items()}
        begun_s = time.monotonic()
        with Flood(args.url, args.requests, args.max_tokens) as flood:
            pass
    rows = [("flood: " + how, waits) for how, waits in flood.waits_s.items()]
    rows += [(kind, waits) for kind, waits in honest.waits_s.items()]
    print("| answer | requests | seconds p50 | p99 | max | max before the flood |\n|---|---|---|---|---|---|")
    table = {}
    for kind, waits in rows:
        waits.sort()
        p50, p99, most = (waits[min(len(waits) - 1, int(len(waits) * share))] for share in (0.5, 0.99, 1.0))
        table[kind] = {"requests": len(waits), "p50_s": round(p50, 2), "p99_s": round(p99, 2), "max_s": round(most, 2)}
        before = f"{alone[kind]:.2f}" if kind in alone else ""
        print(f"| {kind} | {len(waits)} | {p50:.2f} | {p99:.2f} | {most:.2f} | {before} |")
    sent_within_s = max(flood.sent_s.values()) - begun_s
    ended_twice = sum(count > 1 for count in flood.ends.values())
    never_ended = len(flood.sent_s) - len(flood.ends)
    print(f"sent within {sent_within_s:.1f} s; ended twice {ended_twice}; never ended {never_ended}")
    print(json.dumps({"sent_within_s": round(sent_within_s, 2), "twice": ended_twice, "never": never_ended, **table}))


if __name__ == "__main__":
    main()
