"""Every metric of the project, declared once: name, kind, help, labels, buckets.

Knows nothing about who observes or where it is published. Names follow the Prometheus conventions (base
units, `_total` for counters). Triton keeps one object for a set of labels, whichever process asks for it, and frees it
when the first of them goes: the labels of whatever several processes publish name the process (or the engine, which
is one).
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
RESPONSE_GAP = _seconds("response_gap", "Between two responses of one stream, as they are handed to Triton")
LONGEST_PAUSE = _seconds("longest_pause", "The longest gap between two responses of one stream")
RESPONSE_TOKENS = Family("tritandem_response_tokens", Kind.HISTOGRAM, "Tokens in one response", (), TOKEN_BUCKETS)
PROMPT_TOKENS = _counter("prompt_tokens", "Prompt tokens of finished requests")
OUTPUT_TOKENS = _counter("output_tokens", "Generated tokens of finished requests")
REQUESTS_RUNNING = _gauge("requests_running", "Requests handed to an engine and not finished")
REQUESTS_WAITING = _gauge("requests_waiting", "Requests queued in the scheduler")
UNSENT_CHARACTERS = _gauge("unsent_characters", "Generated text that no sender has taken yet")

# Between the server and its clients, as the kernel sees it.
CLIENTS_STALLED = _gauge("client_connections_stalled", "Client connections whose receiver takes nothing more for now")
UNSENT_BYTES = _gauge("client_unsent_bytes", "Bytes in the kernel that clients have not acknowledged")

# Engines, from their load snapshots.
ENGINE_UP = _gauge("engine_up", "1 while the engine answers", "engine")
SEQUENCE_LIMIT = _gauge("sequence_limit", "Concurrent sequences allowed by the dynamic batch size", "engine")
ENGINE_RUNNING = _gauge("engine_sequences_running", "Sequences that decode", "engine")
ENGINE_WAITING = _gauge("engine_sequences_waiting", "Sequences whose prefill is not finished", "engine")
KV_BLOCKS_USED = _gauge("kv_blocks_used", "KV blocks in use", "engine")
KV_BLOCKS_FREE = _gauge("kv_blocks_free", "KV blocks that could be allocated now", "engine")
PREFIX_QUERY_TOKENS = _counter("prefix_cache_query_tokens", "Prompt tokens handed to the engine", "engine")
PREFIX_HIT_TOKENS = _counter("prefix_cache_hit_tokens", "Prompt tokens found in the prefix cache", "engine")
PREEMPTIONS = _counter("preemptions", "Sequences preempted for lack of KV blocks", "engine")
ENGINE_STEPS = _counter("engine_steps", "Steps launched", "engine")
DECODE_STEP_AVERAGE = _gauge("decode_step_average_seconds", "Moving average of one decode step", "engine")

# Inside an engine's process. On the CPU a launch is the step itself, so that the launch is not published there.
GRAPH_LAUNCH = _seconds(
    "cuda_kernel_launch_latency", "Host time of launching one step", "engine", "phase", buckets=SHORT_BUCKETS_S
)
DECODE_STEP = _seconds("decode_step", "One step without prefill, on the device", "engine", buckets=SHORT_BUCKETS_S)
STEP_IDLE = _seconds(
    "engine_idle_gap", "Device idle between two steps while work waited", "engine", buckets=SHORT_BUCKETS_S
)
LAUNCH_SKEW = _seconds(
    "engine_launch_skew",
    "Host time between a step's launches on an engine's first and last device",
    "engine",
    buckets=SHORT_BUCKETS_S,
)
GRAMMAR_COMPILE = _seconds(
    "grammar_compile", "Compiling the grammar of a structured answer", "engine", buckets=SHORT_BUCKETS_S
)
GRAMMAR_MASKS = _seconds(
    "grammar_masks", "Writing the masks of one step's structured answers", "engine", buckets=SHORT_BUCKETS_S
)
GRAMMAR_WAIT = _seconds(
    "grammar_wait", "A step waited for the masks of its structured answers", "engine", buckets=SHORT_BUCKETS_S
)
STAGING_BYTES = _counter("staging_bytes", "Bytes moved between host and device by kind of memory", "engine", "kind")
GPU_UTILISATION = _gauge("gpu_utilization", "Share of time in which some kernel ran", "engine", "gpu_uuid")
GPU_SM_ACTIVITY = _gauge("gpu_sm_activity", "Share of the multiprocessors that were busy", "engine", "gpu_uuid")
GPU_DRAM_ACTIVITY = _gauge("gpu_dram_activity", "Share of the memory bandwidth in use", "engine", "gpu_uuid")
GPU_POWER = _gauge("gpu_power_usage_watts", "Power draw", "engine", "gpu_uuid")
GPU_MEMORY_USED = _gauge("gpu_memory_used_bytes", "Device memory in use", "engine", "gpu_uuid")

# Inside a tokenizer's process; `process` is the name that Triton gives the instance.
TOKENIZATION_QUEUE = _gauge("tokenization_queue_size", "Texts waiting for or in tokenization", "process")
TOKENIZE_QUEUE_WAIT = _seconds(
    "tokenize_queue_wait", "Submitted to the tokenizer until an engine of it begins", "process", buckets=SHORT_BUCKETS_S
)
TOKENIZE_ENCODE = _seconds("tokenize_encode", "Encoding one text", "process", buckets=SHORT_BUCKETS_S)
GRAMMAR_TRIAL = _seconds(
    "grammar_trial", "From a new grammar's arrival to the end of its trial", "process", buckets=SHORT_BUCKETS_S
)
TOKENIZED_TEXTS = _counter("tokenized_texts", "Texts encoded, by tokenization engine", "process", "path")
TOKENIZED_TOKENS = _counter("tokenized_tokens", "Tokens produced, by tokenization engine", "process", "path")
TOKENIZER_CACHE = _counter("tokenizer_prefix_lookups", "Lookups in the cache of token prefixes", "process", "result")
TOKENIZER_MISMATCHES = _counter(
    "tokenizer_shadow_mismatches", "Shadow checks that found the fast path unequal", "process"
)
TOKENIZER_FAST = _gauge("tokenizer_fast_path", "1 while the fast tokenization path is in use", "process")

# Every process: is the CPU short? `component` is tokenizer, scheduler, engine, or server: tritonserver's own threads.
PROCESS_CPU = _counter("process_cpu_seconds", "CPU time of the process", "component", "process")
RUN_QUEUE_WAIT = _counter(
    "run_queue_wait_seconds", "Time that runnable threads waited for a core", "component", "process"
)
CORES_ALLOWED = _gauge("process_cores_allowed", "Cores that the process may run on", "component", "process")
RESIDENT_BYTES = _gauge("process_resident_memory_bytes", "Resident memory of the process", "component", "process")
TELEMETRY_CPU = _counter("telemetry_cpu_seconds", "CPU time of the thread that publishes", "component", "process")
SERVER_CORES = _gauge("server_cores", "Cores that all processes of the server may use together, or its CPU quota")
CPU_PRESSURE = _counter("cpu_pressure_seconds", "Time in which some task of the cgroup or machine waited for a core")
CPU_THROTTLED = _counter("cpu_throttled_seconds", "Time throttled by the cgroup's CPU quota")

FAMILIES: tuple[Family, ...] = tuple(value for value in list(globals().values()) if isinstance(value, Family))
