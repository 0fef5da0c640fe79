"""When requests are due: one generator of offsets (seconds from the start) for each arrival process.

Pure and deterministic by seed. Knows nothing about what is sent or how; a slow server cannot move an arrival.
"""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path

from .config import LoadTestError, RunConfig


@dataclass(frozen=True, slots=True)
class Arrival:
    """Request `index` is due `at_s` seconds after the start; a trace may also fix its lengths in tokens."""

    index: int
    at_s: float
    prompt_tokens: int | None = None
    output_tokens: int | None = None


def schedule(config: RunConfig, shard: int = 0, shards: int = 1) -> Iterator[Arrival]:
    """The arrivals of one of `shards` processes, in order of time. All shards together are the whole schedule.

    A closed loop yields arrivals that are due at once, without end; the caller stops it.
    """
    arrivals = _whole_schedule(config)
    if config.max_requests:
        arrivals = islice(arrivals, config.max_requests)
    return (a for a in arrivals if a.index % shards == shard)


def _whole_schedule(config: RunConfig) -> Iterator[Arrival]:
    if config.arrival == "closed":
        return (Arrival(i, 0.0) for i in count())
    if config.arrival == "trace":
        return (a for a in read_trace(Path(config.trace)) if a.at_s < config.duration_s)
    return (Arrival(i, at_s) for i, at_s in enumerate(_offsets(config)))


def _offsets(config: RunConfig) -> Iterator[float]:
    rng = random.Random(f"arrivals {config.seed}")
    if config.arrival == "constant":
        return constant(config.rps, config.duration_s)
    if config.arrival == "poisson":
        return gamma(config.rps, 1.0, config.duration_s, rng)
    if config.arrival == "gamma":
        return gamma(config.rps, config.burstiness, config.duration_s, rng)
    if config.arrival == "ramp":
        return ramp(config.rps, config.ramp_to_rps, config.duration_s)
    return steps(config.steps_rps, config.duration_s)


def constant(rps: float, duration_s: float) -> Iterator[float]:
    """Equal gaps, the first request at 0. Computed by multiplication, so that the rate does not drift."""
    return (i / rps for i in range(_count_below(rps, duration_s)))


def gamma(rps: float, cv: float, duration_s: float, rng: random.Random) -> Iterator[float]:
    """Gamma-distributed gaps with mean 1/rps and coefficient of variation `cv` (1: Poisson; above: bursts)."""
    shape, scale = 1.0 / cv**2, cv**2 / rps
    at_s = rng.gammavariate(shape, scale)
    while at_s < duration_s:
        yield at_s
        at_s += rng.gammavariate(shape, scale)


def ramp(from_rps: float, to_rps: float, duration_s: float) -> Iterator[float]:
    """The rate changes linearly; request i is due when the integral of the rate reaches i."""
    slope = (to_rps - from_rps) / duration_s
    for i in count():
        if slope == 0.0:
            at_s = i / from_rps
        else:
            under_root = from_rps**2 + 2.0 * slope * i
            if under_root < 0.0:
                return
            at_s = (under_root**0.5 - from_rps) / slope
        if at_s >= duration_s:
            return
        yield at_s


def steps(rates_rps: tuple[float, ...], duration_s: float) -> Iterator[float]:
    """Each rate for an equal part of the duration; 0 is a pause."""
    part_s = duration_s / len(rates_rps)
    for i, rps in enumerate(rates_rps):
        yield from (i * part_s + at_s for at_s in (constant(rps, part_s) if rps > 0 else ()))


def read_trace(path: Path) -> list[Arrival]:
    """A recorded schedule: CSV with a header or JSONL, keys `time` (s), `prompt_tokens`, `output_tokens`.

    Times are shifted so that the first is 0. Raises LoadTestError with the line number.
    """
    rows: list[tuple[float, int | None, int | None]] = []
    with path.open(newline="", encoding="utf-8") as lines:
        records = (
            (json.loads(line) for line in lines if line.strip()) if path.suffix != ".csv" else csv.DictReader(lines)
        )
        try:
            for record in records:
                lengths = (record.get("prompt_tokens"), record.get("output_tokens"))
                prompt_tokens, output_tokens = (int(n) if n not in (None, "") else None for n in lengths)
                rows.append((float(record["time"]), prompt_tokens, output_tokens))
        except (KeyError, ValueError, AttributeError) as error:
            raise LoadTestError(f"trace {path}: record {len(rows) + 1}: {error!r}") from None
    rows.sort(key=lambda row: row[0])
    return [Arrival(i, at_s - rows[0][0], p, o) for i, (at_s, p, o) in enumerate(rows)]


def _count_below(rps: float, duration_s: float) -> int:
    """How many of 0, 1/rps, 2/rps ... are below `duration_s`, safe against rounding."""
    n = int(rps * duration_s)
    return n + 1 if n / rps < duration_s else n
