"""One decode step of the CUDA engine, kernel by kernel.

Fills the slots with random prompts, then times steady steps (launches only, no core around them) and shows
where the device's time goes, kernel by kernel, with the gaps in between. The last line is one JSON document.

    python loadtest/benchmarks/engine_profile.py --model DIR --random-weights --batch 1,64
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile
from tritandem.config import EngineConfig
from tritandem.contracts.fields import SamplingParams
from tritandem.engine.model.loader import load_model
from tritandem.engine.runners.cuda import CudaRunner
from tritandem.engine.step import PrefillChunk, SlotInit, StepPlan

CONTEXT_TOKENS = 1024


def fill(runner: CudaRunner, slots: Sequence[int], prompt_tokens: int) -> float:
    """A random prompt in each slot, chunked to the prefill budget; returns prompt tokens per second."""
    spec, rng = runner.spec, np.random.default_rng(0)
    blocks = -(-CONTEXT_TOKENS // spec.block_tokens)
    sampling = SamplingParams(max_tokens=CONTEXT_TOKENS - prompt_tokens)
    at_once = max(1, spec.prefill_tokens_per_step // prompt_tokens)
    started = time.perf_counter()
    for first in range(0, len(slots), at_once):
        group = slots[first : first + at_once]
        ids = rng.integers(0, spec.vocab_size, (len(group), prompt_tokens), dtype=np.int32)
        inits = [
            SlotInit(slot, row, sampling, (), (), np.zeros(0, np.int32)) for slot, row in zip(group, ids, strict=True)
        ]
        updates = np.array([(s, i, 1 + s * blocks + i) for s in group for i in range(blocks)], np.int32)
        chunks = [PrefillChunk(slot, 0, row, last=True) for slot, row in zip(group, ids, strict=True)]
        runner.launch(StepPlan(first, releases=group, inits=inits, block_updates=updates, prefill=chunks))
    while runner.pending():
        runner.collect(wait=True)
    return len(slots) * prompt_tokens / (time.perf_counter() - started)


def steady_steps(runner: CudaRunner, slots: Sequence[int], steps: int) -> float:
    """Milliseconds a step, with a few launched ahead."""
    started = time.perf_counter()
    for step_id in range(steps):
        runner.launch(StepPlan(step_id, decode_slots=slots, max_context_tokens=CONTEXT_TOKENS))
        while runner.pending() > 3:
            runner.collect(wait=True)
    while runner.pending():
        runner.collect(wait=True)
    return (time.perf_counter() - started) / steps * 1e3


def kernel_table(runner: CudaRunner, slots: Sequence[int], steps: int) -> tuple[list[tuple[str, float, float]], float]:
    """(kernel, launches a step, microseconds a step), longest first; and the microseconds between kernels."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        steady_steps(runner, slots, steps)
    spans: list[tuple[float, float]] = []
    totals: dict[str, list[float]] = defaultdict(list)
    for event in profiled.events():
        if str(event.device_type).endswith("CUDA"):
            spans.append((event.time_range.start, event.time_range.end))
            totals[event.name].append(event.time_range.end - event.time_range.start)
    spans.sort()
    busy = end = 0.0
    for begin, stop in spans:
        busy += max(0.0, stop - max(begin, end))
        end = max(end, stop)
    idle = (spans[-1][1] - spans[0][0] - busy) / steps
    rows = [(name, len(times) / steps, sum(times) / steps) for name, times in totals.items()]
    return sorted(rows, key=lambda row: -row[2]), idle


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face folder")
    parser.add_argument("--random-weights", action="store_true", help="weights from the configuration alone")
    parser.add_argument("--batch", default="1,64")
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--kernels", type=int, default=14, help="lines of the table")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse(arguments)
    batches = [int(size) for size in args.batch.split(",")]
    blocks = 1 + max(batches) * -(-CONTEXT_TOKENS // EngineConfig().block_tokens)
    config = EngineConfig(
        device="cuda", max_sequences=max(batches), num_blocks=blocks, random_weights=args.random_weights
    )
    runner = CudaRunner(load_model(args.model, config, print), config, lambda note: print(note, flush=True))
    rows: list[dict[str, Any]] = []
    for batch in batches:
        slots = list(range(batch))
        fill(runner, slots, args.prompt_tokens)
        prefill = fill(runner, slots, args.prompt_tokens)
        steady_steps(runner, slots, 5)
        step_ms = min(steady_steps(runner, slots, args.steps) for _ in range(2))
        kernels, idle_us = kernel_table(runner, slots, 8)
        print(f"batch {batch}: {step_ms:.3f} ms a step, {idle_us:.0f} us of it idle; prefill {prefill:.0f} tokens/s")
        for name, count, micros in kernels[: args.kernels]:
            print(f"  {micros:9.1f} us {count:6.1f} x {micros / max(count, 1e-9):7.2f}  {name[:90]}")
        rows.append({"batch": batch, "step_ms": step_ms, "idle_us": idle_us, "prefill_tokens_per_s": prefill})
    runner.close()
    print(torch.cuda.get_device_name(), torch.__version__)
    print(json.dumps({"model": str(args.model), "rows": rows}))


if __name__ == "__main__":
    main()
