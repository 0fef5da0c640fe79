"""What the metrics of two samples say about the time between, by the names that a verdict uses.

The only place of the doctor that knows metric names. Pure. Counters are published every `metrics_period_s` (2 s), so
that a rate over ten seconds is off by a fifth at worst: thresholds have to be coarser than that.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tritandem.telemetry import families as f

from .sample import Pair

TRITON_PENDING = "nv_inference_pending_request_count"
TRITON_QUEUE_US = "nv_inference_queue_duration_us"  # a counter: what all requests together have waited
TRITON_GPU = "nv_gpu_utilization"


@dataclass(frozen=True, slots=True)
class Component:
    """One kind of process. Cores: CPU seconds a second."""

    busy_cores: float = 0.0
    waiting_cores: float = 0.0  # threads that were runnable and had no core


@dataclass(frozen=True, slots=True)
class Signals:
    """Gauges are what they were in half of the looks at least ("mostly"), counters are per second; None: not known on
    this server."""

    seconds: float
    # Requests
    running: float = 0.0
    waiting: float = 0.0  # in the scheduler, or in an engine for their prefill
    finished_per_s: float = 0.0
    rejected_share: float = 0.0
    output_tokens_per_s: float = 0.0
    ttft_s: float | None = None
    # Tokenizer
    tokenize_s: float | None = None  # mean, as requests see it
    tokenizer_queue: float = 0.0  # texts that waited for it, on average: in it, or held by Triton before it
    # Engine
    sequences: float = 0.0  # that decode
    sequence_limit: float = 0.0
    steps_per_s: float = 0.0
    decode_step_s: float | None = None
    launch_s: float | None = None  # None where a launch is the step itself
    launch_skew_s: float | None = None  # of an engine over several devices: from the first's launch to the last's
    idle_gap_share: float = 0.0  # of the time, the device had nothing to do while work waited
    mask_wait_share: float = 0.0  # of the time, a step waited for masks of structured answers
    masks_s: float | None = None  # to write those of one step
    kv_used_share: float | None = None
    preemptions_per_s: float = 0.0
    prefix_hit_share: float | None = None
    # Delivery
    send_busy: float = 0.0  # threads inside `send`
    longest_pause_s: float | None = None  # mean of the streams that ended
    unsent_characters: float = 0.0
    stalled_clients: float = 0.0
    unsent_bytes: float = 0.0
    tokens_per_response: float | None = None
    # CPU and GPU
    components: dict[str, Component] = field(default_factory=dict)
    server_cores: float | None = None
    pressure_share: float | None = None  # of the time, some task waited for a core
    throttled_share: float = 0.0
    gpu_utilisation: float | None = None
    sm_activity: float | None = None

    @property
    def on_gpu(self) -> bool:
        """Only engines on a GPU tell how long a launch takes."""
        return self.gpu_utilisation is not None or self.launch_s is not None

    @property
    def active(self) -> bool:
        """Some request was somewhere on its way."""
        return bool(self.steps_per_s or self.finished_per_s or self.running or self.waiting or self.tokenizer_queue)

    @property
    def busy_cores(self) -> float:
        return sum(component.busy_cores for component in self.components.values())

    @property
    def waiting_cores(self) -> float:
        return sum(component.waiting_cores for component in self.components.values())

    @property
    def waiting_share(self) -> float:
        """Of the time in which the server's threads could have run, they waited for a core."""
        wanted = self.busy_cores + self.waiting_cores
        return self.waiting_cores / wanted if wanted else 0.0


def published(pair: Pair) -> bool:
    """Whether the server has published in between: with every period it tells what publishing has cost so far."""
    name = f.TELEMETRY_CPU.name
    return pair.before.total(name) != pair.after.total(name) or not pair.after.has(name)


def read_signals(pair: Pair) -> Signals:
    finished = pair.rate(f.REQUESTS.name)
    rejected = pair.rate(f.REQUESTS.name, outcome="REJECTED_SATURATED")
    looked_up = pair.gained(f.PREFIX_QUERY_TOKENS.name)
    return Signals(
        seconds=pair.seconds,
        running=pair.mostly(f.REQUESTS_RUNNING.name),
        waiting=pair.mostly(f.REQUESTS_WAITING.name) + pair.mostly(f.ENGINE_WAITING.name),
        finished_per_s=finished,
        rejected_share=rejected / finished if finished else 0.0,
        output_tokens_per_s=pair.rate(f.OUTPUT_TOKENS.name),
        ttft_s=pair.mean(f.TIME_TO_FIRST_TOKEN.name),
        tokenize_s=pair.mean(f.TOKENIZE.name),
        tokenizer_queue=_tokenizer_queue(pair),
        sequences=pair.mostly(f.ENGINE_RUNNING.name),
        sequence_limit=pair.mostly(f.SEQUENCE_LIMIT.name),
        steps_per_s=pair.rate(f.ENGINE_STEPS.name),
        decode_step_s=pair.mean(f.DECODE_STEP.name),
        launch_s=pair.mean(f.GRAPH_LAUNCH.name, phase="decode"),
        launch_skew_s=pair.mean(f.LAUNCH_SKEW.name),
        idle_gap_share=max(pair.rates(f"{f.STEP_IDLE.name}_sum", "engine").values(), default=0.0),
        mask_wait_share=max(pair.rates(f"{f.GRAMMAR_WAIT.name}_sum", "engine").values(), default=0.0),
        masks_s=pair.mean(f.GRAMMAR_MASKS.name),
        kv_used_share=_kv_used_share(pair),
        preemptions_per_s=pair.rate(f.PREEMPTIONS.name),
        prefix_hit_share=pair.gained(f.PREFIX_HIT_TOKENS.name) / looked_up if looked_up else None,
        send_busy=pair.rate(f"{f.SEND.name}_sum"),
        longest_pause_s=pair.mean(f.LONGEST_PAUSE.name),
        unsent_characters=pair.mostly(f.UNSENT_CHARACTERS.name),
        stalled_clients=pair.mostly(f.CLIENTS_STALLED.name),
        unsent_bytes=pair.mostly(f.UNSENT_BYTES.name),
        tokens_per_response=pair.mean(f.RESPONSE_TOKENS.name),
        components=_components(pair),
        server_cores=pair.average(f.SERVER_CORES.name),
        pressure_share=pair.rate(f.CPU_PRESSURE.name) if pair.after.has(f.CPU_PRESSURE.name) else None,
        throttled_share=pair.rate(f.CPU_THROTTLED.name),
        gpu_utilisation=_either(pair.average(TRITON_GPU), pair.average(f.GPU_UTILISATION.name)),
        sm_activity=pair.average(f.GPU_SM_ACTIVITY.name),
    )


def _either(first: float | None, second: float | None) -> float | None:
    return second if first is None else first


def _tokenizer_queue(pair: Pair) -> float:
    """Time waited a second is the mean number of those who wait (Little's law): a queue that comes and goes is seen
    between the samples as well. What takes longer than the time between them is in the gauges alone."""
    inside = max(
        pair.rate(f"{f.TOKENIZE.name}_sum") - pair.rate(f"{f.TOKENIZE_ENCODE.name}_sum"),
        pair.rate(f"{f.TOKENIZE_QUEUE_WAIT.name}_sum"),
    )
    waited = inside + pair.rate(TRITON_QUEUE_US, model="tokenizer") / 1e6
    held = pair.mostly(f.TOKENIZATION_QUEUE.name) + pair.mostly(TRITON_PENDING, model="tokenizer")
    return max(waited, held)


def _kv_used_share(pair: Pair) -> float | None:
    """Of the fullest engine, most of the time."""
    shares = []
    for engine in pair.after.by(f.KV_BLOCKS_FREE.name, "engine"):
        used = pair.mostly(f.KV_BLOCKS_USED.name, engine=engine)
        total = pair.after.total(f.KV_BLOCKS_USED.name, engine=engine) + pair.after.total(
            f.KV_BLOCKS_FREE.name, engine=engine
        )
        shares.append(used / total if total else 0.0)
    return max(shares, default=None)


def _components(pair: Pair) -> dict[str, Component]:
    waits = pair.continued_rates(f.RUN_QUEUE_WAIT.name, "component")
    return {
        name: Component(busy_cores=busy, waiting_cores=waits.get(name, 0.0))
        for name, busy in pair.continued_rates(f.PROCESS_CPU.name, "component").items()
    }
