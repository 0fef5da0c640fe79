"""What an event of the OpenAI API costs: one worker, a scripted gRPC server in place of Triton, streams that all speak
at the same pace. CPU is counted for the worker's process alone, so that neighbours do not count.

Prints a table and, as the last line, one JSON document.

    python -m tritandem_bench.front --streams 1,64,256,1000
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from tritandem.server.front_workers import FrontOptions, FrontWorkers
from tritandem.server.options import ServeOptions
from tritonclient.grpc import service_pb2 as pb

BODY = json.dumps({"prompt": "Once upon a time", "stream": True}).encode()
HEAD = "POST /v1/completions HTTP/1.1\r\nHost: bench\r\nConnection: close\r\nContent-Length: {}\r\n\r\n"


def response(text: str, **words: str) -> bytes:
    """One message of the model's stream."""
    answer = pb.ModelInferResponse(model_name="scheduler")
    for name, value in {"text_output": text, **words}.items():
        answer.outputs.add(name=name, datatype="BYTES", shape=[1, 1])
        answer.raw_output_contents.append(len(value).to_bytes(4, "little") + value.encode())
    for name in ("num_input_tokens", "num_output_tokens"):
        answer.outputs.add(name=name, datatype="UINT32", shape=[1, 1])
        answer.raw_output_contents.append((1).to_bytes(4, "little"))
    message: bytes = pb.ModelStreamInferResponse(infer_response=answer).SerializeToString()
    return message


def serve_grpc(port: Any, events: int, gap_s: float) -> None:
    """A process: answers every request with `events` texts, one each `gap_s`."""
    piece, last = response(" token"), response("", finish_reason="stop", outcome="COMPLETED")

    async def speak(requests: AsyncIterator[bytes], _context: Any) -> AsyncIterator[bytes]:
        async for _ in requests:
            for _ in range(events):
                await asyncio.sleep(gap_s)
                yield piece
            yield last

    async def run() -> None:
        server = grpc.aio.server()
        method = grpc.stream_stream_rpc_method_handler(speak)
        methods = grpc.method_handlers_generic_handler("inference.GRPCInferenceService", {"ModelStreamInfer": method})
        server.add_generic_rpc_handlers((methods,))
        port.send(server.add_insecure_port("127.0.0.1:0"))
        await server.start()
        await server.wait_for_termination()

    asyncio.run(run())


async def read_one(port: int) -> int:
    """How many events came. Raises RuntimeError for a stream without an end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(HEAD.format(len(BODY)).encode() + BODY)
    data = await reader.read()
    writer.close()
    if not data.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
        raise RuntimeError(f"a stream that does not end: {data[-200:]!r}")
    return data.count(b"data: {")


async def read_all(port: int, streams: int) -> list[int]:
    return list(await asyncio.gather(*(read_one(port) for _ in range(streams))))


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(pid: int, port: int, streams: int, args: argparse.Namespace) -> dict[str, Any]:
    begun_s, used_s = time.monotonic(), cpu_s(pid)
    read = asyncio.run(read_all(port, streams))
    seconds, used_s = time.monotonic() - begun_s, cpu_s(pid) - used_s
    return {
        "streams": streams,
        "events": sum(read),
        "cpu_us_an_event": round(used_s / sum(read) * 1e6, 1),
        "cores": round(used_s / seconds, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", default="1,64,256,1000", help="how many at once (default: %(default)s)")
    parser.add_argument("--events", type=int, default=100, help="of each stream (default: %(default)s)")
    parser.add_argument("--gap-ms", type=float, default=50.0, help="between two events (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8080, help="of the API (default: %(default)s)")
    args = parser.parse_args()
    ours, theirs = multiprocessing.Pipe()
    server = multiprocessing.Process(target=serve_grpc, args=(theirs, args.events, args.gap_ms / 1e3), daemon=True)
    server.start()
    grpc_port = ours.recv()
    workers = FrontWorkers(FrontOptions(("bench",), workers=1), print)
    with tempfile.TemporaryDirectory() as folder:
        options = ServeOptions(None, Path(), grpc_port=grpc_port, openai_port=args.port)
        workers.start(options, Path(folder) / "log", frozenset(os.sched_getaffinity(0)))
        try:
            [pid] = workers.pids()
            asyncio.run(read_all(args.port, 8))  # connections are made, modules are imported
            rows = [measure(pid, args.port, int(streams), args) for streams in args.streams.split(",")]
        finally:
            workers.kill()
            server.kill()
    print("  ".join(f"{name:>16}" for name in rows[0]))
    for row in rows:
        print("  ".join(f"{value:>16}" for value in row.values()))
    print(json.dumps({"events": args.events, "gap_ms": args.gap_ms, "rows": rows}))


if __name__ == "__main__":
    main()
