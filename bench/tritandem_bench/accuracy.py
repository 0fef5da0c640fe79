"""What rounding of weights costs: a model against itself, teacher-forced over a text, for each format.

Perplexity, the share of positions where the likeliest token stays the same, and the mean Kullback-Leibler divergence
from the whole model in nats. Weights are rounded in memory and unpacked; the head stays whole. Needs no server or GPU.
Prints a table and, as the last line, one JSON document.

    python -m tritandem_bench.accuracy --model DIR --text docs/scheduling.md --text docs/architecture.md
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import nn
from transformers import PreTrainedModel
from tritandem.config import EngineConfig
from tritandem.engine.model.loader import load_model
from tritandem.engine.model.quantized.weight import QuantizedWeight, quantize_fp8, quantize_int4

TEXTS = (Path("docs/scheduling.md"), Path("docs/architecture.md"))
Rounded = Callable[[torch.Tensor], QuantizedWeight]
ROWS_TOO = "FP8 a row, activations too"  # as many rows are multiplied on CUDA
FORMATS: dict[str, Rounded] = {
    "FP8 a row": quantize_fp8,
    ROWS_TOO: quantize_fp8,
    "FP8 a tensor": lambda weight: quantize_fp8(weight, (weight.shape[0], weight.shape[1])),
    "FP8 blocks of 128": lambda weight: quantize_fp8(weight, (128, 128)),
    "INT4 g128": lambda weight: quantize_int4(weight, 128),
    "INT4 g64": lambda weight: quantize_int4(weight, 64),
    "INT4 g32": lambda weight: quantize_int4(weight, 32),
    "INT4 g32 zero points": lambda weight: quantize_int4(weight, 32, symmetric=False),
}


@dataclass(frozen=True)
class Accuracy:
    """`bits`: of a weight, scales (two bytes a group, four a row or block) included."""

    format: str
    bits: float
    perplexity: float
    same_greedy: float
    kl: float


def read_ids(model: Path, texts: Sequence[Path], tokens: int) -> tuple[list[int], str]:
    """The first `tokens` ids of the texts, and the SHA-256 of all their bytes. Raises SystemExit for fewer."""
    for name, path in (("--model", model / "tokenizer.json"), *(("--text", text) for text in texts)):
        if not path.is_file():
            raise SystemExit(f"{name}: given {path}, allowed: a file")
    data = b"".join(text.read_bytes() for text in texts)
    ids = Tokenizer.from_file(str(model / "tokenizer.json")).encode(data.decode(), add_special_tokens=False).ids
    if len(ids) < tokens:
        raise SystemExit(f"--tokens: given {tokens}, the texts have {len(ids)}")
    return ids[:tokens], hashlib.sha256(data).hexdigest()


@torch.inference_mode()
def log_probs(model: PreTrainedModel, ids: Sequence[int], window: int) -> torch.Tensor:
    """float32 [T, V] after each token, each window of the text by itself."""
    parts = [torch.tensor(ids[start : start + window])[None] for start in range(0, len(ids), window)]
    return torch.cat([model(input_ids=part, use_cache=False).logits[0].float().log_softmax(-1) for part in parts])


def compare(
    name: str, bits: float, ours: torch.Tensor, whole: torch.Tensor, ids: Sequence[int], window: int
) -> Accuracy:
    following = [at for at in range(len(ids) - 1) if (at + 1) % window]  # the last of a window foretells nothing
    told = ours[following, [ids[at + 1] for at in following]]
    kl = (whole.exp() * (whole - ours)).sum(-1).mean()
    same = (ours.argmax(-1) == whole.argmax(-1)).float().mean()
    return Accuracy(name, bits, float((-told).mean().exp()), float(same), float(kl))


@torch.no_grad()
def rounded_model(model: PreTrainedModel, name: str) -> tuple[PreTrainedModel, float]:
    """A copy with every linear layer but the head rounded, and its bits a weight. Raises ValueError for a group that
    does not divide a layer's inputs."""
    made, bits, values = copy.deepcopy(model), 0, 0
    for path, module in made.named_modules():
        if type(module) is not nn.Linear or path == "lm_head":
            continue
        inner = module.weight.shape[1]
        group = int(name.split()[1].removeprefix("g")) if name.startswith("INT4") else 1
        if inner % group:
            raise ValueError(f"{inner} inputs")
        weight = FORMATS[name](module.weight)
        module.weight.copy_(weight.dense(module.weight.dtype))
        bits += module.weight.numel() * (8 if weight.is_fp8 else 4) + weight.scales.numel() * (
            32 if weight.is_fp8 else 16
        )
        bits += 8 * weight.zeros.numel() if weight.zeros is not None else 0
        values += module.weight.numel()
        if name == ROWS_TOO:
            module.register_forward_pre_hook(_round_rows)
    return made, bits / values


def _round_rows(_module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    x = arguments[0]
    return (quantize_fp8(x.flatten(0, -2)).dense(x.dtype).view(x.shape), *arguments[1:])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face folder")
    texts = f"default: {' and '.join(map(str, TEXTS))} of the project's folder"
    parser.add_argument("--text", type=Path, action="append", help=texts)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--window", type=int, default=512, help="tokens of a pass")
    args = parser.parse_args(arguments)
    ids, digest = read_ids(args.model, args.text or TEXTS, args.tokens)
    model = load_model(args.model, EngineConfig(device="cpu"), lambda note: None).model
    model.set_attn_implementation("sdpa")
    whole = log_probs(model, ids, args.window)
    rows = [compare(f"whole ({model.dtype})", 8 * model.dtype.itemsize, whole, whole, ids, args.window)]
    print(line(rows[0]), flush=True)
    for name in FORMATS:
        try:
            made, bits = rounded_model(model, name)
        except ValueError as error:
            print(f"{name:28} does not divide {error}", flush=True)
            continue
        rows.append(compare(name, bits, log_probs(made, ids, args.window), whole, ids, args.window))
        print(line(rows[-1]), flush=True)
    found = {"model": args.model.name, "tokens": len(ids), "text_sha256": digest, "torch": torch.__version__}
    print(json.dumps({**found, "rows": [asdict(row) for row in rows]}))


def line(row: Accuracy) -> str:
    figures = f"perplexity {row.perplexity:8.3f}   same greedy {row.same_greedy:7.2%}   KL {row.kl:.5f}"
    return f"{row.format:28}{row.bits:7.2f} bits   {figures}"


if __name__ == "__main__":
    main()
