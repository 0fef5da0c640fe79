"""How a step reaches another rank: its packed words to a process over a Unix socket or through shared memory, or to a
runner in the same process, which one thread launches on every device. No device; the last line is one JSON document.

    python -m tritandem_bench.handoff --rows 1,64,256

Times are from before the words are handed over to when the receiver has them whole; for the same process, to when the
words lie in the second runner's staging slot.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import socket
import statistics
import struct
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tritandem.contracts.arrays import Int32Array
from tritandem.contracts.fields import SamplingParams
from tritandem.engine.rows.words import pack_step
from tritandem.engine.step import PrefillChunk, SlotInit, StepPlan
from tritandem_loadtest.metrics import percentile

KINDS = ("steady", "joined", "prefill")
_HEAD = struct.Struct("<qq")  # number of the step, words
_SLOT_WORDS = 1 << 18
_CONTEXT = multiprocessing.get_context("spawn")


def step_words(kind: str, rows: int) -> list[Int32Array]:
    """What the engine packs for a step over `rows` rows: steady: nothing but that it goes on; joined: a row is new and
    another gone; prefill: a chunk of 2,048 tokens beside them."""
    ids = np.arange(2048, dtype=np.int32)
    init = SlotInit(rows, ids[:300], SamplingParams(temperature=0.7, top_p=0.9), (2,), (), ids[:0])
    blocks = np.array([(rows, index, 100 + index) for index in range(20)], np.int32)
    slots = list(range(rows))
    plans = {
        "steady": StepPlan(1, decode_slots=slots),
        "joined": StepPlan(1, (0,), (init,), blocks, (), [PrefillChunk(rows, 0, ids[:300], True)], slots),
        "prefill": StepPlan(1, (), (init,), blocks, (), [PrefillChunk(rows, 0, ids, False)], slots),
    }
    packed = pack_step(plans[kind], kind == "joined", 131_072)
    return packed.arrays if packed is not None else []


def over_socket(arrays: Sequence[Int32Array], steps: int, gap_s: float) -> list[float]:
    """us, one way, of each step."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    body = sum(map(len, arrays))

    def send(step: int) -> None:
        ours.sendall(b"".join((_HEAD.pack(step, body), *(array.tobytes() for array in arrays))))

    with ours, theirs:
        return _one_way(_receive_socket, theirs, send, steps, gap_s)


def _receive_socket(end: socket.socket, arrived: Any, steps: int) -> None:
    words, head, times = bytearray(_SLOT_WORDS * 4), bytearray(_HEAD.size), _int64s(arrived)
    for step in range(steps):
        _fill(end, memoryview(head))
        _fill(end, memoryview(words)[: 4 * _HEAD.unpack(head)[1]])
        times[step] = time.monotonic_ns()


def _fill(end: socket.socket, view: memoryview) -> None:
    while view:
        view = view[end.recv_into(view) :]


def over_memory(arrays: Sequence[Int32Array], steps: int, gap_s: float) -> list[float]:
    """us, one way: the receiver looks at a number in shared memory all the time."""
    shared = _CONTEXT.RawArray("b", _HEAD.size + _SLOT_WORDS * 4)
    head = _int64s(shared)

    def send(step: int) -> None:
        _write(arrays, shared)
        head[0] = step + 1  # stores of x86 are seen in their order

    return _one_way(_receive_memory, shared, send, steps, gap_s)


def _write(arrays: Sequence[Int32Array], shared: Any) -> None:
    count = sum(map(len, arrays))
    if count:
        np.concatenate(arrays, out=_words(shared)[:count])
    _int64s(shared)[1] = count


def _receive_memory(shared: Any, arrived: Any, steps: int) -> None:
    head, slot, times = _int64s(shared), _words(shared), _int64s(arrived)
    words = np.empty(_SLOT_WORDS, np.int32)
    for step in range(steps):
        while head[0] <= step:
            pass
        count = int(head[1])
        words[:count] = slot[:count]
        times[step] = time.monotonic_ns()


def _int64s(shared: Any) -> NDArray[np.int64]:
    return np.frombuffer(shared, np.int64, memoryview(shared).nbytes // 8)


def _words(shared: Any) -> Int32Array:
    return np.frombuffer(shared, np.int32, _SLOT_WORDS, _HEAD.size)


def _one_way(
    receive: Callable[[Any, Any, int], None],
    end: Any,
    send: Callable[[int], None],
    steps: int,
    gap_s: float,
) -> list[float]:
    """Steps come every `gap_s`, as a device's do; each is handed over after the one before it has arrived."""
    arrived = _CONTEXT.RawArray("q", steps)
    times = _int64s(arrived)
    receiver = _CONTEXT.Process(target=receive, args=(end, arrived, steps))
    receiver.start()
    sent = []
    for step in range(steps):
        until = time.monotonic() + gap_s
        while time.monotonic() < until or (step and not times[step - 1]):
            time.sleep(0)
        sent.append(time.monotonic_ns())
        send(step)
    receiver.join()
    took = [(int(there) - began) / 1e3 for there, began in zip(times, sent, strict=True)]
    return took[1:]  # the first one waited for the receiver's start


def in_process(arrays: Sequence[Int32Array], steps: int, gap_s: float) -> list[float]:
    """us: the same words into a second runner's slot, by the thread that packed them."""
    slot, took = np.empty(_SLOT_WORDS, np.int32), []
    for _ in range(steps):
        until = time.monotonic() + gap_s
        while time.monotonic() < until:
            time.sleep(0)
        began = time.monotonic_ns()
        if arrays:
            np.concatenate(arrays, out=slot[: sum(map(len, arrays))])
        took.append((time.monotonic_ns() - began) / 1e3)
    return took


WAYS = {"same process": in_process, "shared memory": over_memory, "unix socket": over_socket}


def measure(rows: Sequence[int], steps: int, gap_s: float) -> list[dict[str, Any]]:
    found = []
    for count in rows:
        for kind in KINDS:
            arrays = step_words(kind, count)
            row: dict[str, Any] = {"rows": count, "step": kind, "bytes": 4 * sum(map(len, arrays))}
            for name, way in WAYS.items():
                took = way(arrays, steps, gap_s)
                row[name] = {
                    "p50_us": round(statistics.median(took), 1),
                    "p99_us": round(percentile(sorted(took), 99), 1),
                }
            found.append(row)
    return found


def table(found: Sequence[dict[str, Any]]) -> str:
    lines = [f"{'rows':>5} {'step':8} {'bytes':>7}" + "".join(f"{name + ' p50/p99 us':>28}" for name in WAYS)]
    for row in found:
        figures = (f"{row[name]['p50_us']:.1f} / {row[name]['p99_us']:.1f}" for name in WAYS)
        lines.append(
            f"{row['rows']:5} {row['step']:8} {row['bytes']:7}" + "".join(f"{figure:>28}" for figure in figures)
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,64,256")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--gap-us", type=float, default=500.0, help="between steps, in which the receiver waits")
    args = parser.parse_args(arguments)
    found = measure([int(count) for count in args.rows.split(",")], args.steps, args.gap_us / 1e6)
    print(table(found))
    print(json.dumps({"steps": args.steps, "gap_us": args.gap_us, "found": found}))


if __name__ == "__main__":
    main()
