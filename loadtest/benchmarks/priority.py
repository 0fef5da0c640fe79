"""What a saturating load of the class `batch` does to the time to first token of interactive requests.

One server, several phases of the same interactive arrivals: alone, beside more batch streams than the engine has
places, alone again and, when asked for, beside the same streams when nobody names a class. Goal: p99 beside batch
stays within 1.5 times that alone (the better of both times) plus one prefill chunk, which is measured too. Prints a
table and, as the last line, one JSON document; exits 1 when the goal is missed.

    python loadtest/benchmarks/priority.py --model smollm2
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tritandem.models import resolve_model
from tritandem.server import TritonServer
from tritandem_client import AsyncClient
from tritandem_loadtest.workload import PROMPTS_DIR

GOAL_FACTOR = 1.5
CHUNK_PROBES = 7
WORDS = (PROMPTS_DIR / "words.txt").read_text(encoding="utf-8").split()
BATCH, UNNAMED = "batch", ""


@dataclass(slots=True)
class Phase:
    """One row. Seconds; `batch_class` is None without a second load."""

    name: str
    batch_class: str | None
    ttft_s: list[float] = field(default_factory=list)
    batch_tokens: int = 0
    seconds: float = 0.0

    def row(self) -> dict[str, Any]:
        ordered = sorted(self.ttft_s)
        return {
            "phase": self.name,
            "interactive": len(ordered),
            "ttft_ms_p50": round(1000 * statistics.median(ordered), 1),
            "ttft_ms_p90": round(1000 * ordered[int(0.9 * (len(ordered) - 1))], 1),
            "ttft_ms_p99": round(1000 * ordered[round(0.99 * (len(ordered) - 1))], 1),
            "ttft_ms_max": round(1000 * ordered[-1], 1),
            "batch_tokens_per_s": round(self.batch_tokens / self.seconds, 1),
        }


class Experiment:
    """On one event loop, with one client for each class as two services would have."""

    def __init__(self, url: str, args: argparse.Namespace) -> None:
        self._args = args
        self._interactive, self._batch = AsyncClient(url), AsyncClient(url)

    async def run(self) -> tuple[list[Phase], float]:
        """(phases, seconds of one prefill chunk)."""
        args = self._args
        phases = [
            Phase("alone", None),
            Phase("beside batch", BATCH),
            Phase("alone again", None),
        ]
        if args.without_classes:
            phases.append(Phase("beside the same, no classes", UNNAMED))
        async with self._interactive, self._batch:
            await self._arrivals(Phase("warm-up", None), args.warmup, random.Random(0))
            chunk_s = await self._chunk_s()
            for phase in phases:
                await self._one(phase)
                print(f"{phase.name}: {len(phase.ttft_s)} interactive requests", flush=True)
        return phases, chunk_s

    async def _one(self, phase: Phase) -> None:
        args = self._args
        streams = []
        if phase.batch_class is not None:
            streams = [asyncio.create_task(self._batch_stream(phase, index)) for index in range(args.batch_streams)]
            await self._arrivals(Phase("warm-up", phase.batch_class), args.warmup, random.Random(0))
        phase.batch_tokens, begun_s = 0, time.monotonic()
        await self._arrivals(phase, args.seconds, random.Random(args.seed))
        phase.seconds = time.monotonic() - begun_s
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
        await asyncio.sleep(1.0)  # the engine lets go of them

    async def _arrivals(self, phase: Phase, seconds: float, rng: random.Random) -> None:
        """Poisson arrivals; the same ones for the same seed."""
        named = {} if phase.batch_class == UNNAMED else {"priority": "interactive"}
        next_s = time.monotonic()
        end_s = next_s + seconds
        requests = []
        while True:
            next_s += rng.expovariate(self._args.rps)
            if next_s >= end_s:
                break
            prompt = words(rng, self._args.words)
            await asyncio.sleep(max(0.0, next_s - time.monotonic()))
            requests.append(asyncio.create_task(self._first_token(phase, prompt, named)))
        await asyncio.gather(*requests)

    async def _first_token(self, phase: Phase, prompt: str, named: dict[str, Any]) -> None:
        sent_s, seen = time.monotonic(), False
        async for chunk in self._interactive.stream(prompt, max_tokens=self._args.tokens, **named):
            if not seen and chunk.num_output_tokens:
                phase.ttft_s.append(time.monotonic() - sent_s)
                seen = True

    async def _batch_stream(self, phase: Phase, index: int) -> None:
        rng = random.Random(f"{phase.name} {index}")
        named = {"priority": phase.batch_class} if phase.batch_class else {}
        options: dict[str, Any] = {"sampling_parameters": {"ignore_eos": True}, **named}
        while True:
            prompt, tokens = words(rng, self._args.batch_words), self._args.batch_tokens
            async for chunk in self._batch.stream(prompt, max_tokens=tokens, **options):
                phase.batch_tokens += chunk.num_output_tokens

    async def _chunk_s(self) -> float:
        """Time to first token of a prompt that fills one chunk, on an idle server; the prompts differ."""
        rng, took_s = random.Random(1), []
        for _ in range(CHUNK_PROBES):
            ids = [rng.randrange(1000, 20_000) for _ in range(self._args.chunk_tokens)]
            sent_s = time.monotonic()
            await self._interactive.generate(input_ids=ids, max_tokens=1)
            took_s.append(time.monotonic() - sent_s)
        return statistics.median(took_s)


def words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choices(WORDS, k=count))


def main(argv: list[str]) -> int:
    args = _parse(argv)
    ports = {"http_port": args.port, "grpc_port": args.port + 1, "metrics_port": args.port + 2}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        settings = Path(folder) / "priority.toml"
        weights = "true" if args.random_weights else "false"
        settings.write_text(f"[engine]\nprefill_tokens_per_step = {args.chunk_tokens}\nrandom_weights = {weights}\n")
        model = resolve_model(args.model, print)
        server = stack.enter_context(TritonServer(model, engine_config=settings, **ports))
        phases, chunk_s = asyncio.run(Experiment(server.grpc_url, args).run())
    rows = [phase.row() for phase in phases]
    print(" | ".join(rows[0]))
    for row in rows:
        print(" | ".join(str(value) for value in row.values()))
    beside = rows[1]["ttft_ms_p99"]
    alone = min(row["ttft_ms_p99"] for row in (rows[0], rows[2]))
    goal_ms = round(GOAL_FACTOR * alone + 1000 * chunk_s, 1)
    print(f"p99 beside batch {beside} ms; goal {GOAL_FACTOR} x {alone} + {1000 * chunk_s:.0f} = {goal_ms} ms")
    document = {
        "rows": rows,
        "prefill_chunk_ms": round(1000 * chunk_s, 1),
        "goal_ms": goal_ms,
        "met": beside <= goal_ms,
    }
    print(json.dumps(document | {"batch_streams": args.batch_streams, "rps": args.rps}))
    return 0 if document["met"] else 1


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="as for `tritandem serve`")
    parser.add_argument("--random-weights", action="store_true", help="--model is a folder without weights")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each phase")
    parser.add_argument("--warmup", type=float, default=10.0, help="seconds before each phase with a batch load")
    parser.add_argument("--rps", type=float, default=1.5, help="interactive requests per second")
    parser.add_argument(
        "--without-classes", action="store_true", help="a phase more; long, because first come is first served there"
    )
    parser.add_argument("--words", type=int, default=20, help="of an interactive prompt")
    parser.add_argument("--tokens", type=int, default=8, help="of an interactive answer")
    parser.add_argument("--batch-streams", type=int, default=32, help="more than the engine has places")
    parser.add_argument("--batch-words", type=int, default=60)
    parser.add_argument("--batch-tokens", type=int, default=128)
    parser.add_argument("--chunk-tokens", type=int, default=256, help="of a prefill chunk")
    parser.add_argument("--port", type=int, default=18090, help="first of three free ports")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
