"""Every metric of the project, declared once: name, kind, help, labels, buckets.

Knows nothing about who observes or where it is published. Names follow the Prometheus conventions (base
units, `_total` for counters). `VLLM_NAMES` maps them to what a dashboard written for vLLM asks for.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Family:
    """One metric family. `buckets` are upper bounds in the metric's unit; +Inf is implied."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


LATENCY_BUCKETS_S = (
    0.001,
    0.002,
    0.005,
    0.01,
    0.02,
    0.035,
    0.05,
    0.075,
    0.1,
    0.2,
    0.35,
    0.5,
    1.0,
    2.0,
    5.0,
    10.0,
    30.0,
)
SHORT_BUCKETS_S = (0.00001, 0.00002, 0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5)
TOKEN_BUCKETS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)


def _counter(name: str, help_text: str, *labels: str) -> Family:
    return Family(f"tritandem_{name}_total", Kind.COUNTER, help_text, labels)


def _gauge(name: str, help_text: str, *labels: str) -> Family:
    return Family(f"tritandem_{name}", Kind.GAUGE, help_text, labels)


def _seconds(name: str, help_text: str, *labels: str, buckets: tuple[float, ...] = LATENCY_BUCKETS_S) -> Family:
    return Family(f"tritandem_{name}_seconds", Kind.HISTOGRAM, help_text, labels, buckets)


# Requests, as the scheduler sees them.
REQUESTS = _counter("requests", "Finished requests by outcome and priority class", "outcome", "priority")
TIME_TO_FIRST_TOKEN = _seconds("time_to_first_token", "Arrival to the first token handed to Triton", "priority")
INTER_TOKEN_LATENCY = _seconds("inter_token_latency", "Mean gap between the tokens of one response")
REQUEST_LATENCY = _seconds("request_latency", "Arrival to the last response", "priority")
QUEUE_WAIT = _seconds("queue_wait", "Waiting for the scheduler to dispatch", "priority")
PREFILL = _seconds("prefill", "Start of prefill to the first token, in the engine")
TOKENIZE = _seconds("tokenize", "Text to token ids, waiting included")
DETOKENIZE = _seconds("detokenize", "Token ids to text, one flush of all sequences", buckets=SHORT_BUCKETS_S)
SEND = _seconds("send", "Handing one response to Triton", buckets=SHORT_BUCKETS_S)
RESPONSE_TOKENS = Family("tritandem_response_tokens", Kind.HISTOGRAM, "Tokens in one response", (), TOKEN_BUCKETS)
PROMPT_TOKENS = _counter("prompt_tokens", "Prompt tokens of finished requests")
OUTPUT_TOKENS = _counter("output_tokens", "Generated tokens of finished requests")
REQUESTS_RUNNING = _gauge("requests_running", "Requests handed to an engine and not finished")
REQUESTS_WAITING = _gauge("requests_waiting", "Requests queued in the scheduler")

# Engines, from their load snapshots.
ENGINE_UP = _gauge("engine_up", "1 while the engine answers", "engine")
SEQUENCE_LIMIT = _gauge("sequence_limit", "Concurrent sequences allowed by the dynamic batch size", "engine")
ENGINE_RUNNING = _gauge("engine_sequences_running", "Sequences that decode", "engine")
ENGINE_WAITING = _gauge("engine_sequences_waiting", "Sequences whose prefill is not finished", "engine")
KV_BLOCKS_USED = _gauge("kv_blocks_used", "KV blocks in use", "engine")
KV_BLOCKS_FREE = _gauge("kv_blocks_free", "KV blocks that could be allocated now", "engine")
PREFIX_HIT_TOKENS = _counter("prefix_cache_hit_tokens", "Prompt tokens found in the prefix cache", "engine")
PREEMPTIONS = _counter("preemptions", "Sequences preempted for lack of KV blocks", "engine")
ENGINE_STEPS = _counter("engine_steps", "Steps launched", "engine")
DECODE_STEP_AVERAGE = _gauge("decode_step_average_seconds", "Moving average of one decode step", "engine")

# Inside the engine process.
GRAPH_LAUNCH = _seconds(
    "cuda_kernel_launch_latency", "Host time of launching one step on the device", "phase", buckets=SHORT_BUCKETS_S
)
DECODE_STEP = _seconds("decode_step", "One step without prefill, on the device", buckets=SHORT_BUCKETS_S)
STEP_IDLE = _seconds("engine_idle_gap", "Device idle between two steps while work waited", buckets=SHORT_BUCKETS_S)
STAGING_BYTES = _counter("staging_bytes", "Bytes moved between host and device by kind of memory", "kind")

# Inside the tokenizer process.
TOKENIZATION_QUEUE = _gauge("tokenization_queue_size", "Texts waiting for or in tokenization")
TOKENIZED_TOKENS = _counter("tokenized_tokens", "Tokens produced by tokenization engine", "path")
TOKENIZER_MISMATCHES = _counter("tokenizer_shadow_mismatches", "Shadow checks that found the fast path unequal")
TOKENIZER_FAST = _gauge("tokenizer_fast_path", "1 while the fast tokenization path is in use")

# Every process: is the CPU short?
PROCESS_CPU = _counter("process_cpu_seconds", "CPU time of the process", "component")
RUN_QUEUE_WAIT = _counter("run_queue_wait_seconds", "Time that runnable threads waited for a core", "component")
CPU_PRESSURE = _counter("cpu_pressure_seconds", "Time in which some task of the cgroup or machine waited for a core")
CPU_THROTTLED = _counter("cpu_throttled_seconds", "Time throttled by the cgroup's CPU quota")
CORES_ALLOWED = _gauge("process_cores_allowed", "Cores that the process may run on", "component")
RESIDENT_BYTES = _gauge("process_resident_memory_bytes", "Resident memory of the process", "component")

FAMILIES: tuple[Family, ...] = tuple(value for value in list(globals().values()) if isinstance(value, Family))

VLLM_NAMES: dict[str, str] = {
    "tritandem_time_to_first_token_seconds": "vllm:time_to_first_token_seconds",
    "tritandem_inter_token_latency_seconds": "vllm:time_per_output_token_seconds",
    "tritandem_request_latency_seconds": "vllm:e2e_request_latency_seconds",
    "tritandem_queue_wait_seconds": "vllm:request_queue_time_seconds",
    "tritandem_prefill_seconds": "vllm:request_prefill_time_seconds",
    "tritandem_requests_running": "vllm:num_requests_running",
    "tritandem_requests_waiting": "vllm:num_requests_waiting",
    "tritandem_prompt_tokens_total": "vllm:prompt_tokens_total",
    "tritandem_output_tokens_total": "vllm:generation_tokens_total",
    "tritandem_prefix_cache_hit_tokens_total": "vllm:prefix_cache_hits_total",
    "tritandem_preemptions_total": "vllm:num_preemptions_total",
}
