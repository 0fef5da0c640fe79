"""Everything that is to be known about one model on several GPUs, in one go: links, sums, steps, prompts, serving.

Each part is a program of this package with a time limit of its own; what fails is said and left behind. Measured steps
stand beside what `tritandem size` predicts. The last line is one JSON document.

    python -m tritandem_bench.several_gpus                        # all GPUs; one GPU holds two ranks, none is a trial
    python -m tritandem_bench.several_gpus --only sums,steps
    python -m tritandem_bench.several_gpus --model DIR            # also served through Triton, on few and many cores
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tritandem.machine.peer_access import ask
from tritandem.sizing.gpu import H200
from tritandem.sizing.steps import DecoderShape, Layout, decode_step, first_token

from .all_reduce import default_devices
from .shapes import SHAPES

KINDS = ("links", "sums", "endurance", "nccl", "steps", "prompts", "serving")
PROMPT_TOKENS, LONG_PROMPT_TOKENS, NEW_TOKENS = 512, 16_000, 128
BATCHES = "1,8,64,256"
_WITHOUT = ("--without", "generate,generate_batch", "--graph-capture", "idle")
# What the published study compares. NVLink multicast stays off: not every fabric's tenants may switch it on.
_NCCL = {
    "ring": {"NCCL_ALGO": "Ring"},
    "tree": {"NCCL_ALGO": "Tree"},
    "4 channels": {"NCCL_MAX_NCHANNELS": "4"},
    "32 channels": {"NCCL_MIN_NCHANNELS": "32"},
}


@dataclass(frozen=True)
class Part:
    """A program, what it is given, and how long it may take."""

    kind: str
    name: str
    program: str
    arguments: Sequence[str]
    limit_s: float
    environment: Mapping[str, str] = field(default_factory=dict)
    predicted: DecoderShape | None = None  # its steps can be reckoned
    layout: Layout | None = None


def parts(devices: str, model: Path | None, replays: int) -> Iterator[Part]:
    """In the order of what is wanted first, should time run out."""
    ranks, on_gpus = devices.count("+") + 1, devices.startswith("cuda")
    alone = devices.split("+")[0]
    small = () if on_gpus else ("--rows", "1,8", "--width", "64", "--calls", "4")
    yield Part("sums", "sums, 4,096 wide", "all_reduce", ("--devices", devices, *small), 120)
    if on_gpus:
        yield Part("sums", "sums, 8,192 wide", "all_reduce", ("--devices", devices, "--width", "8192"), 120)
        lasting = ("--devices", devices, "--rows", "64", "--calls", "8", "--endure", str(replays))
        yield Part("endurance", f"{replays:,} replays, then a rank that stops", "all_reduce", lasting, 600)
    shapes = ("llama-3.1-8b", "llama-3.1-70b") if on_gpus else ("small-llama",)
    for shape, quantization in (
        (shape, kind) for shape in shapes for kind in (("none", "fp8") if on_gpus else ("none",))
    ):
        groups = [alone, devices] if shape == shapes[0] else [devices]
        for group in groups:
            yield from _engine(shape, quantization, group, on_gpus)
    if on_gpus and ranks > 1 and len(set(devices.split("+"))) == ranks:
        for name, setting in _NCCL.items():
            yield Part("nccl", f"NCCL, {name}", "all_reduce", ("--devices", devices), 120, setting)
    if model is not None:
        cores = os.cpu_count() or 1
        served = f"tritandem serve --model {model} --devices {devices}"
        load = ("--rps", "8", "--words", "2000", "--seconds", "30", "--server", "tritandem", "tritandem", served)
        counts = sorted({max(1, cores // 8), max(1, cores // 4), max(1, cores - 4)})
        yield Part("serving", served, "core_sweep", ("--cores", ",".join(map(str, counts)), *load), 1800)


def _engine(shape: str, quantization: str, devices: str, on_gpus: bool) -> Iterator[Part]:
    ranks = devices.count("+") + 1
    name = f"{shape}, {quantization}, {ranks} rank{'s' if ranks > 1 else ''}"
    given = ("--shape", shape, "--device", devices, "--quantization", quantization, *_WITHOUT)
    stated = DecoderShape.of(SHAPES[shape], shape)
    layout = Layout(H200, ranks, 1, 1 if quantization == "fp8" else 2)
    sizes = (PROMPT_TOKENS, NEW_TOKENS, BATCHES) if on_gpus else (16, 4, "1,2")
    steps = ("--prompt-tokens", str(sizes[0]), "--new-tokens", str(sizes[1]), "--batch", str(sizes[2]))
    yield Part("steps", f"steps of {name}", "engine", (*given, *steps), 600, {}, stated, layout)
    long = ("--prompt-tokens", str(LONG_PROMPT_TOKENS if on_gpus else 64), "--new-tokens", "4", "--batch", "1")
    yield Part("prompts", f"a long prompt of {name}", "engine", (*given, *long), 300, {}, stated, layout)


def run(part: Part) -> dict[str, Any]:
    """What its last line says, beside what was predicted; or how it failed."""
    command = [sys.executable, "-m", f"tritandem_bench.{part.program}", *part.arguments]
    began = time.monotonic()
    try:
        ended = subprocess.run(
            command, capture_output=True, text=True, timeout=part.limit_s, env={**os.environ, **part.environment}
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"not done after {part.limit_s:.0f} s"}
    took = {"took_s": round(time.monotonic() - began, 1)}
    if ended.returncode:
        return {"failed": (ended.stderr.strip().splitlines() or ["no word"])[-1], **took}
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    if part.predicted is not None and part.layout is not None:
        found["predicted"] = [_predicted(part.predicted, part.layout, row) for row in found["rows"]]
    return {**found, **took}


def _predicted(shape: DecoderShape, layout: Layout, row: Mapping[str, Any]) -> dict[str, float]:
    """Milliseconds, and how many times as long the measured ones are."""
    context = row["prompt_tokens"] + row["new_tokens"] / 2
    step_ms = decode_step(shape, layout, row["batch"], context).total * 1e3
    first_ms = first_token(shape, layout, row["prompt_tokens"]).total * 1e3
    found = {"decode_step_ms": step_ms, "measured_of_predicted": row["decode_step_ms"] / step_ms}
    if row["batch"] == 1:
        found |= {"first_token_ms": first_ms, "first_of_predicted": row["prefill_s"] * 1e3 / first_ms}
    return {name: round(value, 3) for name, value in found.items()}


def lines(part: Part, found: Mapping[str, Any]) -> Iterator[str]:
    """What a person wants to see of it."""
    if "failed" in found:
        yield f"  FAILED: {found['failed']}"
    elif part.program == "all_reduce":
        for rows, figures in found["rows"].items():
            yield f"  {rows} rows: " + ", ".join(f"{name} {value}" for name, value in figures.items())
        yield from (f"  {name}: {found[name]}" for name in ("endured", "a_rank_stopped") if name in found)
    elif part.program == "engine":
        for row, predicted in zip(found["rows"], found["predicted"], strict=True):
            first = f"first token {row['prefill_s'] * 1e3:.1f} ms, {row['prefill_tokens_per_s']:,.0f} tokens/s"
            step = f"step {row['decode_step_ms']:.2f} ms (predicted {predicted['decode_step_ms']:.2f})"
            yield f"  batch {row['batch']}: {step}, {first}"
    else:
        yield f"  {json.dumps(found)}"


def links(devices: str) -> Any:
    """Who can read whose memory, as the driver says; None where it does not answer."""
    indices = sorted({int(word.partition(":")[2] or 0) for word in devices.split("+") if word.startswith("cuda")})
    answer = ask(indices) if len(indices) > 1 else []
    return None if answer is None else [[link.reader, link.owner, link.access, link.atomics] for link in answer]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", default=default_devices(), help="of one engine (default: %(default)s)")
    parser.add_argument("--model", type=Path, help="a folder with tokenizer and weights, to be served as well")
    parser.add_argument("--replays", type=int, default=1_000_000, help="that sums must endure")
    parser.add_argument("--only", default=",".join(KINDS), help="kinds of parts, joined by commas")
    args = parser.parse_args(arguments)
    wanted = args.only.split(",")
    if unknown := set(wanted) - set(KINDS):
        parser.error(f"--only: given {sorted(unknown)[0]!r}, allowed: {', '.join(KINDS)}")
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    found: dict[str, Any] = {"devices": args.devices, "gpus": gpus, "torch": torch.__version__}
    if "links" in wanted:
        found["links"] = links(args.devices)
        print(f"links (reader, owner, access, atomics): {found['links']}", flush=True)
    for part in parts(args.devices, args.model, args.replays):
        if part.kind in wanted:
            print(part.name, flush=True)
            found[part.name] = run(part)
            print("\n".join(lines(part, found[part.name])), flush=True)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
