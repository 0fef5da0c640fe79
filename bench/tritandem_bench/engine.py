"""The engine alone, beside transformers on the same model in the same run.

Random prompts, greedy decoding to the full length, a list of batch sizes; for each: the engine, plain
`generate` on the batch, and transformers' continuous batching (`generate_batch`). The systems take turns and
each keeps its fastest run: a busy neighbour only ever makes a run slower. With `--structured 50,100` the engine also
runs with such shares of the answers bound to JSON, each to its own schema. The last line is one JSON document.

    python -m tritandem_bench.engine --model DIR --device cpu --batch 1,8 --new-tokens 32
    python -m tritandem_bench.engine --shape qwen3-30b-a3b --batch 1,64,256 --without generate,generate_batch
    python -m tritandem_bench.engine --shape small-hybrid --batch 1,8,64 --without generate_batch
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tritandem.config import EngineConfig
from tritandem.contracts.arrays import Int32Array
from tritandem.contracts.fields import SamplingParams
from tritandem.contracts.requests import EngineRequest
from tritandem.contracts.stream import FinishCode
from tritandem.engine.model.loader import resolve_device, resolve_dtype
from tritandem.engine.service import EngineService, build_engine
from tritandem.grammar import Grammar, Kind, Vocabulary
from tritandem.machine.device import DeviceGroup
from tritandem.telemetry.step_meter import StepMeter
from tritandem.tokenizer.files.source import read_source
from tritandem_loadtest.workload import endless_schema

from .shapes import SHAPES, write_shape


@dataclass(frozen=True)
class Measurement:
    """`prefill_s` ends when every sequence has its first token; a decode step gives each one more.

    `cpu_s` is the processor time of the whole process over the same work: on a shared machine it says more
    than the clock.
    """

    system: str
    batch: int
    prefill_s: float
    total_s: float
    cpu_s: float
    prompt_tokens: int  # of one sequence
    new_tokens: int  # of one sequence
    launch_skew_us: float = 0.0  # host time between a step's first and last launch, of an engine over several devices

    def figures(self) -> dict[str, Any]:
        """Everything, with the rates that follow from it."""
        rates = {
            "prefill_tokens_per_s": self.batch * self.prompt_tokens / self.prefill_s,
            "decode_step_ms": (self.total_s - self.prefill_s) / max(1, self.new_tokens - 1) * 1e3,
            "output_tokens_per_s": self.batch * self.new_tokens / self.total_s,
        }
        return {**asdict(self), **{name: round(value, 3) for name, value in rates.items()}}


def random_prompts(count: int, tokens: int, vocab_size: int, seed: int) -> list[Int32Array]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab_size, tokens, dtype=np.int32) for _ in range(count)]


# -- ours ----------------------------------------------------------------------------------------------


_ids = itertools.count()


def measure_engine(
    service: EngineService,
    prompts: list[Int32Array],
    new_tokens: int,
    structured_percent: int = 0,
    meter: StepMeter | None = None,
) -> Measurement:
    """Submit everything at once and read to the end. `meter`: of an engine over several devices. Raises RuntimeError
    when a sequence fails."""
    requests = [EngineRequest(next(_ids), ids, SamplingParams(max_tokens=new_tokens)) for ids in prompts]
    for row in range(len(prompts)):
        if (row + 1) * structured_percent // 100 > row * structured_percent // 100:
            schema = json.dumps(endless_schema(str(row), new_tokens))
            requests[row] = replace(requests[row], grammar=Grammar(Kind.JSON_SCHEMA, schema))
    without_token = {request.seq_id for request in requests}
    skews, skew_s = _skews(meter)
    start, start_cpu = time.perf_counter(), time.process_time()
    refused = [error for error in service.submit(requests) if error is not None]
    if refused:
        raise RuntimeError(f"the engine refused: {refused[0]}")
    prefill_s = 0.0
    while service.live():
        batch = service.next_batch(60.0)
        if batch is None or (batch.finish == FinishCode.ERROR).any():
            raise RuntimeError(f"the engine failed: {batch.errors if batch else 'no token for 60 s'}")
        if without_token:
            without_token.difference_update(batch.seq_ids[batch.token_counts > 0].tolist())
            prefill_s = time.perf_counter() - start
    total_s, cpu_s = time.perf_counter() - start, time.process_time() - start_cpu
    system = f"structured {structured_percent} %" if structured_percent else "tritandem"
    skews_after, skew_s_after = _skews(meter)
    skew_us = (skew_s_after - skew_s) * 1e6 / max(1, skews_after - skews)
    return Measurement(system, len(prompts), prefill_s, total_s, cpu_s, len(prompts[0]), new_tokens, skew_us)


def _skews(meter: StepMeter | None) -> tuple[int, float]:
    """How many launches, and the sum of their skews in seconds."""
    counts, seconds = ([0], 0.0) if meter is None else meter.launch_skew.totals()
    return sum(counts), seconds


def vocabulary_of(model: Path, rows: int) -> Vocabulary:
    source = read_source(model)
    return Vocabulary(source.json_text, rows, source.end_ids)


# -- transformers --------------------------------------------------------------------------------------


def measure_transformers(
    system: str, run: Callable[[list[Int32Array], int], int], prompts: list[Int32Array], new_tokens: int
) -> Measurement:
    """The first token alone gives the prefill; a second run over everything gives the rest."""

    def timed(tokens: int) -> float:
        start = time.perf_counter()
        produced = run(prompts, tokens)
        if produced != tokens * len(prompts):
            raise RuntimeError(f"{system}: {produced} tokens instead of {tokens * len(prompts)}")
        return time.perf_counter() - start

    prefill_s = timed(1)
    start_cpu = time.process_time()
    total_s = timed(new_tokens)
    cpu_s = time.process_time() - start_cpu
    return Measurement(system, len(prompts), prefill_s, total_s, cpu_s, len(prompts[0]), new_tokens)


def plain_generate(model: Any) -> Callable[[list[Int32Array], int], int]:
    def run(prompts: list[Int32Array], new_tokens: int) -> int:
        ids = torch.from_numpy(np.stack(prompts).astype(np.int64)).to(model.device)
        with torch.inference_mode():
            output = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=new_tokens,
                min_new_tokens=new_tokens,
                do_sample=False,
                pad_token_id=0,
            )
        return int(output.shape[0] * (output.shape[1] - ids.shape[1]))

    return run


def continuous_batching(model: Any) -> Callable[[list[Int32Array], int], int]:
    from transformers import GenerationConfig

    def run(prompts: list[Int32Array], new_tokens: int) -> int:
        config = GenerationConfig(max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
        outputs = model.generate_batch([ids.tolist() for ids in prompts], generation_config=config, warmup=False)
        return sum(len(output.generated_tokens) for output in outputs.values())

    return run


def load_reference(path: Path, device: torch.device, dtype: torch.dtype, random_weights: bool) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    if random_weights:
        with device:
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), dtype=dtype)
    else:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, device_map={"": device})
    return model.eval()


# -- command -------------------------------------------------------------------------------------------


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--model", type=Path, help="Hugging Face folder")
    source.add_argument("--shape", choices=SHAPES, help="a published model's shape with random weights")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--batch", default="1,8", help="batch sizes, separated by commas")
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=0, help="torch threads of all systems; 0: the engine's choice")
    parser.add_argument("--random-weights", action="store_true", help="weights from the configuration alone")
    parser.add_argument("--quantization", default="none", help="of the engine: none, fp8, int4")
    parser.add_argument("--kv-dtype", default="auto", help="of the engine: auto, bf16, fp8_e4m3")
    parser.add_argument("--graph-capture", default="start", help="of the engine: start, idle")
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--structured", default="", help="shares of answers bound to JSON, in percent: 50,100")
    parser.add_argument("--without", default="", help="systems to leave out: generate, generate_batch")
    args = parser.parse_args(arguments)
    if args.shape:
        args.model, args.random_weights = write_shape(args.shape, Path(tempfile.mkdtemp(prefix=args.shape))), True
    return args


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse(arguments)
    batches = [int(size) for size in args.batch.split(",")]
    config = EngineConfig(
        device=args.device,
        dtype=args.dtype,
        max_sequences=max(batches),
        quantization=args.quantization,
        kv_dtype=args.kv_dtype,
        graph_capture=args.graph_capture,
        random_weights=args.random_weights,
        threads=args.threads,
        prefix_cache=False,
        kv_memory_fraction=0.4,  # the reference model computes on the same device
    )
    left_out = set(filter(None, args.without.split(",")))
    runs: dict[str, Callable[[list[Int32Array], int], Measurement]] = {}
    if {"generate", "generate_batch"} - left_out:
        device = resolve_device(args.device)
        reference = load_reference(args.model, device, resolve_dtype(args.dtype, device), args.random_weights)
        runs["generate"] = partial(measure_transformers, "generate", plain_generate(reference))
        runs["generate_batch"] = partial(measure_transformers, "generate_batch", continuous_batching(reference))
    meter = StepMeter("engine") if len(DeviceGroup.parse(args.device).members) > 1 else None
    service = build_engine(
        args.model,
        config,
        lambda message: print(message, flush=True),
        meter=meter,
        open_vocabulary=partial(vocabulary_of, args.model),
    )
    for percent in filter(None, args.structured.split(",")):
        runs[f"structured {percent} %"] = partial(measure_engine, service, structured_percent=int(percent), meter=meter)
    runs = {"tritandem": partial(measure_engine, service, meter=meter), **runs}
    vocab_size = service.spec.vocab_size
    best: dict[tuple[str, int], Measurement] = {}
    for name in left_out:
        runs.pop(name, None)
    for run in runs.values():
        run(random_prompts(1, 32, vocab_size, seed=0), 4)  # warm-up
    for size in batches:
        for repeat in range(args.repeat):
            prompts = random_prompts(size, args.prompt_tokens, vocab_size, seed=size * 100 + repeat)
            for name, run in runs.items():
                measured = show(run(prompts, args.new_tokens))
                best[name, size] = min(best.get((name, size), measured), measured, key=lambda m: m.total_s)
    service.close()
    found = document(list(best.values()), args.device, torch.get_num_threads())
    print(table(found["rows"]))
    print(json.dumps(found))


def show(measurement: Measurement) -> Measurement:
    print(f"{measurement.system} at batch {measurement.batch}: {measurement.total_s:.2f} s", flush=True)
    return measurement


def table(rows: Sequence[dict[str, Any]]) -> str:
    line = "{system:16}{batch:>6}{prefill_tokens_per_s:>15.0f}{decode_step_ms:>16.2f}"
    line += "{output_tokens_per_s:>14.1f}{cpu_s:>9.1f}{launch_skew_us:>9.1f}"
    head = f"{'system':16}{'batch':>6}{'prefill tok/s':>15}{'decode ms/step':>16}"
    head += f"{'output tok/s':>14}{'cpu s':>9}{'skew us':>9}"
    return "\n".join([head, *(line.format(**row) for row in rows)])


def document(measured: Sequence[Measurement], device: str, threads: int) -> dict[str, Any]:
    """Every figure, and by system and batch how many times longer others take, by the clock and in processor time."""
    ours = {m.batch: m for m in measured if m.system == "tritandem"}
    others = [m for m in measured if m.system != "tritandem" and m.batch in ours]
    ratios: dict[str, dict[str, float]] = defaultdict(dict)
    cpu_ratios: dict[str, dict[str, float]] = defaultdict(dict)
    for m in others:
        ratios[m.system][str(m.batch)] = round(m.total_s / ours[m.batch].total_s, 3)
        cpu_ratios[m.system][str(m.batch)] = round(m.cpu_s / ours[m.batch].cpu_s, 3)
    return {
        "device": device,
        "torch": torch.__version__,
        "threads": threads,
        "ratios": ratios,
        "cpu_ratios": cpu_ratios,
        "rows": [m.figures() for m in measured],
    }


if __name__ == "__main__":
    main()
