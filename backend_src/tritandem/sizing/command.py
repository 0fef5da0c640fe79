"""`tritandem size` and `tritandem calibrate`: arguments and output; the work is in the modules beside."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..config import MODEL_ENV
from ..contracts.errors import ConfigError
from .coefficients import load_coefficients, to_document
from .instances import CloudInstance, Offer, load_instances
from .model import Workload, core_need
from .report import document, text
from .rule import rule_cores

MOST_GPUS, MOST_TOKENS, MOST_RPS = 4096, 100_000_000, 1e6


Say = Callable[[str], None]
ResolveModel = Callable[[str, Say], Path]


def existing_folder(spec: str, say: Say) -> Path:
    """The model's folder by its path alone. Raises ConfigError."""
    if not Path(spec).exists():
        raise ConfigError(f"--model: {spec} does not exist")
    return Path(spec)


def add_command(subparsers: Any, resolve_model: ResolveModel = existing_folder) -> None:
    """Add `size` and `calibrate`; what they parse into has `run(args) -> exit code`.

    `resolve_model` turns what `--model` says into a folder: names are known to a room of the same tier.
    """
    size = subparsers.add_parser(
        "size",
        help="how many cores a deployment needs",
        description="How many cores a deployment needs: the published rule, max(4, GPUs x (2 + log2(mean input "
        "tokens / 1024))), beside a model of measured costs, and what cloud instances have.",
    )
    size.add_argument("--gpus", type=_whole(MOST_GPUS), required=True, metavar="N")
    size.add_argument("--input-tokens", type=_number(1, MOST_TOKENS), required=True, metavar="MEAN")
    size.add_argument("--output-tokens", type=_number(1, MOST_TOKENS), default=256.0, metavar="MEAN")
    size.add_argument("--rps", type=_number(1e-6, MOST_RPS), metavar="RATE", help="requests a second, in all")
    size.add_argument(
        "--decode-step-ms",
        type=_number(1e-3, 1e5),
        default=10.0,
        metavar="MS",
        help="how long one decode step takes on the GPU (default: %(default)s)",
    )
    size.add_argument("--slow-tokenizer", action="store_true", help="reckon without the fast tokenizer engine")
    size.add_argument("--coefficients", type=Path, metavar="FILE", help="what `tritandem calibrate` wrote")
    size.add_argument("--instances", type=Path, metavar="FILE", help="another table of instances and prices")
    size.add_argument("--json", action="store_true", help="one JSON document")
    size.set_defaults(run=run_size)
    calibrate = subparsers.add_parser(
        "calibrate",
        help="measure what `size` reckons with on this machine",
        description="Measure, in this process and without a server, what `tritandem size` reckons with: tokenizer "
        "rates, the scheduler's cost of a request and a response, the engine's host time of a step.",
    )
    calibrate.add_argument("--output", type=Path, required=True, metavar="FILE", help="where the JSON goes")
    calibrate.add_argument(
        "--model",
        default=os.environ.get(MODEL_ENV) or "smollm2",
        metavar="DIR|GGUF|NAME",
        help="whose tokenizer is measured (default: $TRITANDEM_MODEL, or smollm2)",
    )
    calibrate.add_argument(
        "--seconds",
        type=_number(0.01, 600),
        default=3.0,
        help="of each (default: %(default)s)",
    )
    calibrate.set_defaults(run=run_calibrate, resolve_model=resolve_model)


def run_size(args: argparse.Namespace) -> int:
    """Raises ConfigError for a data file that cannot be used."""
    costs, clouds = load_coefficients(args.coefficients), load_instances(args.instances)
    rule, need = rule_cores(args.gpus, args.input_tokens), None
    workload = None
    if args.rps is not None:
        workload = Workload(
            args.gpus,
            args.input_tokens,
            args.output_tokens,
            args.rps,
            args.decode_step_ms / 1000,
            not args.slow_tokenizer,
        )
        need = core_need(workload, costs.values)

    def offer(instance: CloudInstance) -> Offer:
        # Each instance is a server of its own: it needs what its GPUs need, with its share of the requests.
        needed = rule_cores(instance.gpus, args.input_tokens)
        if workload is not None:
            share = workload.requests_per_s * instance.gpus / workload.gpus
            scaled = dataclasses.replace(workload, gpus=instance.gpus, requests_per_s=share)
            needed = max(needed, core_need(scaled, costs.values).cores)
        return Offer(instance, needed)

    offers = [offer(instance) for instance in clouds.instances]
    shown = document(args.gpus, args.input_tokens, rule, need, costs, clouds, offers)
    print(json.dumps(shown) if args.json else text(shown, clouds))
    return 0


def run_calibrate(args: argparse.Namespace) -> int:
    """Raises ConfigError when the model or the output file cannot be used."""
    from .calibrate import calibrate

    def say(line: str) -> None:
        print(line, flush=True)

    if not args.output.resolve().parent.is_dir():
        raise ConfigError(f"--output: the folder of {args.output} does not exist")
    found = to_document(calibrate(args.resolve_model(args.model, say), args.seconds, say))
    try:
        args.output.write_text(json.dumps(found, indent=2) + "\n")
    except OSError as error:
        raise ConfigError(f"--output: {args.output} cannot be written: {error.strerror}") from error
    say(f"written to {args.output}; use it with: tritandem size --coefficients {args.output} ...")
    return 0


def _whole(most: int) -> Any:
    def parse(given: str) -> int:
        if not given.isascii() or not given.isdigit() or not 1 <= int(given) <= most:
            raise argparse.ArgumentTypeError(f"given {given}, allowed: a whole number in 1..{most}")
        return int(given)

    return parse


def _number(least: float, most: float) -> Any:
    def parse(given: str) -> float:
        try:
            value = float(given)
        except ValueError:
            value = math.nan
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"given {given}, allowed: a number in [{least:g}, {most:g}]")
        return value

    return parse
