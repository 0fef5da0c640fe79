"""`tritandem size`: arguments and output; the arithmetic is in the room `sizing`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from tritandem.sizing import CoefficientsFile, CoreNeed, Workload, core_need, load_coefficients, rule_cores

from .numbers import number, whole
from .size_steps import add_step_flags, predicted, step_lines

MOST_GPUS, MOST_TOKENS, MOST_RPS = 4096, 100_000_000, 1e6


def add_parser(subparsers: Any) -> None:
    """Add `size`; what it parses into has `run(args) -> exit code`."""
    size = subparsers.add_parser(
        "size",
        help="how many cores a deployment needs, and how fast its GPUs are",
        description="How many cores a deployment needs: the published rule, max(4, GPUs x (2 + log2(mean input "
        "tokens / 1024))), beside a model of measured costs. With --model also how long decode steps and the first "
        "token take on the GPUs, as docs/predicting.md reckons it.",
    )
    size.add_argument("--gpus", type=whole(1, MOST_GPUS), required=True, metavar="N")
    size.add_argument("--input-tokens", type=number(1, MOST_TOKENS), required=True, metavar="MEAN")
    size.add_argument("--output-tokens", type=number(1, MOST_TOKENS), default=256.0, metavar="MEAN")
    size.add_argument("--rps", type=number(1e-6, MOST_RPS), metavar="RATE", help="requests a second, in all")
    size.add_argument(
        "--decode-step-ms",
        type=number(1e-3, 1e5),
        default=10.0,
        metavar="MS",
        help="how long one decode step takes on the GPU (default: %(default)s)",
    )
    size.add_argument("--slow-tokenizer", action="store_true", help="reckon without the fast tokenizer engine")
    size.add_argument("--coefficients", type=Path, metavar="FILE", help="costs that were measured on another machine")
    add_step_flags(size)
    size.add_argument("--json", action="store_true", help="one JSON document")
    size.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Raises ConfigError for files that cannot be used, and for ranks that do not divide the model or the GPUs."""
    costs, need = load_coefficients(args.coefficients), None
    if args.rps is not None:
        step_s, fast = args.decode_step_ms / 1000, not args.slow_tokenizer
        need = core_need(
            Workload(args.gpus, args.input_tokens, args.output_tokens, args.rps, step_s, fast), costs.values
        )
    shown = {
        "gpus": args.gpus,
        "input_tokens": args.input_tokens,
        "rule_cores": rule_cores(args.gpus, args.input_tokens),
        "measured": need and measured(need, costs),
        "steps": predicted(args),
    }
    print(json.dumps(shown) if args.json else text(shown))
    return 0


def measured(need: CoreNeed, costs: CoefficientsFile) -> dict[str, Any]:
    """The model's answer as plain JSON values."""
    return {
        "cores": need.cores,
        "busy_cores": {name: round(getattr(need, name), 3) for name in ("tokenizer", "scheduler", "triton")},
        "reserved_cores": {"engine": need.engine},
        "tokens_per_response": round(need.tokens_per_response, 2),
        "limits": list(need.limits),
        "coefficients_measured_on": costs.measured_on,
        "coefficients_machine": costs.machine,
    }


def text(shown: dict[str, Any]) -> str:
    """The same for a person."""
    lines = [f"published rule: {shown['rule_cores']} cores for {shown['gpus']} GPU{'s' if shown['gpus'] > 1 else ''}"]
    found = shown["measured"]
    steps = step_lines(shown["steps"]) if shown["steps"] else []
    if found is None:
        lines.append("measured model: give --rps (and --output-tokens) to have it computed")
        return "\n".join([*lines, *steps])
    busy = ", ".join(f"{name} {cores:.2f}" for name, cores in found["busy_cores"].items())
    reserved = found["reserved_cores"]["engine"]
    lines.append(f"measured model: {found['cores']} cores (busy: {busy}; reserved for engines: {reserved:.0f})")
    lines += [f"  note: {limit}" for limit in found["limits"]]
    where = f"{found['coefficients_machine']}, {found['coefficients_measured_on']}"
    return "\n".join([*lines, f"  costs measured on {where}; --coefficients takes yours", *steps])
