"""What telemetry costs: the engine alone with and without its meter, and the CPU of a whole server by period.

    python loadtest/benchmarks/telemetry_overhead.py engine --model DIR --streams 64 --random-weights
    python loadtest/benchmarks/telemetry_overhead.py server --model DIR --streams 256

`engine`: one engine in this process, decoding; its meter and a publisher (to nowhere) are on and off in turns, and the
overhead is the median over the rounds of the ratio within each. Two engines would differ by more than what is measured.

`server`: the real Triton with tokenizer and scheduler, and an engine that only counts, so that nothing is measured but
what a token passes. Three servers in turns: without metrics, with the default period, and with one so short that the
cost of publishing stands out of the noise; the last one's cost, divided by how much oftener it publishes, is what
the default costs. CPU time is that of tritonserver and its model processes. Beside it stands what the publishing
threads say of themselves, which leaves out Triton's side of each message. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from tritandem.config import EngineConfig, TelemetryConfig
from tritandem.telemetry.step_meter import StepMeter

BENCHMARKS = Path(__file__).resolve().parent
DEFAULT_PERIOD_S = TelemetryConfig().metrics_period_s

# -- engine --------------------------------------------------------------------------------------------


@contextmanager
def metered(service: Any, meter: StepMeter) -> Iterator[None]:
    """The engine notes its steps and a publisher carries them away, as in a server but for the process messages."""
    from tritandem.telemetry.gpu_report import GpuReport
    from tritandem.telemetry.process_report import ProcessReport
    from tritandem.telemetry.publisher import DiscardingSink, Publisher
    from tritandem.telemetry.registry import Registry
    from tritandem.telemetry.step_report import StepReport

    registry = Registry()
    reports: list[Callable[[], None]] = [
        StepReport(registry, meter, launches=True),
        ProcessReport(registry, "engine", "engine"),
    ]
    if meter.gpu_uuid:
        reports.append(GpuReport(registry, "engine", meter.gpu_uuid))
    publisher = Publisher(registry, DiscardingSink(), DEFAULT_PERIOD_S, reports)
    use_meter(service, meter)
    publisher.start()
    try:
        yield
    finally:
        use_meter(service, None)
        publisher.close()


def use_meter(service: Any, meter: StepMeter | None) -> None:
    """Switch the meter of an engine that runs nothing. A server chooses once, at its start."""
    service._core._meter = service._core.runner._meter = meter


def note_ns() -> float:
    """What the notes of one step cost the host, without a device."""
    meter, count = StepMeter("engine"), 20_000
    times = []
    for _ in range(5):
        begun_ns = time.perf_counter_ns()
        for _ in range(count):
            launched_ns = time.monotonic_ns()
            meter.launched(time.monotonic_ns() - launched_ns, False)
            meter.decode_step.note(350_000)
            meter.idle_gap.note(3_000)
        times.append((time.perf_counter_ns() - begun_ns) / count)
    return median(times)


def measure_engine_overhead(args: argparse.Namespace) -> dict[str, Any]:
    from engine import measure_engine, random_prompts
    from tritandem.engine.service import build_engine

    config = EngineConfig(
        device=args.device, max_sequences=args.streams, random_weights=args.random_weights, prefix_cache=False
    )
    meter = StepMeter("engine")
    service = build_engine(args.model, config, lambda message: print(message, flush=True), meter)
    use_meter(service, None)
    vocab_size = service.spec.vocab_size
    prompts = random_prompts(args.streams, args.prompt_tokens, vocab_size, seed=1)
    measure_engine(service, prompts, args.tokens)  # warm-up
    rounds: list[tuple[float, float]] = []
    for number in range(args.rounds):
        step_ms: dict[bool, float] = {}
        for on in (True, False) if number % 2 else (False, True):
            if on:
                with metered(service, meter):
                    step_ms[on] = measure_engine(service, prompts, args.tokens).decode_step_ms
            else:
                step_ms[on] = measure_engine(service, prompts, args.tokens).decode_step_ms
        rounds.append((step_ms[True], step_ms[False]))
        print(f"round {number}: {step_ms[True]:.4f} ms a step with, {step_ms[False]:.4f} without", flush=True)
    steps = sum(meter.decode_step.totals()[0])
    service.close()
    ratios = sorted(on / off for on, off in rounds)
    return {
        "device": service.spec.device,
        "streams": args.streams,
        "tokens": args.tokens,
        "rounds": args.rounds,
        "metered_steps": steps,
        "note_ns_per_step": round(note_ns()),
        "step_ms_on": round(median(on for on, _ in rounds), 4),
        "step_ms_off": round(median(off for _, off in rounds), 4),
        "ratio_quartiles": [round(ratios[len(ratios) // 4], 4), round(ratios[-1 - len(ratios) // 4], 4)],
        "overhead_percent": round((median(ratios) - 1) * 100, 3),
    }


# -- server --------------------------------------------------------------------------------------------

ENGINE = """
class TritonPythonModel:
    def initialize(self, args):
        import sys
        sys.path.insert(0, {benchmarks!r})
        from free_running_engine import FreeRunningService
        from tritandem.config import config_from_environment
        from tritandem.telemetry.step_meter import StepMeter
        from tritandem.triton_io.plugs.engine import EnginePlug
        from tritandem.triton_io.hops.inner_key import load_inner_key
        from tritandem.triton_io.reports.publishing import engine_publisher

        telemetry, meter = config_from_environment().telemetry, StepMeter(args["model_name"])
        publisher = engine_publisher(telemetry, meter)
        publisher.start()
        service = FreeRunningService({step_s!r}, meter=meter if telemetry.metrics else None)
        self._plug = EnginePlug(service, 1.0, load_inner_key(), publisher)

    def execute(self, requests):
        self._plug.execute(requests)

    def finalize(self):
        self._plug.close()
"""


def cpu_s_of(server_pid: int) -> float:
    """CPU time of tritonserver and its model processes."""
    import psutil

    server = psutil.Process(server_pid)
    times = [process.cpu_times() for process in (server, *server.children(recursive=True))]
    return sum(time_.user + time_.system for time_ in times)


def measure_server(args: argparse.Namespace, folder: Path, period_s: float) -> dict[str, float]:
    """Cores that the server takes at a fixed rate of tokens; `period_s` 0: without metrics."""
    from delivery import repository
    from tritandem.cli.doctor.sample import Pair, fetch
    from tritandem.server import TritonServer
    from tritandem.telemetry.families import TELEMETRY_CPU
    from tritandem_loadtest import RunConfig, run

    settings = folder / "telemetry.toml"
    settings.write_text(f"[telemetry]\nmetrics = {str(bool(period_s)).lower()}\nmetrics_period_s = {period_s or 1.0}\n")
    models = folder / "model_repository"
    if not models.exists():
        repository(folder, args.step_ms / 1000)
    (models / "engine" / "1" / "model.py").write_text(
        ENGINE.format(benchmarks=str(BENCHMARKS), step_s=args.step_ms / 1000)
    )
    ports = {"http_port": args.port, "grpc_port": args.port + 1, "metrics_port": args.port + 2}
    load = RunConfig(
        model="ensemble",
        arrival="closed",
        users=args.streams,
        workload="words",
        prompt_words="20",
        output_tokens=str(args.tokens),
        ignore_eos=True,
        duration_s=args.seconds + 6.0,
        warmup_s=3.0,
    )
    with TritonServer(args.model, repository=models, engine_config=settings, **ports) as server:
        load = dataclasses.replace(load, url=server.grpc_url)
        found: dict[str, float] = {}

        def watch() -> None:
            time.sleep(4.0)  # the streams have started
            before = fetch(server.metrics_url) if period_s else None
            begun_s, begun_cpu_s = time.monotonic(), cpu_s_of(server.pid)
            time.sleep(args.seconds)
            found["cores"] = (cpu_s_of(server.pid) - begun_cpu_s) / (time.monotonic() - begun_s)
            if before is not None:
                found["threads"] = Pair(before, fetch(server.metrics_url)).rate(TELEMETRY_CPU.name)

        watcher = threading.Thread(target=watch)
        watcher.start()
        summary = run(load).summary
        watcher.join()
    if summary["failed"]:
        raise RuntimeError(f"{summary['failed']} requests failed")
    return {**found, "tokens_per_s": summary["output_tokens_per_s"]}


def measure_server_overhead(args: argparse.Namespace) -> dict[str, Any]:
    periods = {"off": 0.0, "default": DEFAULT_PERIOD_S, "short": args.short_period_s}
    measured: dict[str, list[dict[str, float]]] = {name: [] for name in periods}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(args.rounds):
            for name in sorted(periods, reverse=bool(number % 2)):
                measured[name].append(measure_server(args, Path(folder), periods[name]))
                print(f"round {number}, {name}: {measured[name][-1]}", flush=True)
    cores = {name: median(row["cores"] for row in rows) for name, rows in measured.items()}
    oftener = DEFAULT_PERIOD_S / args.short_period_s
    return {
        "machine_cores": len(os.sched_getaffinity(0)),
        "streams": args.streams,
        "tokens_per_s": {name: round(median(r["tokens_per_s"] for r in rows)) for name, rows in measured.items()},
        "cores": {name: round(value, 4) for name, value in cores.items()},
        "short_period_s": args.short_period_s,
        "publishing_percent_of_a_core": round((cores["short"] - cores["off"]) / oftener * 100, 3),
        "threads_percent_of_a_core": round(median(row["threads"] for row in measured["default"]) * 100, 3),
    }


# -- command -------------------------------------------------------------------------------------------


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    engine = commands.add_parser("engine", help="hooks in the engine's step loop")
    engine.add_argument("--device", default="auto")
    engine.add_argument("--streams", type=int, default=64)
    engine.add_argument("--prompt-tokens", type=int, default=64)
    engine.add_argument("--tokens", type=int, default=512, help="of each stream and run")
    engine.add_argument("--rounds", type=int, default=11)
    engine.add_argument("--random-weights", action="store_true", help="weights from the configuration alone")
    engine.set_defaults(run=measure_engine_overhead)
    server = commands.add_parser("server", help="CPU of the whole server")
    server.add_argument("--streams", type=int, default=256)
    server.add_argument("--tokens", type=int, default=512)
    server.add_argument("--step-ms", type=float, default=100.0, help="time in which the engine makes a token a stream")
    server.add_argument("--seconds", type=float, default=10.0)
    server.add_argument("--rounds", type=int, default=3)
    server.add_argument("--short-period-s", type=float, default=0.1)
    server.add_argument("--port", type=int, default=18090, help="first of three free ports")
    server.set_defaults(run=measure_server_overhead)
    for command in (engine, server):
        command.add_argument("--model", type=Path, required=True, help="Hugging Face folder")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse(arguments)
    print(json.dumps(args.run(args)))


if __name__ == "__main__":
    main()
