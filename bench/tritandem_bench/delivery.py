"""How many tokens per second reach gRPC clients when the model costs nothing: the real Triton, tokenizer and
scheduler in front of an engine that only counts. Shows whether delivery coalesces instead of falling behind, and where
tokens wait: `last_wait` for a sender of ours, `outside` in Triton's own queues, the connection or the client. Prints a
table and, as the last line, one JSON document.

    python -m tritandem_bench.delivery --model DIR --streams 64,256 --step-ms 1
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from tritandem.server import TritonServer
from tritandem.server.repository import default_repository
from tritandem_loadtest import run

from .word_loads import closed, word_load

WARMUP_S = 3.0

ENGINE = """
class TritonPythonModel:
    def initialize(self, args):
        from tritandem_bench.stand_ins import FreeRunningService
        from tritandem.triton_io.plugs.engine import EnginePlug
        from tritandem.triton_io.hops.inner_key import load_inner_key
        self._plug = EnginePlug(FreeRunningService({step_s!r}), 1.0, load_inner_key())

    def execute(self, requests):
        self._plug.execute(requests)

    def finalize(self):
        self._plug.close()
"""


def repository(folder: Path, step_s: float) -> Path:
    """The model repository as it is, but for the engine's plug."""
    copy = folder / "model_repository"
    shutil.copytree(default_repository(), copy, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "engine" / "1" / "model.py").write_text(ENGINE.format(step_s=step_s))
    return copy


def measure(server: TritonServer, model: str, streams: int, args: argparse.Namespace) -> dict[str, Any]:
    times = {"duration_s": WARMUP_S + args.seconds, "warmup_s": WARMUP_S}
    load = word_load(server.grpc_url, model, args.words, args.tokens, **closed(streams, args.processes), **times)
    summary = run(load).summary
    offered = streams / args.step_ms * 1000
    return {
        "model": model,
        "streams": streams,
        "offered_tokens_per_s": round(offered),
        "tokens_per_s": round(summary["output_tokens_per_s"]),
        "responses_per_s": round(summary["responses"] / args.seconds),
        "tokens_per_response": round(summary["output_tokens"] / max(1, summary["responses"]), 2),
        "ttft_ms_p50": summary["ttft_ms_p50"],
        "gap_ms_p99": summary["itl_chunk_ms_p99"],
        "pause_ms_p50": summary["pause_ms_p50"],
        "pause_ms_max": summary["pause_ms_max"],
        "last_wait_ms_p99": summary["server_ms"]["last wait"]["p99"],
        "outside_ms_p50": summary["server_ms"]["outside"]["p50"],
        "outside_ms_p99": summary["server_ms"]["outside"]["p99"],
        "completed": summary["completed"],
        "failed": summary["failed"],
        "generator_cpu_percent_max": summary["generator_cpu_percent_max"],
    }


def main(argv: list[str]) -> int:
    args = _parse(argv)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        ports = {"http_port": args.port, "grpc_port": args.port + 1, "metrics_port": args.port + 2}
        server = TritonServer(args.model, repository=repository(Path(folder), args.step_ms / 1000), **ports)
        with server:
            for model in ("scheduler", "ensemble"):
                for streams in args.streams:
                    rows.append(measure(server, model, streams, args))
    print(" ".join(f"{name:>20}" for name in rows[0]))
    for row in rows:
        print(" ".join(f"{value!s:>20}" for value in row.values()))
    print(json.dumps({"cores": len(os.sched_getaffinity(0)), "step_ms": args.step_ms, "rows": rows}))
    return 0 if all(row["completed"] and not row["failed"] for row in rows) else 1


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="model folder; only its tokenizer is used")
    parser.add_argument("--streams", type=lambda text: [int(n) for n in text.split(",")], default=[1, 64, 256])
    parser.add_argument("--step-ms", type=float, default=1.0, help="time in which the engine makes a token a stream")
    parser.add_argument("--words", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--seconds", type=float, default=10.0, help="measured, for each row")
    parser.add_argument("--processes", type=int, default=1, help="load-generating processes")
    parser.add_argument("--port", type=int, default=18090, help="first of three free ports")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
