"""What `tritandem doctor` prints: the verdict in words with its evidence, or the same as one JSON document. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from .machine import MachineDiagnosis
from .signals import Signals
from .verdict import Diagnosis, Finding


def text(diagnosis: Diagnosis, source: str) -> str:
    finding, signals = diagnosis.finding, diagnosis.signals
    lines = [f"{finding.verdict.value}: {finding.because}", "", f"{source}, {signals.seconds:.1f} s"]
    lines += [f"  {name:<26}{value}" for name, value in evidence(signals)]
    if finding.change:
        lines += ["", "what to change", *(f"  - {change}" for change in finding.change)]
    if diagnosis.also:
        lines += ["", "also", *(f"  - {other.verdict.value}: {other.because}" for other in diagnosis.also)]
    return "\n".join(lines)


def document(diagnosis: Diagnosis, source: str) -> dict[str, Any]:
    """Plain JSON values; signals that the server does not tell are null."""
    return {
        "source": source,
        **_finding(diagnosis.finding),
        "exit_code": int(diagnosis.finding.severity),
        "also": [_finding(other) for other in diagnosis.also],
        "signals": asdict(diagnosis.signals),
    }


def machine_text(diagnosis: MachineDiagnosis) -> str:
    lines = [f"{diagnosis.verdict}: {diagnosis.because}", "", f"this machine, {diagnosis.seconds:.1f} s"]
    lines += [f"  {name:<26}{value}" for name, value in machine_evidence(diagnosis)]
    if diagnosis.change:
        lines += ["", "what to change", *(f"  - {change}" for change in diagnosis.change)]
    return "\n".join(lines)


def machine_document(diagnosis: MachineDiagnosis) -> dict[str, Any]:
    """The same keys as `document`, as far as a machine without a server has them."""
    fields = asdict(diagnosis)
    named = {key: fields.pop(key) for key in ("verdict", "because", "change")}
    severity = fields.pop("severity")
    return {
        "source": "this machine",
        **named,
        "severity": severity.name.lower(),
        "exit_code": int(severity),
        "also": [],
        "signals": fields,
    }


def evidence(s: Signals) -> Iterator[tuple[str, str]]:
    """The rows of the table; a signal that the server does not tell has none."""
    yield "requests", f"{s.finished_per_s:.1f}/s finished, {s.running:.0f} running, {s.waiting:.0f} waiting mostly"
    if s.rejected_share:
        yield "refused for lack of room", f"{s.rejected_share:.0%}"
    yield "generated tokens", f"{s.output_tokens_per_s:.0f}/s of finished requests"
    yield from _times(("time to first token", s.ttft_s), ("tokenizing", s.tokenize_s))
    yield "tokenizer's queue", f"{s.tokenizer_queue:.1f} texts on average"
    yield "engine", f"{s.steps_per_s:.1f} steps/s, {s.sequences:.0f} of {s.sequence_limit:.0f} sequences"
    yield from _times(("decode step", s.decode_step_s), ("launch of a step", s.launch_s))
    yield "idle between steps", f"{s.idle_gap_share:.1%} of the time"
    if s.kv_used_share is not None:
        yield "KV blocks in use", f"{s.kv_used_share:.0%} mostly, {s.preemptions_per_s:.2f} preemptions/s"
    if s.prefix_hit_share is not None:
        yield "prefix hits", f"{s.prefix_hit_share:.0%} of prompt tokens"
    yield "sending", f"{s.send_busy:.2f} threads, {s.unsent_characters:.0f} characters unsent mostly"
    if s.tokens_per_response is not None:
        yield "tokens in a response", f"{s.tokens_per_response:.1f}"
    yield "stalled clients", f"{s.stalled_clients:.0f}, {s.unsent_bytes / 1024:.0f} KiB unsent"
    for name, component in sorted(s.components.items()):
        yield f"CPU of {name}", f"{component.busy_cores:.2f} cores, waited for {component.waiting_cores:.2f}"
    if s.server_cores is not None:
        yield "cores of the server", f"{s.server_cores:g}"
    if s.pressure_share is not None:
        yield "CPU pressure", f"{s.pressure_share:.0%} of the time, throttled {s.throttled_share:.0%}"
    if s.gpu_utilisation is not None:
        yield "GPU utilisation", f"{s.gpu_utilisation:.0%}"
    if s.sm_activity is not None:
        yield "multiprocessors busy", f"{s.sm_activity:.0%}"


def machine_evidence(d: MachineDiagnosis) -> Iterator[tuple[str, str]]:
    yield "cores allowed", f"{d.cores}"
    yield "busy", f"{d.busy_share:.0%}"
    if d.pressure_share is not None:
        yield "CPU pressure", f"{d.pressure_share:.0%} of the time"
    if d.throttled_share is not None:
        yield "throttled", f"{d.throttled_share:.0%} of the time"


def _times(*rows: tuple[str, float | None]) -> Iterator[tuple[str, str]]:
    for name, seconds in rows:
        if seconds is not None:
            yield name, f"{seconds * 1e3:.2f} ms on average"


def _finding(finding: Finding) -> dict[str, Any]:
    return {
        "verdict": finding.verdict.value,
        "severity": finding.severity.name.lower(),
        "because": finding.because,
        "change": list(finding.change),
    }
