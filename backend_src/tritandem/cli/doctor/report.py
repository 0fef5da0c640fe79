"""What `tritandem doctor` prints: the verdict in words with its evidence, or the same as one JSON document. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from .machine import MachineSignals
from .signals import Signals
from .verdict import Diagnosis, Finding


def text(diagnosis: Diagnosis, source: str) -> str:
    finding, signals = diagnosis.finding, diagnosis.signals
    rows = machine_evidence(signals) if isinstance(signals, MachineSignals) else evidence(signals)
    lines = [f"{finding.verdict.value}: {finding.because}", "", f"{source}, {signals.seconds:.1f} s"]
    lines += [f"  {name:<26}{value}" for name, value in rows if value is not None]
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


def evidence(s: Signals) -> Iterable[tuple[str, str | None]]:
    """The rows of the table; None: the server does not tell."""
    return (
        ("requests", f"{s.finished_per_s:.1f}/s finished, {s.running:.0f} running, {s.waiting:.0f} waiting mostly"),
        ("refused for lack of room", _told("{:.0%}", s.rejected_share or None)),
        ("generated tokens", f"{s.output_tokens_per_s:.0f}/s of finished requests"),
        ("time to first token", _milliseconds(s.ttft_s)),
        ("tokenizing", _milliseconds(s.tokenize_s)),
        ("tokenizer's queue", f"{s.tokenizer_queue:.1f} texts on average"),
        ("engine", f"{s.steps_per_s:.1f} steps/s, {s.sequences:.0f} of {s.sequence_limit:.0f} sequences"),
        ("decode step", _milliseconds(s.decode_step_s)),
        ("launch of a step", _milliseconds(s.launch_s)),
        ("launch skew of devices", _told("{:.0f} us", None if s.launch_skew_s is None else s.launch_skew_s * 1e6)),
        ("idle between steps", f"{s.idle_gap_share:.1%} of the time"),
        ("waits for masks", _told("{:.1%} of the time", s.mask_wait_share or None)),
        ("KV blocks in use", _told(f"{{:.0%}} mostly, {s.preemptions_per_s:.2f} preemptions/s", s.kv_used_share)),
        ("prefix hits", _told("{:.0%} of prompt tokens", s.prefix_hit_share)),
        ("sending", f"{s.send_busy:.2f} threads, {s.unsent_characters:.0f} characters unsent mostly"),
        ("tokens in a response", _told("{:.1f}", s.tokens_per_response)),
        ("stalled clients", f"{s.stalled_clients:.0f}, {s.unsent_bytes / 1024:.0f} KiB unsent"),
        *(
            (f"CPU of {name}", f"{component.busy_cores:.2f} cores, waited for {component.waiting_cores:.2f}")
            for name, component in sorted(s.components.items())
        ),
        ("cores of the server", _told("{:g}", s.server_cores)),
        ("CPU pressure", _told(f"{{:.0%}} of the time, throttled {s.throttled_share:.0%}", s.pressure_share)),
        ("GPU utilisation", _told("{:.0%}", s.gpu_utilisation)),
        ("multiprocessors busy", _told("{:.0%}", s.sm_activity)),
    )


def machine_evidence(s: MachineSignals) -> Iterable[tuple[str, str | None]]:
    return (
        ("cores allowed", f"{s.cores}"),
        ("busy", f"{s.busy_share:.0%}"),
        ("CPU pressure", _told("{:.0%} of the time", s.pressure_share)),
        ("throttled", _told("{:.0%} of the time", s.throttled_share)),
    )


def _told(layout: str, value: float | None) -> str | None:
    return None if value is None else layout.format(value)


def _milliseconds(seconds: float | None) -> str | None:
    return None if seconds is None else f"{seconds * 1e3:.2f} ms on average"


def _finding(finding: Finding) -> dict[str, Any]:
    return {
        "verdict": finding.verdict.value,
        "severity": finding.severity.name.lower(),
        "because": finding.because,
        "change": list(finding.change),
    }
