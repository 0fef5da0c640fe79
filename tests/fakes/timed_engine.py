"""A streaming server whose every token has a known time, in a process of its own.

Run as `python -m tests.fakes.timed_engine JSON`.

Speaks Triton's gRPC stream (by grpcio and by a cheap server), `generate_stream` and OpenAI completions. Strict:
anything but the tritandem dialect is an error. Writes down when it really sent each token, so that a test can tell a
wrong figure of the load generator from a late timer of this fake. Prints its addresses once it listens.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc
from aiohttp import web
from tritonclient.grpc import service_pb2 as pb

from tests.fakes.raw_grpc_server import RawGrpcConnection
from tests.fakes.triton_protocol import elements, raw_tensor

ALLOWED = {
    "text_input": "BYTES",
    "max_tokens": "INT32",
    "stream": "BOOL",
    "exclude_input_in_output": "BOOL",
    "return_num_input_tokens": "BOOL",
    "return_num_output_tokens": "BOOL",
    "sampling_parameters": "BYTES",
}


@dataclass(frozen=True)
class Plan:
    """Request `n` has its first token after `ttft(n)` ms, then one response each `gap(n)` ms."""

    ttft_ms: float = 30.0
    ttft_spread_ms: float = 40.0
    gap_ms: float = 8.0
    gap_spread_ms: float = 6.0
    tokens_per_response: int = 1
    stall_after_s: float = 0.0  # counted from the first request
    stall_s: float = 0.0
    log: str = ""  # file that gets a JSON line for each request, before its stream ends: index, sent_ns (monotonic)

    def ttft(self, n: int) -> float:
        return self.ttft_ms + self.ttft_spread_ms * (n * 37 % 101) / 100

    def gap(self, n: int) -> float:
        return self.gap_ms + self.gap_spread_ms * (n * 53 % 97) / 96


@dataclass
class Piece:
    """One response to be. `stamps` belongs to the last."""

    text: str
    tokens: int
    input_words: int
    stamps: list[int] | None


class Engine:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.first_request_at: float | None = None

    async def generate(self, number: int, prompt: str, max_tokens: int, received_ns: int = 0) -> AsyncIterator[Piece]:
        """Raises RuntimeError with the public text when the prompt says `FAIL ...`."""
        loop, received_ns = asyncio.get_running_loop(), received_ns or time.monotonic_ns()
        due = received_ns / 1e9  # the loop's clock is the monotonic one
        if self.first_request_at is None:
            self.first_request_at = due
        if prompt.startswith("FAIL "):
            raise RuntimeError(prompt.removeprefix("FAIL "))
        due += self.plan.ttft(number) / 1e3
        left, sent_ns = max_tokens, list[int]()
        while left > 0:
            await asyncio.sleep(self.after_stall(due) - loop.time())
            tokens = min(left, self.plan.tokens_per_response if sent_ns else 1)
            left -= tokens
            sent_ns.append(time.monotonic_ns())
            early = [received_ns + i for i in range(5)]
            stamps = [*early, sent_ns[0], sent_ns[-1], sent_ns[0] + 1, sent_ns[-1] + 1] if left == 0 else None
            yield Piece(" word" * tokens, tokens, len(prompt.split()), stamps)
            due += self.plan.gap(number) / 1e3
        if self.plan.log:
            with open(self.plan.log, "a", encoding="utf-8") as log:
                log.write(json.dumps({"index": number, "sent_ns": sent_ns}) + "\n")

    def after_stall(self, due: float) -> float:
        assert self.first_request_at is not None
        begin = self.first_request_at + self.plan.stall_after_s
        return max(due, begin + self.plan.stall_s) if self.plan.stall_s and due >= begin else due


def number_of(request_id: str) -> int:
    return int(request_id.rsplit("-", 1)[1])


def read_inputs(request: pb.ModelInferRequest) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for tensor, raw in zip(request.inputs, request.raw_input_contents, strict=True):
        if ALLOWED.get(tensor.name) != tensor.datatype or list(tensor.shape) != [1, 1]:
            raise RuntimeError(f"REJECTED_INVALID: {tensor.name} {tensor.datatype} {list(tensor.shape)}")
        [values[tensor.name]] = elements(tensor.datatype, raw)
    if request.model_name != "ensemble" or not values["stream"]:
        raise RuntimeError("REJECTED_INVALID: model or stream")
    return values


def response(request_id: str, piece: Piece) -> pb.ModelStreamInferResponse:
    message = pb.ModelStreamInferResponse()
    inner = message.infer_response
    inner.model_name, inner.id = "ensemble", request_id
    outputs: list[tuple[str, str, list[Any]]] = [
        ("text_output", "BYTES", [piece.text]),
        ("num_output_tokens", "UINT32", [piece.tokens]),
        ("num_input_tokens", "UINT32", [piece.input_words]),
    ]
    if piece.stamps:
        outputs += [("stamps", "INT64", piece.stamps), ("cached_tokens", "UINT32", [7])]
    for name, datatype, tensor in outputs:
        inner.outputs.add(name=name, datatype=datatype, shape=[1, len(tensor)])
        inner.raw_output_contents.append(raw_tensor(datatype, tensor))
    inner.parameters["triton_final_response"].bool_param = piece.stamps is not None
    return message


async def stream_infer(
    engine: Engine, request: pb.ModelInferRequest, received_ns: int = 0
) -> AsyncIterator[pb.ModelStreamInferResponse]:
    try:
        values = read_inputs(request)
        number, prompt = number_of(request.id), values["text_input"]
        async for piece in engine.generate(number, prompt, values["max_tokens"], received_ns):
            yield response(request.id, piece)
    except RuntimeError as error:
        yield pb.ModelStreamInferResponse(error_message=str(error))


async def answer_http(engine: Engine, request: web.Request) -> web.StreamResponse:
    """Both HTTP dialects. Requests have no id here, so every one follows plan 0."""
    body = await request.json()
    openai = request.path.startswith("/v1/")
    prompt = body["prompt"] if openai else body["text_input"]
    unknown = set() if openai else set(body) - set(ALLOWED)
    if unknown:
        return web.json_response({"error": f"REJECTED_INVALID: {unknown}"}, status=400)
    reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    total = 0
    try:
        async for piece in engine.generate(0, prompt, body["max_tokens"]):
            total += piece.tokens
            if not reply.prepared:
                await reply.prepare(request)
            event: dict[str, Any] = {"text_output": piece.text, "num_output_tokens": piece.tokens}
            event["num_input_tokens"] = piece.input_words
            if piece.stamps:
                event["stamps"] = piece.stamps
            if openai:
                event = {"choices": [{"text": piece.text}]}
            await reply.write(f"data: {json.dumps(event)}\n\n".encode())
    except RuntimeError as error:
        return web.json_response({"error": str(error)}, status=400)
    if openai:
        usage = {"prompt_tokens": len(prompt.split()), "completion_tokens": total}
        await reply.write(f"data: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n".encode())
    await reply.write_eof()
    return reply


async def main(plan: Plan) -> None:
    engine = Engine(plan)
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", -1)])

    async def stream(requests: Any, context: grpc.aio.ServicerContext) -> None:
        async for request in requests:
            async for message in stream_infer(engine, request):
                await context.write(message)

    async def raw_stream(request: bytes, received_ns: int) -> AsyncIterator[bytes]:
        async for message in stream_infer(engine, pb.ModelInferRequest.FromString(request), received_ns):
            yield message.SerializeToString()

    raw = await asyncio.get_running_loop().create_server(lambda: RawGrpcConnection(raw_stream), "127.0.0.1", 0)
    raw_port = raw.sockets[0].getsockname()[1]
    handler = grpc.stream_stream_rpc_method_handler(
        stream,
        request_deserializer=pb.ModelInferRequest.FromString,
        response_serializer=pb.ModelStreamInferResponse.SerializeToString,
    )
    service = grpc.method_handlers_generic_handler("inference.GRPCInferenceService", {"ModelStreamInfer": handler})
    server.add_generic_rpc_handlers((service,))
    grpc_port = server.add_insecure_port("127.0.0.1:0")
    await server.start()

    async def handle(request: web.Request) -> web.StreamResponse:
        return await answer_http(engine, request)

    app = web.Application(client_max_size=2**26)
    app.router.add_post("/v2/models/ensemble/generate_stream", handle)
    app.router.add_post("/v1/completions", handle)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    ports = {"grpc": grpc_port, "raw_grpc": raw_port, "http": runner.addresses[0][1]}
    print(json.dumps({name: f"127.0.0.1:{port}" for name, port in ports.items()}), flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(main(Plan(**json.loads(sys.argv[1]))))
