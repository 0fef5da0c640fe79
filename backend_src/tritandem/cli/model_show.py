"""`tritandem model show`: what a model's files say, what fits, whether it can be served; no weight is loaded."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tritandem.config import EngineConfig
from tritandem.contracts.errors import ConfigError
from tritandem.front.formats.choose import NONE, choose
from tritandem.host import Refusal
from tritandem.model_facts.chat_facts import chat_templates
from tritandem.models.catalog import CATALOG
from tritandem.models.fetch import in_cache

from .memory_flags import add_memory_flags
from .model_fit import fit, kv_bytes_a_token
from .numbers import number

# Whether a form in which the model calls functions is known.
TOLD = {True: "called as {}", False: "no known form: requests with tools are refused (--openai-tool-parser names one)"}
EXIT_SERVED, EXIT_NOT_SERVED = 0, 1
_QUIET = {"TRANSFORMERS_VERBOSITY": "error", "TQDM_DISABLE": "1", "HF_HUB_OFFLINE": "1"}


def add_parser(actions: Any) -> None:
    parser = actions.add_parser(
        "show",
        help="what a model's files say, what of it fits, and whether it can be served",
        description="What a model's files say, without loading them, how many sequences a GPU holds beside it, what of "
        "the OpenAI API its chat template serves, and whether it can be served: exit code 0 or 1. "
        "Takes some seconds, most of them to import torch.",
    )
    parser.add_argument("model", metavar="DIR|GGUF|NAME", help="a folder, a GGUF file, or the name of a fetched model")
    parser.add_argument(
        "--gpu-gb", type=number(0.1, 1e5), default=80.0, metavar="GB", help="memory of the GPU (default: %(default)g)"
    )
    add_memory_flags(parser, default=EngineConfig())
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Raises Refusal for a model that is not there, ConfigError for files that cannot be read at all."""
    path = locate(args.model)
    facts = summary(path)
    fits = {
        "kv_bytes_per_token": kv_bytes_a_token(facts, args.kv_dtype),
        "fits": fit(facts, int(args.gpu_gb * 1e9), args.quantization, args.kv_dtype),
    }
    formats = choose(chat_templates(path))
    facts |= fits | {"tool_format": formats.tools, "reasoning_format": formats.reasoning}
    if not args.json:
        print("\n".join(lines(path, facts)), flush=True)
    reason = why_not_served(path, args.quantization)
    on_gpu = served_on_gpu(facts["architecture"]) if reason is None else None
    if args.json:
        print(json.dumps({"path": str(path), **facts, "served": reason is None, "reason": reason, "on_gpu": on_gpu}))
    else:
        known = "yes, by all that its files say; what its attention computes is checked when it is loaded"
        print(_line("can be served", known if reason is None else f"no: {reason}"))
        if on_gpu is not None:
            print(_line("on a GPU", on_gpu))
    return EXIT_SERVED if reason is None else EXIT_NOT_SERVED


def locate(spec: str) -> Path:
    """The folder or GGUF file, as it lies on the disk. Raises Refusal."""
    path = Path(spec).expanduser()
    if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
        return path.resolve()
    if spec in CATALOG:
        return in_cache(spec)
    raise Refusal(
        f"model {spec!r} is neither a folder nor a .gguf file", f"or give a name: {', '.join(sorted(CATALOG))}"
    )


def summary(path: Path) -> dict[str, Any]:
    from tritandem.model_facts.summary import summary_of_folder, summary_of_gguf

    return summary_of_folder(path) if path.is_dir() else summary_of_gguf(path)


def why_not_served(path: Path, quantization: str = "none") -> str | None:
    """The reason in one line; None: nothing speaks against it. `quantization`: of the setting."""
    os.environ.update({name: value for name, value in _QUIET.items() if name not in os.environ})
    from tritandem.model_facts import check_folder, read_folder
    from tritandem.model_facts.quantization import read_quantization, refuse_twice

    try:
        if path.is_dir():
            check_folder(path)
            refuse_twice(quantization, read_quantization(read_folder(path)), str(path))
        from tritandem.engine.model.loader import check_model

        check_model(path)
    except ConfigError as error:
        return str(error)
    return None


def served_on_gpu(family: str | None) -> str | None:
    """How a tiny model of the family was served, in one line; None for one that is not known."""
    from tritandem.model_facts.families import finding_of, findings

    found = finding_of(family)
    return None if found is None else f"{found.words()}; seen of a tiny random model, transformers {findings()[0]}"


def lines(path: Path, facts: Mapping[str, Any]) -> Iterator[str]:
    """For a person; what the files do not say is left out."""
    stated = {name: value for name, value in facts.items() if value not in (None, {}, [], 0)}
    yield _line("model", f"{path} ({facts['format']})")
    sizes = ("layers", "hidden_size", "attention_heads", "key_value_heads", "head_size", "experts")
    words = [
        str(facts["architecture"]),
        *(f"{name.replace('_', ' ')} {stated[name]}" for name in sizes if name in stated),
    ]
    yield _line("architecture", ", ".join(words))
    if "parameters" in stated:
        kinds = ", ".join(f"{count} {kind}" for kind, count in facts["weights"].items())
        yield _line("weights", f"{facts['parameters']:,} values in {facts['weight_bytes'] / 1e6:,.1f} MB: {kinds}")
    if {"layers", "key_value_heads", "head_size"} <= stated.keys():
        values = 2 * (stated["layers"] - facts["state_layers"]) * stated["key_value_heads"] * stated["head_size"]
        yield _line("KV cache", f"{2 * values:,} bytes a token in bf16, {values:,} in fp8_e4m3 (engine.kv_dtype)")
    if "state_layers" in stated:
        size = f"{facts['state_bytes']:,} bytes" if "state_bytes" in stated else "an unknown size"
        yield _line("states", f"of {facts['state_layers']} layers, {size} a sequence; no prefix cache")
    heads = {True: "the embedding once more", False: "weights of its own", None: "not said"}
    yield _line("head", heads[facts["tied_head"]])
    yield _line("context", f"{facts['context_tokens']} tokens" if "context_tokens" in stated else "not said")
    yield _line("vocabulary", f"{facts['vocabulary_rows']} rows, {facts['tokens']} tokens")
    yield _line("end ids", ", ".join(map(str, facts["end_ids"])) or "none")
    yield _line("rope", _pairs(facts["rope"]) or "not said")
    yield _line("sliding window", f"{stated['sliding_window']} tokens" if "sliding_window" in stated else "none")
    if "quantization" in stated:
        layers = ", ".join(f"{count} layers in {words}" for words, count in facts["quantized_layers"].items())
        unpacked = f"{facts['quantized_parameters'] * 2 / 1e6:,.1f} MB of them in bfloat16, where they are unpacked"
        yield _line(
            "quantization", f"{facts['quantization']}: {layers}; {unpacked}" if layers else facts["quantization"]
        )
    chars = facts["chat_template_chars"]
    yield _line("chat template", f"{chars} characters" if chars else "none: chats are refused")
    if chars:
        yield _line("tools", TOLD[facts["tool_format"] != NONE].format(facts["tool_format"]))
        yield _line("thoughts", "none known" if facts["reasoning_format"] == NONE else facts["reasoning_format"])
    if facts["fits"]:
        yield _line("memory", _memory(facts))
    yield _line("its own sampling", _pairs(facts["generation_defaults"]) or "not said")
    if "tokens_without_row" in stated:
        yield _line("tokens without a row", ", ".join(facts["tokens_without_row"]))


def _memory(facts: Mapping[str, Any]) -> str:
    fits = facts["fits"]
    weights, gpu = fits["weight_bytes"] / 1e9, fits["gpu_bytes"] / 1e9
    each = f"KV cache {facts['kv_bytes_per_token']:,} bytes a token"
    if not fits["kv_tokens"]:
        return f"weights {weights:.2f} GB, {each}: a GPU of {gpu:g} GB holds no token beside them"
    counts = ", ".join(f"{count:,} sequences of {length:,} tokens" for length, count in fits["sequences"].items())
    return f"weights {weights:.2f} GB, {each}; a GPU of {gpu:g} GB holds at most {counts}"


def _pairs(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def _line(label: str, value: str) -> str:
    return f"{label:<21} {value}"
