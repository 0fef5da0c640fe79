"""The run second by second, from raw records. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from .metrics import itl_per_token_ms, percentile, request_metrics_ms
from .stamps import COMPLETED, RequestRecord

_COUNTERS = ("due", "sent", "completed", "failed", "output_tokens", "in_flight")
_LATENCIES = ("ttft_ms_p50", "ttft_ms_p99", "itl_ms_p50", "itl_ms_p99")


def per_second(records: Sequence[RequestRecord], start_ns: int) -> list[dict[str, float]]:
    """Row i covers [i, i + 1) s after the start. Latencies belong to the second in which the request was due;
    `in_flight` is the number of requests due but not ended at the end of the second; NaN: no sample."""
    if not records:
        return []
    seconds = 1 + max((r.end_ns - start_ns) // 1_000_000_000 for r in records)
    rows = [{"second": float(i), **dict.fromkeys(_COUNTERS, 0.0)} for i in range(seconds)]
    ttft_ms: list[list[float]] = [[] for _ in rows]
    itl_ms: list[list[float]] = [[] for _ in rows]

    def second_of(when_ns: int) -> int:
        return min(max(0, (when_ns - start_ns) // 1_000_000_000), seconds - 1)

    for record in records:
        due, ended = second_of(record.intended_ns), second_of(record.end_ns)
        rows[due]["due"] += 1
        rows[second_of(record.sent_ns)]["sent"] += 1
        for at_ns, tokens in zip(record.arrived_ns, record.tokens, strict=True):
            rows[second_of(at_ns)]["output_tokens"] += tokens
        for i in range(due, ended):
            rows[i]["in_flight"] += 1
        if record.outcome == COMPLETED:
            rows[ended]["completed"] += 1
            ttft_ms[due].append(request_metrics_ms(record)["ttft"])
            itl_ms[due] += itl_per_token_ms(record)
        else:
            rows[ended]["failed"] += 1
    for row, ttft, itl in zip(rows, ttft_ms, itl_ms, strict=True):
        for name, values in (("ttft", sorted(ttft)), ("itl", sorted(itl))):
            for p in (50, 99):
                row[f"{name}_ms_p{p}"] = percentile(values, p) if values else float("nan")
    return rows
