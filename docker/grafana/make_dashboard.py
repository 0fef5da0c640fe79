"""Writes dashboards/tritandem.json from the table below: `python docker/grafana/make_dashboard.py`.

One line a panel: title, unit, what it tells, and queries by legend. A test compares the file with this table and
every metric in it with the code.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OUTPUT = Path(__file__).resolve().parent / "dashboards" / "tritandem.json"
WIDTH, PANEL_WIDTH, PANEL_HEIGHT = 24, 8, 8
RATE = "$__rate_interval"


@dataclass(frozen=True)
class Panel:
    title: str
    unit: str  # Grafana's name
    tells: str
    queries: Mapping[str, str]  # legend -> PromQL without the instance selector, which SEL stands for
    stacked: bool = False


def quantiles(metric: str, by: str = "") -> dict[str, str]:
    """p50 and p99 of a histogram."""
    labels = f"le, {by}" if by else "le"
    legend = f" {{{{{by}}}}}" if by else ""
    return {
        f"p{p}{legend}": f"histogram_quantile(0.{p}, sum by ({labels}) (rate({metric}_bucket{{SEL}}[{RATE}])))"
        for p in (50, 99)
    }


def p99(metric: str) -> str:
    return f"histogram_quantile(0.99, sum by (le) (rate({metric}_bucket{{SEL}}[{RATE}])))"


def per_second(metric: str, by: str) -> str:
    return f"sum by ({by}) (rate({metric}{{SEL}}[{RATE}]))"


def gpu(nv: str, own: str) -> str:
    """Triton's gauge where it was built with DCGM, else the engine's."""
    return f"max by (gpu_uuid) ({nv}{{SEL}}) or max by (gpu_uuid) ({own}{{SEL}})"


ROWS: Mapping[str, tuple[Panel, ...]] = {
    "Requests": (
        Panel(
            "Requests by outcome",
            "reqps",
            "Finished requests a second. Anything but COMPLETED and STOPPED deserves a look.",
            {"{{outcome}}": per_second("tritandem_requests_total", "outcome")},
            stacked=True,
        ),
        Panel(
            "Time to first token",
            "s",
            "Arrival to the first token handed to Triton.",
            quantiles("tritandem_time_to_first_token_seconds"),
        ),
        Panel(
            "Inter-token latency",
            "s",
            "Mean gap between the tokens of one response.",
            quantiles("tritandem_inter_token_latency_seconds"),
        ),
        Panel(
            "Queue wait",
            "s",
            "Tokenized until handed to an engine, by priority class.",
            quantiles("tritandem_queue_wait_seconds", "priority"),
        ),
        Panel(
            "Request latency",
            "s",
            "Arrival to the last response.",
            quantiles("tritandem_request_latency_seconds"),
        ),
        Panel(
            "Delivery",
            "short",
            "Clients that take nothing for now, what lies in the kernel for them, and text that no sender has taken.",
            {
                "stalled connections": "sum(tritandem_client_connections_stalled{SEL})",
                "unsent bytes": "sum(tritandem_client_unsent_bytes{SEL})",
                "unsent characters": "sum(tritandem_unsent_characters{SEL})",
            },
        ),
        Panel(
            "Running and waiting",
            "short",
            "Requests at the engines, requests queued in front of them, and the dynamic batch size.",
            {
                "running": "sum(tritandem_requests_running{SEL})",
                "waiting": "sum(tritandem_requests_waiting{SEL})",
                "limit {{engine}}": "max by (engine) (tritandem_sequence_limit{SEL})",
            },
        ),
        Panel(
            "Tokens per second",
            "short",
            "Prompt and generated tokens of finished requests.",
            {
                "generated": f"sum(rate(tritandem_output_tokens_total{{SEL}}[{RATE}]))",
                "prompt": f"sum(rate(tritandem_prompt_tokens_total{{SEL}}[{RATE}]))",
            },
        ),
    ),
    "Stages": (
        Panel(
            "Prefill",
            "s",
            "Start of prefill to the first token, in the engine.",
            quantiles("tritandem_prefill_seconds"),
        ),
        Panel(
            "Tokenize",
            "s",
            "Text to token ids as requests see it; inside the tokenizer the wait for an engine, and encoding.",
            {
                **quantiles("tritandem_tokenize_seconds"),
                "waiting p99": p99("tritandem_tokenize_queue_wait_seconds"),
                "encoding p99": p99("tritandem_tokenize_encode_seconds"),
            },
        ),
        Panel(
            "Tokenization queue",
            "short",
            "Texts waiting for or in tokenization, and requests that Triton holds before it. Growing: a core is short.",
            {
                "texts {{process}}": "sum by (process) (tritandem_tokenization_queue_size{SEL})",
                "before it": 'sum(nv_inference_pending_request_count{SEL, model="tokenizer"})',
            },
        ),
        Panel(
            "Tokens per response",
            "short",
            "1 while delivery keeps up; larger when clients or the sender are slower than the engine.",
            {
                "mean": f"sum(rate(tritandem_response_tokens_sum{{SEL}}[{RATE}]))"
                f" / sum(rate(tritandem_response_tokens_count{{SEL}}[{RATE}]))",
                "p99": p99("tritandem_response_tokens"),
            },
        ),
        Panel(
            "Detokenize and send",
            "s",
            "p99 of one flush to text, and of handing one response to Triton.",
            {
                "detokenize": p99("tritandem_detokenize_seconds"),
                "send": p99("tritandem_send_seconds"),
            },
        ),
        Panel(
            "Fast tokenizer",
            "short",
            "1 while the fast path is in use; shadow checks that found it unequal.",
            {
                "fast path": "min(tritandem_tokenizer_fast_path{SEL})",
                "mismatches": "sum(tritandem_tokenizer_shadow_mismatches_total{SEL})",
            },
        ),
        Panel(
            "Tokenized",
            "short",
            "Tokens and texts a second by the path that they took.",
            {
                "tokens {{path}}": per_second("tritandem_tokenized_tokens_total", "path"),
                "texts {{path}}": per_second("tritandem_tokenized_texts_total", "path"),
            },
        ),
        Panel(
            "Tokenizer's prefix cache",
            "percentunit",
            "Share of the slow path's texts whose beginning was known.",
            {
                "hit share": f'sum(rate(tritandem_tokenizer_prefix_lookups_total{{SEL, result="hit"}}[{RATE}]))'
                f" / sum(rate(tritandem_tokenizer_prefix_lookups_total{{SEL}}[{RATE}]))",
            },
        ),
    ),
    "Engine": (
        Panel(
            "Engine up",
            "short",
            "1 while the engine answers the scheduler.",
            {"{{engine}}": "min by (engine) (tritandem_engine_up{SEL})"},
        ),
        Panel(
            "Sequences",
            "short",
            "In the engine: those that decode, and those whose prefill is not finished.",
            {
                "decoding {{engine}}": "sum by (engine) (tritandem_engine_sequences_running{SEL})",
                "prefilling {{engine}}": "sum by (engine) (tritandem_engine_sequences_waiting{SEL})",
            },
        ),
        Panel(
            "Steps",
            "ops",
            "Launched by the engine.",
            {"{{engine}}": per_second("tritandem_engine_steps_total", "engine")},
        ),
        Panel(
            "KV blocks",
            "short",
            "In use and free; new sequences wait when none is free.",
            {
                "used {{engine}}": "sum by (engine) (tritandem_kv_blocks_used{SEL})",
                "free {{engine}}": "sum by (engine) (tritandem_kv_blocks_free{SEL})",
            },
            stacked=True,
        ),
        Panel(
            "Prefix hits",
            "percentunit",
            "Share of prompt tokens found in the prefix cache.",
            {
                "hit share": f"sum(rate(tritandem_prefix_cache_hit_tokens_total{{SEL}}[{RATE}]))"
                f" / sum(rate(tritandem_prefix_cache_query_tokens_total{{SEL}}[{RATE}]))",
            },
        ),
        Panel(
            "Preemptions",
            "ops",
            "Sequences that had to give their KV blocks back.",
            {"{{engine}}": per_second("tritandem_preemptions_total", "engine")},
        ),
        Panel(
            "Step launch latency",
            "s",
            "Host time of launching one step on a GPU, with and without prefill.",
            quantiles("tritandem_cuda_kernel_launch_latency_seconds", "phase"),
        ),
        Panel(
            "Idle gap",
            "percentunit",
            "Share of time in which the device idled between two steps while work waited.",
            {"{{engine}}": per_second("tritandem_engine_idle_gap_seconds_sum", "engine")},
        ),
        Panel(
            "Decode step",
            "s",
            "One step without prefill, and the moving average that the scheduler plans with.",
            {
                **quantiles("tritandem_decode_step_seconds", "engine"),
                "average {{engine}}": "max by (engine) (tritandem_decode_step_average_seconds{SEL})",
            },
        ),
    ),
    "CPU": (
        Panel(
            "Cores by component",
            "short",
            "Busy cores of each kind of process, and how many the server may use.",
            {
                "{{component}}": per_second("tritandem_process_cpu_seconds_total", "component"),
                "allowed {{component}}": "max by (component) (tritandem_process_cores_allowed{SEL})",
                "server's": "max(tritandem_server_cores{SEL})",
            },
        ),
        Panel(
            "Run-queue wait",
            "percentunit",
            "Time that runnable threads waited for a core, as a share of one core. Who waits is who is short.",
            {"{{component}}": per_second("tritandem_run_queue_wait_seconds_total", "component")},
        ),
        Panel(
            "CPU pressure",
            "percentunit",
            "Share of time in which some task waited for a core, or was throttled by the quota.",
            {
                "pressure": f"max(rate(tritandem_cpu_pressure_seconds_total{{SEL}}[{RATE}]))",
                "throttled": f"max(rate(tritandem_cpu_throttled_seconds_total{{SEL}}[{RATE}]))",
            },
        ),
        Panel(
            "Memory by component",
            "bytes",
            "Resident memory.",
            {"{{component}}": "sum by (component) (tritandem_process_resident_memory_bytes{SEL})"},
            stacked=True,
        ),
        Panel(
            "Machine CPU",
            "percentunit",
            "Busy share of the whole machine, as Triton sees it.",
            {"machine": "max(nv_cpu_utilization{SEL})"},
        ),
        Panel(
            "Cost of the metrics",
            "percentunit",
            "Share of one core that publishing takes.",
            {"{{component}}": per_second("tritandem_telemetry_cpu_seconds_total", "component")},
        ),
        Panel(
            "Staging",
            "Bps",
            "Bytes between host and device by kind of memory.",
            {"{{kind}}": per_second("tritandem_staging_bytes_total", "kind")},
        ),
    ),
    "GPU": (
        Panel(
            "GPU utilisation",
            "percentunit",
            "Share of time in which some kernel ran.",
            {"{{gpu_uuid}}": gpu("nv_gpu_utilization", "tritandem_gpu_utilization")},
        ),
        Panel(
            "GPU activity",
            "percentunit",
            "Share of the multiprocessors that were busy and of the memory bandwidth in use (Hopper and newer).",
            {
                "multiprocessors {{gpu_uuid}}": "max by (gpu_uuid) (tritandem_gpu_sm_activity{SEL})",
                "memory bandwidth {{gpu_uuid}}": "max by (gpu_uuid) (tritandem_gpu_dram_activity{SEL})",
            },
        ),
        Panel(
            "GPU power",
            "watt",
            "Draw and limit.",
            {
                "{{gpu_uuid}}": gpu("nv_gpu_power_usage", "tritandem_gpu_power_usage_watts"),
                "limit {{gpu_uuid}}": "max by (gpu_uuid) (nv_gpu_power_limit{SEL})",
            },
        ),
        Panel(
            "GPU memory",
            "bytes",
            "In use and installed.",
            {
                "{{gpu_uuid}}": gpu("nv_gpu_memory_used_bytes", "tritandem_gpu_memory_used_bytes"),
                "installed {{gpu_uuid}}": "max by (gpu_uuid) (nv_gpu_memory_total_bytes{SEL})",
            },
        ),
    ),
}


def dashboard() -> dict[str, Any]:
    """Grafana's JSON model."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS.items():
        panels.append(
            {
                "id": len(panels) + 1,
                "type": "row",
                "title": title,
                "collapsed": False,
                "panels": [],
                "gridPos": {"x": 0, "y": y, "w": WIDTH, "h": 1},
            }
        )
        y += 1
        per_line = WIDTH // PANEL_WIDTH
        for place, panel in enumerate(row):
            x = place % per_line * PANEL_WIDTH
            panels.append(_panel(panel, len(panels) + 1, x, y + place // per_line * PANEL_HEIGHT))
        y += -(-len(row) // per_line) * PANEL_HEIGHT
    return {
        "uid": "tritandem",
        "title": "Tritandem",
        "description": "Does the CPU starve the GPU? Made by docker/grafana/make_dashboard.py.",
        "tags": ["tritandem", "triton"],
        "schemaVersion": 39,
        "editable": False,
        "graphTooltip": 1,
        "refresh": "5s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {
            "list": [
                {
                    "name": "instance",
                    "label": "Server",
                    "type": "query",
                    "datasource": {"type": "prometheus", "uid": "prometheus"},
                    "query": {"query": "label_values(up, instance)", "refId": "instance"},
                    "refresh": 2,
                    "includeAll": True,
                    "multi": True,
                    "allValue": ".*",
                    "current": {"text": "All", "value": "$__all"},
                }
            ]
        },
        "panels": panels,
    }


def _panel(panel: Panel, number: int, x: int, y: int) -> dict[str, Any]:
    stacking = {"mode": "normal" if panel.stacked else "none", "group": "A"}
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.tells,
        "datasource": {"type": "prometheus", "uid": "prometheus"},
        "gridPos": {"x": x, "y": y, "w": PANEL_WIDTH, "h": PANEL_HEIGHT},
        "fieldConfig": {
            "defaults": {
                "unit": panel.unit,
                "min": 0,
                "custom": {"fillOpacity": 10, "lineWidth": 1, "showPoints": "never", "stacking": stacking},
            },
            "overrides": [],
        },
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {
                "refId": chr(ord("A") + place),
                "legendFormat": legend,
                "expr": query.replace("SEL", 'instance=~"$instance"'),
            }
            for place, (legend, query) in enumerate(panel.queries.items())
        ],
    }


def rendered() -> str:
    return json.dumps(dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    OUTPUT.write_text(rendered())
