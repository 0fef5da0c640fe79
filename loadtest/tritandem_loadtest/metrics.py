"""What the stamps mean: every figure of a report, computed from raw records and nothing else. Pure.

Latencies count from the intended send time, so that a stalled server cannot hide behind requests that were not sent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from .config import RunConfig
from .dialects import WHOLE
from .stamps import COMPLETED, ProcessRecord, RequestRecord

PERCENTILES = (50, 90, 95, 99)
COLUMNS = ("mean", *(f"p{p}" for p in PERCENTILES), "max")  # of tables
MAX_MISSED_RATE = 0.01
MAX_CPU_PERCENT = 90.0
METRICS = {
    "ttft": "time to first token",
    "second_token": "first to second token",
    "itl": "inter-token latency",
    "itl_chunk": "inter-chunk latency",
    "pause": "longest pause of a stream",
    "tpot": "time per output token",
    "e2e": "end to end",
}


def request_metrics_ms(record: RequestRecord) -> dict[str, float]:
    """The figures that one completed request has once. Missing keys: the request was too short for them.

    `ttft` and `e2e` count from the intended send time; `second_token` is the gap from the first token to the second
    (0 when both came in one response); `pause` is the longest gap between two responses, which a mean hides;
    `tpot` = (last - first) / tokens after the first response.
    """
    first_ns, last_ns = record.arrived_ns[0], record.arrived_ns[-1]
    metrics = {
        "ttft": (first_ns - record.intended_ns) / 1e6,
        "e2e": (record.end_ns - record.intended_ns) / 1e6,
    }
    if record.output_tokens > 1:
        second_ns = first_ns if record.tokens[0] > 1 else record.arrived_ns[1]
        metrics["second_token"] = (second_ns - first_ns) / 1e6
    if len(record.tokens) > 1:
        metrics["pause"] = max(itl_per_chunk_ms(record))
        metrics["tpot"] = (last_ns - first_ns) / 1e6 / (record.output_tokens - record.tokens[0])
    return metrics


def itl_per_chunk_ms(record: RequestRecord) -> list[float]:
    """Gaps between responses that carry tokens, n - 1 of them."""
    return [(b - a) / 1e6 for a, b in zip(record.arrived_ns, record.arrived_ns[1:], strict=False)]


def itl_per_token_ms(record: RequestRecord) -> list[float]:
    """A gap before a response of k tokens counts as k gaps of a k-th: chunking cannot improve it."""
    gaps = zip(itl_per_chunk_ms(record), record.tokens[1:], strict=True)
    return [gap / tokens for gap, tokens in gaps for _ in range(tokens)]


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Nearest rank on sorted values: always a value that was measured."""
    rank = max(1, -(-len(ordered) * percent // 100))
    return ordered[int(rank) - 1]


def spread(values: Iterable[float]) -> dict[str, float]:
    """How many there are, mean, p50 ... p99 and max of a set of values; empty for an empty set."""
    ordered = sorted(values)
    if not ordered:
        return {}
    figures = {"samples": len(ordered), "mean": sum(ordered) / len(ordered)}
    figures.update({f"p{p}": percentile(ordered, p) for p in PERCENTILES})
    figures["max"] = ordered[-1]
    return {name: round(value, 3) for name, value in figures.items()}


def samples_ms(completed: Sequence[RequestRecord]) -> dict[str, list[float]]:
    """Every sample of every metric, in milliseconds."""
    samples: dict[str, list[float]] = {name: [] for name in METRICS}
    for record in completed:
        for name, value in request_metrics_ms(record).items():
            samples[name].append(value)
        samples["itl"] += itl_per_token_ms(record)
        samples["itl_chunk"] += itl_per_chunk_ms(record)
    return samples


def within_slo(record: RequestRecord, slo: dict[str, float]) -> bool:
    """A request meets a limit on gaps when its mean gap does; a metric it is too short for is met."""
    if record.outcome != COMPLETED:
        return False
    figures = request_metrics_ms(record)
    for name, gaps in (("itl", itl_per_token_ms(record)), ("itl_chunk", itl_per_chunk_ms(record))):
        if gaps:
            figures[name] = sum(gaps) / len(gaps)
    return all(figures.get(name, 0.0) <= limit_ms for name, limit_ms in slo.items())


def summarise(
    config: RunConfig, records: Sequence[RequestRecord], processes: Sequence[ProcessRecord]
) -> dict[str, Any]:
    """The flat dictionary that becomes the JSON line: counts, rates, `<metric>_ms_<statistic>`, SLO, validity."""
    start_ns = min(p.start_ns for p in processes)
    from_ns = start_ns + round(config.warmup_s * 1e9)
    counted = [r for r in records if r.intended_ns >= from_ns]
    completed = [r for r in counted if r.outcome == COMPLETED]
    unsent = sum(p.unsent for p in processes)
    late_ms = [ms for r in counted if (ms := (r.sent_ns - r.intended_ns) / 1e6) > config.late_after_ms]
    missed_rate = (len(late_ms) + unsent) / max(1, len(counted) + unsent)
    samples = samples_ms(completed)

    summary: dict[str, Any] = {
        "url": config.url,
        "dialect": config.dialect,
        "protocol": config.protocol,
        "arrival": config.arrival,
        "workload": config.workload,
        "duration_s": config.duration_s,
        "requests": len(counted) + unsent,
        "completed": len(completed),
        "failed": len(counted) - len(completed) + unsent,
        "failures": failures(counted, unsent),
        **_rates(config, records, counted, from_ns),
        "missed_schedule_rate": round(missed_rate, 5),
        "late_ms_p99": spread((r.sent_ns - r.intended_ns) / 1e6 for r in counted).get("p99"),
        "generator_cpu_percent_max": max((c for p in processes for c in p.cpu_percent), default=0.0),
    }
    for name, values in samples.items():
        figures = spread(values)
        summary[f"{name}_samples"] = figures.pop("samples", 0)
        summary.update({f"{name}_ms_{statistic}": value for statistic, value in figures.items()})
    summary["server_ms"] = server_stages(completed)
    summary["slo"] = slo_results(config, samples)
    good = sum(1 for r in counted if within_slo(r, config.slo))
    window_s = config.duration_s - config.warmup_s
    summary["goodput_rps"] = round(good / window_s, 3)
    summary["goodput_fraction"] = round(good / max(1, len(counted) + unsent), 4)
    summary["slo_met"] = bool(completed) and all(result["met"] for result in summary["slo"].values())
    summary["reasons"] = invalid_reasons(late_ms, unsent, len(counted), summary["generator_cpu_percent_max"])
    summary["valid"] = not summary["reasons"]
    return summary


def _rates(
    config: RunConfig, records: Sequence[RequestRecord], counted: Sequence[RequestRecord], from_ns: int
) -> dict[str, Any]:
    """Rates over the schedule's own window [from, from + duration); sending that overran it stretches the window.

    Tokens count by when they arrived, so those of requests sent during the warm-up belong to the window too.
    """
    to_ns = from_ns + round((config.duration_s - config.warmup_s) * 1e9)
    sent_to_ns = max([to_ns, *(r.sent_ns for r in counted)])
    ended = [r for r in records if r.outcome == COMPLETED]
    completed = [r for r in counted if r.outcome == COMPLETED]
    output_tokens = sum(
        tokens for r in ended for at, tokens in zip(r.arrived_ns, r.tokens, strict=True) if from_ns <= at < to_ns
    )
    input_tokens = sum(r.input_tokens for r in ended if from_ns <= r.arrived_ns[0] < to_ns)
    window_s = (to_ns - from_ns) / 1e9
    target = None if config.arrival in ("closed", "trace", "ramp", "steps") else config.rps
    return {
        "target_rps": target,
        "achieved_rps": round(len(counted) / ((sent_to_ns - from_ns) / 1e9), 3),
        "completed_rps": round(sum(1 for r in ended if from_ns <= r.end_ns < to_ns) / window_s, 3),
        "output_tokens": sum(r.output_tokens for r in completed),
        "input_tokens": sum(r.input_tokens for r in completed),
        "cached_tokens": sum(r.cached_tokens for r in completed),
        "responses": sum(len(r.tokens) for r in completed),
        "output_tokens_per_s": round(output_tokens / window_s, 2),
        "total_tokens_per_s": round((output_tokens + input_tokens) / window_s, 2),
    }


def failures(counted: Sequence[RequestRecord], unsent: int) -> dict[str, int]:
    """Outcome word -> number of requests that ended with it, COMPLETED left out."""
    by_outcome = Counter(r.outcome for r in counted if r.outcome != COMPLETED)
    if unsent:
        by_outcome["UNSENT"] = unsent
    return dict(by_outcome.most_common())


def server_stages(completed: Sequence[RequestRecord]) -> dict[str, dict[str, float]]:
    """The server's own stages in ms, to be read beside the client's figures; `outside` is what its model processes
    know nothing of: Triton's own queues, the connection, the client."""
    stages: dict[str, list[float]] = {}
    for record in completed:
        for stage, value_ms in record.server.items():
            stages.setdefault(stage, []).append(value_ms)
        if WHOLE in record.server:
            outside_ms = (record.end_ns - record.sent_ns) / 1e6 - record.server[WHOLE]
            stages.setdefault("outside", []).append(outside_ms)
    return {stage: spread(values) for stage, values in stages.items()}


def latencies(summary: dict[str, Any]) -> Iterator[tuple[str, dict[str, float]]]:
    """(title, figures by column) of everything that was measured in milliseconds, the server's own stages last."""
    for name, title in METRICS.items():
        if count := summary[f"{name}_samples"]:
            yield title, {"samples": count, **{column: summary[f"{name}_ms_{column}"] for column in COLUMNS}}
    for stage, figures in summary["server_ms"].items():
        yield f"server: {stage}", figures


def slo_results(config: RunConfig, samples: dict[str, list[float]]) -> dict[str, dict[str, Any]]:
    """For each limit: the value at `slo_percentile` and whether it holds. Without samples it does not."""
    results: dict[str, dict[str, Any]] = {}
    for name, limit_ms in config.slo.items():
        value = round(percentile(sorted(samples[name]), config.slo_percentile), 3) if samples[name] else None
        met = value is not None and value <= limit_ms
        results[name] = {"limit_ms": limit_ms, "percentile": config.slo_percentile, "value_ms": value, "met": met}
    return results


def invalid_reasons(late_ms: Sequence[float], unsent: int, counted: int, cpu_percent_max: float) -> list[str]:
    """Why the figures must not be trusted as an open-loop measurement; empty when they may be.

    `late_ms`: of the requests that were sent too late, how much. One of them is let pass whatever share it is: a run of
    fewer than 100 requests cannot resolve the limit, and a late request's latency counts from when it was due, so that
    it makes the figures worse and never better. A request that was never sent is not in them at all: none is let pass.
    """
    if counted == 0:
        return ["no request was sent"]
    missed_rate = (len(late_ms) + unsent) / (counted + unsent)
    if missed_rate <= MAX_MISSED_RATE or (len(late_ms) == 1 and not unsent):
        return []
    share = f"{missed_rate:.1%} of the schedule was missed (limit {MAX_MISSED_RATE:.0%})"
    if late_ms:
        share += f", the latest request by {max(late_ms):.0f} ms"
    if cpu_percent_max > MAX_CPU_PERCENT:
        return [f"{share}: the load generator's CPU reached {cpu_percent_max:.0f} %; use more processes"]
    if unsent:
        return [f"{share}: too few users, {unsent} requests were never sent"]
    return [f"{share}: too few users were free, or the host had no CPU left for the load generator"]
