"""The part of `tritandem size` that tells how long steps take on the GPUs: its flags and its output."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from tritandem.contracts.errors import ConfigError
from tritandem.model_facts.folder import read_folder
from tritandem.sizing.gpu import H200
from tritandem.sizing.steps import (
    DecoderShape,
    Layout,
    Spent,
    check_layout,
    decode_step,
    first_token,
    kv_tokens,
    weight_bytes_a_gpu,
)

from .numbers import whole

MOST_RANKS = 64
ROWS = (1, 8, 64, 256)
_WEIGHT_BYTES = {"bf16": 2, "fp8": 1, "int4": 4.25 / 8}  # a scale of two bytes for 128 values
_KV_BYTES = {"bf16": 2, "fp8_e4m3": 1}
_GIB = 1 << 30


def add_step_flags(size: argparse.ArgumentParser) -> None:
    size.add_argument(
        "--model", type=Path, metavar="FOLDER", help="with a config.json: how fast that model's steps are"
    )
    size.add_argument(
        "--ranks", type=whole(1, MOST_RANKS), default=1, metavar="N", help="GPUs that share every layer of one engine"
    )
    size.add_argument(
        "--stages", type=whole(1, MOST_RANKS), default=1, metavar="M", help="groups of them that share the layers out"
    )
    size.add_argument(
        "--weights", choices=list(_WEIGHT_BYTES), default="bf16", help="their type (default: %(default)s)"
    )
    size.add_argument(
        "--kv-dtype", choices=list(_KV_BYTES), default="bf16", help="that of the KV cache (default: %(default)s)"
    )


def predicted(args: argparse.Namespace) -> dict[str, Any] | None:
    """Plain JSON values; None without a model. Raises ConfigError."""
    if args.model is None:
        return None
    shape = DecoderShape.of(read_folder(args.model).text, str(args.model))
    layout = Layout(H200, args.ranks, args.stages, _WEIGHT_BYTES[args.weights], _KV_BYTES[args.kv_dtype])
    check_layout(shape, layout)
    if args.gpus % (args.ranks * args.stages):
        raise ConfigError(f"--gpus: given {args.gpus}, allowed: a multiple of --ranks x --stages")
    prompt = round(args.input_tokens)
    context, room = prompt + args.output_tokens / 2, kv_tokens(shape, layout)
    return {
        "gpu": layout.gpu.name,
        "engines": args.gpus // (args.ranks * args.stages),
        "ranks": args.ranks,
        "stages": args.stages,
        "weights": args.weights,
        "kv_dtype": args.kv_dtype,
        "weight_gib_a_gpu": round(weight_bytes_a_gpu(shape, layout) / _GIB, 1),
        "kv_tokens": room,
        "context_tokens": context,
        "first_token": _spent(first_token(shape, layout, prompt)),
        "decode_steps": {
            str(rows): {**_spent(decode_step(shape, layout, rows, context)), "fits": rows * context <= room}
            for rows in ROWS
        },
    }


def _spent(spent: Spent) -> dict[str, Any]:
    parts = {f"{name}_ms": round(getattr(spent, name) * 1e3, 3) for name in spent.__slots__}
    return {"ms": round(spent.total * 1e3, 3), **parts, "utilisation": round(spent.utilisation, 3)}


def step_lines(steps: dict[str, Any]) -> list[str]:
    """The same for a person."""
    layout = f"{steps['engines']} x ({steps['ranks']} ranks x {steps['stages']} stages), {steps['weights']}"
    fits, first = f"{steps['kv_tokens']:,} tokens of KV in {steps['kv_dtype']}", steps["first_token"]
    if not steps["kv_tokens"]:
        fits = "no room for KV: the weights do not fit"
    lines = [
        f"steps on {steps['gpu']}, {layout}: {steps['weight_gib_a_gpu']} GiB of weights a GPU, {fits} an engine",
        f"  first token of a lone prompt: {first['ms']:.0f} ms, utilisation {first['utilisation']:.1%}{_parts(first)}",
    ]
    for rows, step in steps["decode_steps"].items():
        over = "" if step["fits"] else ": more KV than there is room"
        rate = int(rows) * steps["stages"] / step["ms"] * 1e3
        lines.append(
            f"  decode, {rows} rows: {step['ms']:.2f} ms, {rate:,.0f} tokens/s an engine, "
            f"utilisation {step['utilisation']:.1%}{_parts(step)}{over}"
        )
    return [*lines, "  reckoned, not measured: docs/predicting.md"]


def _parts(spent: dict[str, Any]) -> str:
    names = ("products", "attention", "rowwise", "sums", "idle")
    return " (" + ", ".join(f"{name} {spent[f'{name}_ms']:.3g}" for name in names) + ")"
