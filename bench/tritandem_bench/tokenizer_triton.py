"""The tokenizer as clients reach it: the real Triton with the model `tokenizer` alone, called over gRPC.

    python -m tritandem_bench.tokenizer_triton [--model smollm2] [--rate 8] [--seconds 30]

Long prompts arrive at a fixed rate, each new. The stage is what the model's own stamps say: from the moment `execute`
has the request until its ids are about to be sent. What the client waits beyond that is transport, and the same number
of ids sent instead of text shows what transport alone takes. A second part sends 1k-token prompts alone and beside the
long ones. Prints a table and, as the last line, one JSON document; exits 1 if ids are not those of `tokenizers`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient
from tritandem.models import resolve_model
from tritandem.server import TritonServer
from tritandem.server.repository import default_repository
from tritandem.tokenizer.encode.whole import WholeEncoder
from tritandem.tokenizer.files.source import read_source

from .tokenizer_texts import Corpus

CONTEXT_TOKENS = 131_072
SLOW = "[tokenizer]\nfast = false\nprefix_cache = false\n"
CHECKED = 4  # of the long texts of a run, how many are compared with the reference


@dataclass(frozen=True)
class Sample:
    """One request, in milliseconds."""

    client_ms: float  # from sending until the answer is there
    stage_ms: float  # by the model's stamps
    ids: int


def tokenizer_alone(folder: Path) -> Path:
    """A model repository with nothing but the tokenizer."""
    repository = folder / "model_repository"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(default_repository() / "tokenizer", repository / "tokenizer", ignore=ignored)
    return repository


def model_folder(source: Path, folder: Path) -> Path:
    """The vocabulary of `source` as a model whose context takes the long prompts."""
    model = folder / "model"
    shutil.copytree(source, model, ignore=shutil.ignore_patterns("*.safetensors", "*.gguf"))
    config = model / "config.json"
    values = json.loads(config.read_text(encoding="utf-8")) if config.is_file() else {"model_type": "llama"}
    config.unlink(missing_ok=True)
    config.write_text(json.dumps(values | {"max_position_embeddings": CONTEXT_TOKENS}), encoding="utf-8")
    return model


def text_input(text: str) -> grpcclient.InferInput:
    tensor = grpcclient.InferInput("text_input", [1, 1], "BYTES")
    tensor.set_data_from_numpy(np.array([[text.encode()]], np.object_))
    return tensor


def ids_input(count: int) -> grpcclient.InferInput:
    tensor = grpcclient.InferInput("input_ids", [1, count], "INT32")
    tensor.set_data_from_numpy(np.ones((1, count), np.int32))
    return tensor


class Caller:
    """Sends prepared inputs, each on a thread and connection that is free."""

    def __init__(self, url: str, threads: int = 8) -> None:
        self._url = url
        self._mine = threading.local()
        self._pool = ThreadPoolExecutor(threads)

    def at_rate(self, inputs: Sequence[grpcclient.InferInput], rate: float) -> list[tuple[Sample, Any]]:
        """All inputs, sent 1 / rate seconds apart whatever the answers do."""
        begun = time.monotonic()
        sent = []
        for number, tensor in enumerate(inputs):
            time.sleep(max(0.0, begun + number / rate - time.monotonic()))
            sent.append(self._pool.submit(self._call, tensor))
        return [future.result() for future in sent]

    def _call(self, tensor: grpcclient.InferInput) -> tuple[Sample, Any]:
        if not hasattr(self._mine, "client"):
            self._mine.client = grpcclient.InferenceServerClient(self._url)
        begun = time.perf_counter()
        result = self._mine.client.infer("tokenizer", [tensor])
        took_ms = (time.perf_counter() - begun) * 1e3
        ids, stamps = result.as_numpy("input_ids"), result.as_numpy("tokenized_ns").reshape(-1)
        return Sample(took_ms, float(stamps[1] - stamps[0]) / 1e6, ids.size), ids.reshape(-1)


def quantiles(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {f"p{q}": round(ordered[min(len(ordered) - 1, len(ordered) * q // 100)], 2) for q in (50, 90, 99)}


def figures(samples: Sequence[Sample]) -> dict[str, Any]:
    return {
        "requests": len(samples),
        "tokens": round(statistics.median(sample.ids for sample in samples)),
        "stage_ms": quantiles([sample.stage_ms for sample in samples]),
        "client_ms": quantiles([sample.client_ms for sample in samples]),
        "beyond_stage_ms": quantiles([sample.client_ms - sample.stage_ms for sample in samples]),
    }


def measure(url: str, model: Path, options: argparse.Namespace) -> tuple[dict[str, Any], int]:
    """The rows by name, and how many of the checked texts came back wrong."""
    corpus = Corpus(random.Random())
    whole = WholeEncoder(read_source(model).new_tokenizer())
    longs = Caller(url)
    shorts = Caller(url, threads=4)

    def length(tokens: int) -> int:
        return corpus.chars_for("prose", tokens, lambda text: len(whole.encode(text, False)))

    def texts(tokens: int, seconds: float, rate: float) -> list[str]:
        chars = length(tokens)
        return [corpus.text("prose", chars) for _ in range(round(seconds * rate))]

    def short_inputs() -> list[grpcclient.InferInput]:
        return [text_input(text) for text in texts(options.short_tokens, options.seconds, options.short_rate)]

    longs.at_rate([text_input(text) for text in texts(options.tokens, 3, options.rate)], options.rate)
    rows: dict[str, Any] = {}
    sent = texts(options.tokens, options.seconds, options.rate)
    answers = longs.at_rate([text_input(text) for text in sent], options.rate)
    rows["long"] = figures([sample for sample, _ in answers])
    checked = list(zip(sent, answers, strict=True))[:CHECKED]
    wrong = sum(not np.array_equal(whole.encode(text, True), ids) for text, (_, ids) in checked)
    same_size = [ids_input(sample.ids) for sample, _ in answers]
    rows["long, ids instead of text"] = figures([sample for sample, _ in longs.at_rate(same_size, options.rate)])
    rows["short, alone"] = figures([sample for sample, _ in shorts.at_rate(short_inputs(), options.short_rate)])
    inputs, beside = short_inputs(), [text_input(text) for text in texts(options.tokens, options.seconds, options.rate)]
    with ThreadPoolExecutor(1) as other:
        running = other.submit(longs.at_rate, beside, options.rate)
        rows["short, beside long"] = figures([sample for sample, _ in shorts.at_rate(inputs, options.short_rate)])
        rows["long, beside short"] = figures([sample for sample, _ in running.result()])
    return rows, wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="as for `tritandem serve` (default smollm2)")
    parser.add_argument("--tokens", type=int, default=114_000)
    parser.add_argument("--rate", type=float, default=8.0, help="long prompts a second")
    parser.add_argument("--short-tokens", type=int, default=1000)
    parser.add_argument("--short-rate", type=float, default=11.0, help="short prompts a second; no multiple of --rate")
    parser.add_argument("--seconds", type=float, default=30.0, help="for each row")
    parser.add_argument("--port", type=int, default=18190, help="first of three free ports")
    parser.add_argument("--slow", action="store_true", help="without the fast engine and the prefix cache")
    options = parser.parse_args()
    model = resolve_model(options.model, print)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        ports = {name: options.port + at for at, name in enumerate(("http_port", "grpc_port", "metrics_port"))}
        settings = folder / "settings.toml"
        settings.write_text("[engine]\nrandom_weights = true\n" + (SLOW if options.slow else ""))
        with TritonServer(
            model_folder(model, folder), repository=tokenizer_alone(folder), **ports, engine_config=settings
        ) as server:
            rows, wrong = measure(server.grpc_url, model, options)
    print(f"{'':27} requests  tokens   stage p50    p99  client p50    p99  beyond the stage p50    p99   (ms)")
    for name, row in rows.items():
        stage, client, beyond = row["stage_ms"], row["client_ms"], row["beyond_stage_ms"]
        print(
            f"{name:27} {row['requests']:8} {row['tokens']:7} {stage['p50']:11.2f} {stage['p99']:6.2f}"
            f" {client['p50']:11.2f} {client['p99']:6.2f} {beyond['p50']:21.2f} {beyond['p99']:6.2f}"
        )
    cores = len(os.sched_getaffinity(0))
    print(json.dumps({"model": options.model, "cores": cores, "rate": options.rate, "wrong": wrong, "rows": rows}))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
