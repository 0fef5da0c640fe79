"""What the load generator itself costs: one process at 100 requests/s of 64-token streams, and its ceiling.

The server is a fake in its own process that sends 64 responses 10 ms apart, or (ceiling) 128 at once. Prints a table
with, in its last column, the CPU that the transport alone takes for a message under the same load, and, as the last
line, one JSON document. Reads fakes from tests/.

    python loadtest/benchmarks/loadgen.py
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from fakes.raw_grpc_server import RawGrpcConnection
from fakes.timed_engine import Piece, response
from tritandem_loadtest import RunConfig, run

TIMED_ENGINE = Path(__file__).resolve().parents[2] / "tests" / "fakes" / "timed_engine.py"


async def serve_at_once() -> None:
    """Answers every request with 128 prepared responses of one token, written without a pause."""
    middle = response("blast", Piece(" word", 1, 300, None)).SerializeToString()
    last = response("blast", Piece(" word", 1, 300, [1] * 9)).SerializeToString()

    async def handler(request: bytes, received_ns: int) -> AsyncIterator[bytes]:
        for _ in range(127):
            yield middle
        yield last

    server = await asyncio.get_running_loop().create_server(lambda: RawGrpcConnection(handler), "127.0.0.1", 0)
    print(json.dumps({"raw_grpc": f"127.0.0.1:{server.sockets[0].getsockname()[1]}"}), flush=True)
    await server.serve_forever()


def exchange_only(url: str, grpc_client: str, rps: float, requests: int) -> None:
    """Sends at a constant rate without schedule, decoding or records; prints CPU microseconds a message."""
    from gevent import monkey

    monkey.patch_all()
    import gevent
    from tritandem_loadtest.transport.connect import connect
    from tritandem_loadtest.transport.interface import Call

    transport = connect(RunConfig(url=url, grpc_client=grpc_client))
    transport.open()
    running, began_s = [], time.process_time()
    for i in range(requests):
        running.append(gevent.spawn(transport.exchange, Call(f"lt-0-{i}", "word " * 300, 64), 30.0))
        if rps:
            gevent.sleep(1 / rps)
    gevent.joinall(running, raise_error=True)
    cpu_us = (time.process_time() - began_s) * 1e6
    print(cpu_us / sum(len(greenlet.value.messages) for greenlet in running))


def measure(server_command: list[str], config: dict[str, Any]) -> dict[str, Any]:
    """Start a fake, run one load against it, then the transport alone, end the fake."""
    server = subprocess.Popen(server_command, stdout=subprocess.PIPE, text=True)
    client, rps = config["grpc_client"], config.get("rps", 0.0)
    try:
        assert server.stdout is not None
        urls = json.loads(server.stdout.readline())
        # The cheap server does not follow grpcio's smaller windows.
        url = urls["grpc" if client == "grpcio" else "raw_grpc"]
        summary = run(RunConfig(url=url, **config)).summary
        alone = [sys.executable, __file__, "--exchange-only", url, "--grpc-client", client, "--rps", str(rps)]
        message_us = float(subprocess.run(alone, check=True, capture_output=True, text=True, timeout=120).stdout)
    finally:
        server.terminate()
        server.wait(timeout=10)
    names = ("requests", "failed", "output_tokens_per_s", "missed_schedule_rate", "late_ms_p99", "valid")
    costs = {"cpu_percent_max": summary["generator_cpu_percent_max"], "transport_us_per_message": message_us}
    return {**{name: summary[name] for name in names}, **costs}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--processes", type=int, default=1, help="of the ceiling")
    parser.add_argument("--grpc-client", choices=("h2", "grpcio"), default="h2")
    parser.add_argument("--serve-at-once", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--exchange-only", metavar="URL", help=argparse.SUPPRESS)
    parser.add_argument("--rps", type=float, default=0.0, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.serve_at_once:
        asyncio.run(serve_at_once())
        return 0
    if args.exchange_only:
        exchange_only(args.exchange_only, args.grpc_client, args.rps, requests=500)
        return 0
    plan = json.dumps({"ttft_ms": 50, "ttft_spread_ms": 0, "gap_ms": 10, "gap_spread_ms": 0})
    paced = [sys.executable, str(TIMED_ENGINE), plan]
    at_once = [sys.executable, __file__, "--serve-at-once"]
    common = {"duration_s": args.seconds, "grpc_client": args.grpc_client, "workload": "words"}
    closed = {"arrival": "closed", "users": 256, "processes": args.processes, "warmup_s": 1.0}
    rows = {"100/s of 64 tokens, 1 process": measure(paced, {**common, "rps": 100.0, "output_tokens": "64"})}
    if args.grpc_client == "h2":
        name = f"256 streams, {args.processes} process(es)"
        rows[name] = measure(at_once, {**common, **closed, "output_tokens": "128"})
    print(
        f"{'load':<32}{'tokens/s':>10}{'failed':>8}{'missed':>9}{'late p99 ms':>13}{'CPU % max':>11}{'us/message':>12}"
    )
    for load, row in rows.items():
        print(
            f"{load:<32}{row['output_tokens_per_s']:>10.0f}{row['failed']:>8}{row['missed_schedule_rate']:>9.2%}"
            f"{row['late_ms_p99']:>13.2f}{row['cpu_percent_max']:>11.0f}"
            f"{row['transport_us_per_message']:>12.1f}"
        )
    print(json.dumps(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
