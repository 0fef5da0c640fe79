"""Mixtures of experts alone: each way to multiply them, by tokens and routing, in a CUDA graph.

Weights of one layer are made several times, so that none is left in the L2 cache when its turn comes again. The last
line is one JSON document. Needs CUDA.

    python -m tritandem_bench.experts --shape qwen3-30b-a3b --tokens 1,4,16,64,256,1024
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from transformers import AutoConfig
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from tritandem.engine.model.experts.dense import DenseExperts
from tritandem.engine.model.experts.interface import LIBRARY
from tritandem.engine.model.experts.launches import by_pairs, by_tiles
from tritandem.engine.runners.streams import cuda_event

from .shapes import SHAPES

CALLS = 8  # in one graph, each over weights of its own
ROUTINGS = ("even", "skewed")
MOST_PAIRS = 256  # beyond, the kernels for pairs are far behind


def make_experts(shape: str, device: torch.device) -> list[Any]:
    """Modules as transformers makes them, of one layer each."""
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    kind = {"qwen3_moe": Qwen3MoeExperts, "gpt_oss": GptOssExperts}[SHAPES[shape]["model_type"]]
    config = AutoConfig.for_model(**SHAPES[shape])
    with device:
        modules = [kind(config).to(torch.bfloat16) for _ in range(CALLS)]
    for module in modules:
        for parameter in module.requires_grad_(False).parameters():
            torch.nn.init.normal_(parameter, std=0.02)
    return modules


def routing(kind: str, tokens: int, experts: int, top_k: int, device: torch.device) -> torch.Tensor:
    """int64 [tokens, top_k]; skewed: all tokens go to the same few."""
    if kind == "skewed":
        return torch.arange(top_k, device=device).expand(tokens, top_k).contiguous()
    return torch.rand(tokens, experts, device=device).topk(top_k).indices


def graph_us(run: Callable[[int], Any]) -> float:
    """Microseconds of one of CALLS calls, the median of eleven replays."""
    for _ in range(2):
        run(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in range(CALLS):
            run(call)
    times: list[float] = []
    for _ in range(11):
        begin, end = cuda_event(timing=True), cuda_event(timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / CALLS)
    return sorted(times)[len(times) // 2]


def ways(
    products: Sequence[DenseExperts], x: torch.Tensor, index: torch.Tensor, scores: torch.Tensor
) -> dict[str, Callable[[int], Any]]:
    """Each runs the experts of the product that it is given the number of."""

    def library(call: int) -> Any:
        return ALL_EXPERTS_FUNCTIONS[LIBRARY](products[call].module, x, index, scores)

    def pairs(call: int) -> Any:
        return by_pairs(x, index, scores, products[call].weights, None, False)

    def tiles(size: int, call: int) -> Any:
        return by_tiles(x, index, scores, products[call].weights, size, None, False)

    found: dict[str, Callable[[int], Any]] = {LIBRARY: library}
    if index.numel() <= MOST_PAIRS:
        found["pairs"] = pairs
    return found | {f"tiles of {size}": partial(tiles, size) for size in (16, 32, 64)}


def measure(shape: str, tokens: Sequence[int]) -> list[dict[str, Any]]:
    device, stated = torch.device("cuda"), SHAPES[shape]
    products = [DenseExperts(module) for module in make_experts(shape, device)]
    rows = []
    for count, kind in itertools.product(tokens, ROUTINGS):
        x = torch.randn(count, stated["hidden_size"], device=device, dtype=torch.bfloat16)
        index = routing(kind, count, products[0].weights.experts, stated["num_experts_per_tok"], device)
        scores = torch.rand(index.shape, device=device)
        times = {name: round(graph_us(run), 1) for name, run in ways(products, x, index, scores).items()}
        rows.append({"shape": shape, "tokens": count, "routing": kind, "us": times})
        print(rows[-1], flush=True)
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-30b-a3b", choices=[name for name in SHAPES if "llama" not in name])
    parser.add_argument("--tokens", default="1,2,4,8,16,32,64,128,256,512,1024,2048")
    args = parser.parse_args(arguments)
    with torch.inference_mode():
        rows = measure(args.shape, [int(count) for count in args.tokens.split(",")])
    print(json.dumps({"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}))


if __name__ == "__main__":
    main()
