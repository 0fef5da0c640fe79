"""What running streams feel when long prompts arrive: their inter-token gaps in the engine, without a server.

Streams decode steadily; then prompts of `--prompt-tokens` arrive one after the other. Reported are the gaps between a
stream's tokens before and during that, and the time to the first token of the long prompts. The last line is one
JSON document.

    python loadtest/benchmarks/engine_interleaving.py --model DIR --streams 32 --prompt-tokens 16384
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tritandem.config import EngineConfig
from tritandem.contracts.fields import SamplingParams
from tritandem.contracts.requests import EngineRequest
from tritandem.contracts.stream import FinishCode
from tritandem.engine.service import EngineService, build_engine

RUNNING_PROMPT_TOKENS = 128


def submit(service: EngineService, seq_id: int, prompt_tokens: int, new_tokens: int) -> None:
    """Raises RuntimeError when the engine refuses."""
    ids = np.random.default_rng(seq_id).integers(0, service.spec.vocab_size, prompt_tokens, dtype=np.int32)
    refused = service.submit([EngineRequest(seq_id, ids, SamplingParams(max_tokens=new_tokens))])
    if refused[0] is not None:
        raise RuntimeError(f"the engine refused: {refused[0]}")


def observe(service: EngineService, until: float, last_at: dict[int, float], gaps: list[float]) -> dict[int, float]:
    """Read tokens until `until` (perf_counter); gaps of known streams in ms go to `gaps`. First tokens by sequence."""
    first: dict[int, float] = {}
    while (left := until - time.perf_counter()) > 0:
        batch = service.next_batch(left)
        if batch is None:
            break
        if (batch.finish == FinishCode.ERROR).any():
            raise RuntimeError(f"the engine failed: {batch.errors}")
        now = time.perf_counter()
        for seq_id, count in zip(batch.seq_ids.tolist(), batch.token_counts.tolist(), strict=True):
            if count and seq_id in last_at:
                gaps.append((now - last_at[seq_id]) * 1e3)
            elif count:
                first[seq_id] = now
            if count:
                last_at[seq_id] = now
    return first


def figures(gaps: Sequence[float]) -> dict[str, float]:
    ordered = sorted(gaps)
    p99 = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    return {"p50_ms": round(statistics.median(ordered), 2), "p99_ms": round(p99, 2), "max_ms": round(ordered[-1], 2)}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face folder")
    parser.add_argument("--random-weights", action="store_true")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=16384)
    parser.add_argument("--prompts", type=int, default=3, help="long prompts, one after the other")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each part")
    parser.add_argument("--config", default="{}", help="more of the engine's configuration, JSON")
    args = parser.parse_args(arguments)
    config = EngineConfig(random_weights=args.random_weights, prefix_cache=False, **json.loads(args.config))
    service = build_engine(args.model, config, lambda message: print(message, flush=True))
    budget = service.spec.max_context_tokens - RUNNING_PROMPT_TOKENS
    last_at: dict[int, float] = {}
    quiet: list[float] = []
    disturbed: list[float] = []
    waits: list[float] = []
    for seq_id in range(args.streams):
        submit(service, seq_id, RUNNING_PROMPT_TOKENS, budget)
    observe(service, time.perf_counter() + args.seconds, last_at, [])  # all have started
    observe(service, time.perf_counter() + args.seconds, last_at, quiet)
    for number in range(args.prompts):
        seq_id, sent_at = 10_000 + number, time.perf_counter()
        submit(service, seq_id, args.prompt_tokens, 2)
        first: dict[int, float] = {}
        while seq_id not in first:
            first |= observe(service, time.perf_counter() + 0.05, last_at, disturbed)
            if time.perf_counter() - sent_at > 120:
                raise RuntimeError("no first token for two minutes")
        waits.append((first[seq_id] - sent_at) * 1e3)
    service.cancel(range(args.streams))
    service.close()
    rows: dict[str, Any] = {"without long prompts": figures(quiet), "while one is prefilled": figures(disturbed)}
    print(f"{'gap between the tokens of a stream':<36}{'p50 ms':>9}{'p99 ms':>9}{'max ms':>9}")
    for name, row in rows.items():
        print(f"{name:<36}{row['p50_ms']:>9}{row['p99_ms']:>9}{row['max_ms']:>9}")
    print(
        f"first token of {args.prompt_tokens} prompt tokens: {statistics.median(waits):.0f} ms (median of {len(waits)})"
    )
    chunk = {"interleaved": service.spec.interleaved_prefill_tokens, "efficient": service.spec.efficient_prefill_tokens}
    print(json.dumps({"streams": args.streams, "prompt_tokens": args.prompt_tokens, "chunk_tokens": chunk,
                      "first_token_ms": waits, **rows}))  # fmt: skip


if __name__ == "__main__":
    main()
