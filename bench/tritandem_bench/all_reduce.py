"""What adding up over the ranks of one engine takes: our exchange in captured graphs, launched by one thread, beside
NCCL and torch's symmetric memory where every rank has a GPU of its own. The last line is one JSON document.

    python -m tritandem_bench.all_reduce                              # all GPUs, or two ranks on the only one
    python -m tritandem_bench.all_reduce --devices cuda:0+cuda:1 --rows 1,64 --width 8192
    python -m tritandem_bench.all_reduce --devices cpu+cpu            # ranks as threads
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from tritandem.engine.parallel.interface import STEP_PATIENCE_S, Exchange, Sizes
from tritandem.engine.parallel.registry import make_exchanges, make_ranks
from tritandem.engine.runners.streams import cuda_event, cuda_stream
from tritandem.machine.device import Device
from tritandem_loadtest.metrics import percentile

Row = dict[str, float]
_REPLAYS_AT_ONCE = 256
_GIVE_UP_S = 10.0


def default_devices() -> str:
    count = torch.cuda.device_count()
    if count == 0:
        return "cpu+cpu"
    return "+".join(f"cuda:{index}" for index in range(count)) if count > 1 else "cuda:0+cuda:0"


def torch_devices(text: str) -> list[torch.device]:
    """`cuda:0+cuda:1`. Raises ValueError naming what is wrong."""
    given = [Device.parse(word) for word in text.split("+")]
    if len(given) < 2 or {device.kind for device in given} not in ({"cpu"}, {"cuda"}):
        raise ValueError(f"--devices: given {text!r}, allowed: two and more of cpu, or of cuda:N, joined by +")
    return [torch.device("cuda", device.number) if device.kind == "cuda" else torch.device("cpu") for device in given]


class OnGpus:
    """Ranks with a stream and a graph each, launched one after the other by this thread."""

    def __init__(self, devices: Sequence[torch.device], exchanges: Sequence[Exchange], calls: int) -> None:
        self.devices, self.exchanges, self.calls = devices, exchanges, calls
        self.streams = [cuda_stream(device) for device in devices]
        self._kept: list[Any] = []

    def each(self, call: Callable[[int], object]) -> None:
        for rank, (device, stream) in enumerate(zip(self.devices, self.streams, strict=True)):
            with torch.cuda.device(device), torch.cuda.stream(stream):
                call(rank)

    def finish(self) -> None:
        for device in self.devices:
            torch.cuda.synchronize(device)

    def measure(self, rows: int, width: int, dtype: torch.dtype, replays: int) -> Row:
        """us of a call in a row of many, of a lone graph, and of the host between its first and last launch."""
        graphs = self._graphs(rows, width, dtype)
        begin, end = cuda_event(timing=True), cuda_event(timing=True)
        with torch.cuda.device(self.devices[0]):
            begin.record(self.streams[0])
            for _ in range(replays):
                self.each(lambda rank: graphs[rank].replay())
            end.record(self.streams[0])
        self.finish()
        lone, skews = [], []
        for _ in range(max(100, replays)):
            launched: list[int] = []

            def launch(rank: int, launched: list[int] = launched) -> None:
                graphs[rank].replay()
                launched.append(time.perf_counter_ns())

            began = time.perf_counter_ns()
            self.each(launch)
            self.finish()
            lone.append((time.perf_counter_ns() - began) / 1e3)
            skews.append((launched[-1] - launched[0]) / 1e3)
        return {
            "us": begin.elapsed_time(end) * 1e3 / replays / self.calls,
            "lone_graph_us": statistics.median(lone),
            "host_skew_us_p50": percentile(sorted(skews), 50),
            "host_skew_us_p99": percentile(sorted(skews), 99),
        }

    def endure(self, rows: int, width: int, dtype: torch.dtype, replays: int) -> Row:
        """us of a replay over so many of them. What went wrong is in the exchange's `failed`."""
        graphs = self._graphs(rows, width, dtype)
        began, done = time.perf_counter(), 0
        while done < replays and not self.exchanges[0].failed():
            for _ in range(_REPLAYS_AT_ONCE):
                self.each(lambda rank: graphs[rank].replay())
            self.finish()
            done += _REPLAYS_AT_ONCE
        return {"replays": done, "us": (time.perf_counter() - began) * 1e6 / done}

    def until_missed(self, rows: int, width: int, dtype: torch.dtype) -> dict[str, Any]:
        """The last rank does not come: how long until that is known, and what is said. Breaks the exchange."""
        graphs = self._graphs(rows, width, dtype)
        began = time.perf_counter()
        self.each(lambda rank: graphs[rank].replay() if rank + 1 < len(self.devices) else None)
        while (reason := self.exchanges[0].failed()) is None and time.perf_counter() - began < _GIVE_UP_S:
            time.sleep(0.001)
        known_s = time.perf_counter() - began
        self.finish()
        return {"known_s": known_s, "idle_s": time.perf_counter() - began, "reason": reason}

    def _graphs(self, rows: int, width: int, dtype: torch.dtype) -> list[Any]:
        """A graph a rank, once replayed by all of them; the tensors live as long as it."""
        parts = [torch.zeros((rows, width), dtype=dtype, device=device) for device in self.devices]
        residuals = [torch.zeros_like(part) for part in parts]
        self._patience(0)
        self.each(lambda rank: self.exchanges[rank].add_sum(parts[rank], residuals[rank]))
        self.finish()
        graphs = [self._capture(rank, parts[rank], residuals[rank]) for rank in range(len(self.devices))]
        self.each(lambda rank: graphs[rank].replay())
        self._patience(STEP_PATIENCE_S)
        self._kept.append((parts, residuals))
        return graphs

    def _patience(self, seconds: float) -> None:
        for exchange in self.exchanges:
            exchange.patience(seconds)
        self.finish()

    def _capture(self, rank: int, part: torch.Tensor, residual: torch.Tensor) -> Any:
        with torch.cuda.device(self.devices[rank]):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=self.streams[rank], capture_error_mode="thread_local"):
                for _ in range(self.calls):
                    self.exchanges[rank].add_sum(part, residual)
        return graph


def measure_threads(exchanges: Sequence[Exchange], rows: int, width: int, dtype: torch.dtype, calls: int) -> Row:
    """us of a call of ranks that are threads, and between the first and the last one's start."""
    began, ended = [0.0] * len(exchanges), [0.0] * len(exchanges)

    def work(rank: int) -> None:
        part, residual = torch.zeros((rows, width), dtype=dtype), torch.zeros((rows, width), dtype=dtype)
        exchanges[rank].add_sum(part, residual)
        began[rank] = time.perf_counter()
        for _ in range(calls):
            exchanges[rank].add_sum(part, residual)
        ended[rank] = time.perf_counter()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(len(exchanges))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {"us": (max(ended) - min(began)) * 1e6 / calls, "host_skew_us_p50": (max(began) - min(began)) * 1e6}


# -- NCCL and symmetric memory: a process a rank -------------------------------------------------------


def others_us(devices: Sequence[torch.device], rows: Sequence[int], width: int, calls: int) -> dict[int, Row]:
    """us a call in a graph, bfloat16, by rows; {} where two ranks would share a GPU."""
    if len(set(devices)) < len(devices) or devices[0].type != "cuda":
        return {}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes: Any = torch.multiprocessing
    answers = processes.get_context("spawn").SimpleQueue()
    # NVLink multicast may not be switched on where several tenants share a fabric.
    os.environ |= {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NCCL_NVLS_ENABLE": "0", "MASTER_ADDR": "127.0.0.1"}
    os.environ["MASTER_PORT"] = str(port)
    arguments = (len(devices), [device.index for device in devices], list(rows), width, calls, answers)
    processes.start_processes(_other_rank, arguments, nprocs=len(devices), start_method="spawn")
    found: dict[int, Row] = answers.get()
    return found


def _other_rank(
    rank: int, count: int, indices: list[int], rows: list[int], width: int, calls: int, answers: Any
) -> None:
    import torch.distributed as dist

    torch.cuda.set_device(indices[rank])
    device = torch.device("cuda", indices[rank])
    dist.init_process_group("nccl", rank=rank, world_size=count, device_id=device)
    found: dict[int, Row] = {}
    for height in rows:
        part = torch.zeros((height, width), dtype=torch.bfloat16, device=device)
        found[height] = {"nccl_us": _graph_us(partial(dist.all_reduce, part), calls)}
        with suppress(RuntimeError):  # symmetric memory is not everywhere
            found[height] |= _symmetric(dist, height, width, device, calls)
    if rank == 0:
        answers.put(found)
    dist.barrier()
    dist.destroy_process_group()


def _symmetric(dist: Any, rows: int, width: int, device: torch.device, calls: int) -> Row:
    import torch.distributed._symmetric_memory as memory

    shared = memory.empty(rows, width, device=device, dtype=torch.bfloat16).fill_(0)
    memory.rendezvous(shared, dist.group.WORLD)
    name, ops = dist.group.WORLD.group_name, torch.ops.symm_mem
    return {
        "one_shot_us": _graph_us(lambda: ops.one_shot_all_reduce(shared, "sum", name), calls),
        "two_shot_us": _graph_us(lambda: ops.two_shot_all_reduce_(shared, "sum", name), calls),
    }


def _graph_us(call: Callable[[], object], calls: int, replays: int = 20) -> float:
    import torch.distributed as dist

    for _ in range(2):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    graph.replay()
    torch.cuda.synchronize()
    dist.barrier()
    begin, end = cuda_event(timing=True), cuda_event(timing=True)
    begin.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e3 / replays / calls


# -- program -------------------------------------------------------------------------------------------


def measure(
    devices: Sequence[torch.device], rows: Sequence[int], width: int, calls: int, replays: int, endure: int
) -> dict[str, Any]:
    """`endure`: after that, so many replays of the first number of rows, and then a rank that does not come."""
    on_gpus = devices[0].type == "cuda"
    dtype = torch.bfloat16 if on_gpus else torch.float32
    exchanges = make_exchanges(make_ranks(devices), Sizes(max(rows), width, 1, width, dtype))
    found: dict[int, Row] = {}
    more: dict[str, Any] = {}
    gpus = OnGpus(devices, exchanges, calls) if on_gpus else None
    for height in rows:
        if gpus is not None:
            found[height] = gpus.measure(height, width, dtype, replays)
        else:
            found[height] = measure_threads(exchanges, height, width, dtype, calls)
        if failed := exchanges[0].failed():
            raise SystemExit(f"{height} rows: {failed}")
    if gpus is not None and endure:
        more["endured"] = gpus.endure(rows[0], width, dtype, endure)
        if failed := exchanges[0].failed():
            raise SystemExit(f"{more}: {failed}")
        more["a_rank_stopped"] = gpus.until_missed(rows[0], width, dtype)
    for exchange in exchanges:
        exchange.close()
    for height, row in others_us(devices, rows, width, calls).items():
        found[height] |= row
    return {
        "devices": [str(device) for device in devices],
        "width": width,
        "dtype": str(dtype).removeprefix("torch."),
        "calls_a_graph": calls,
        "rows": {str(height): {name: round(us, 2) for name, us in row.items()} for height, row in found.items()},
        **more,
    }


def table(found: dict[str, Any]) -> str:
    """A line for each kind of figure, a column for each number of rows."""
    rows = found["rows"]
    lines = [f"{'rows':18}" + "".join(f"{height:>12}" for height in rows)]
    for name in dict.fromkeys(name for row in rows.values() for name in row):
        lines.append(f"{name:18}" + "".join(f"{row.get(name, float('nan')):12.2f}" for row in rows.values()))
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", default=default_devices(), help="of the ranks, joined by + (default: %(default)s)")
    parser.add_argument("--rows", default="1,8,64,256,2048")
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--calls", type=int, default=64, help="of one graph")
    parser.add_argument("--replays", type=int, default=50)
    parser.add_argument("--endure", type=int, default=0, help="so many replays more, and then a rank that stops")
    args = parser.parse_args(arguments)
    try:
        devices = torch_devices(args.devices)
    except ValueError as error:
        parser.error(str(error))
    # Streams that share a queue to their GPU would wait for each other. Read when CUDA starts.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    rows = [int(count) for count in args.rows.split(",")]
    found = measure(devices, rows, args.width, args.calls, args.replays, args.endure)
    print(table(found))
    for name in ("endured", "a_rank_stopped"):
        if name in found:
            print(name, found[name])
    print(json.dumps(found))


if __name__ == "__main__":
    main()
