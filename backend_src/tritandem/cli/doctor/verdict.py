"""What limits a server, from two samples of its metrics: one pure function, a rule for each limit.

A rule looks at signals and says what it found, or nothing. The first that finds something names the verdict; their
order is that in which a limit hides those after it: without cores every stage is slow, without KV blocks sequences
wait however fast the engine is. What later rules found is told as well.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import TYPE_CHECKING

from .sample import Pair
from .signals import Signals, read_signals

if TYPE_CHECKING:
    from .machine import MachineSignals


class Verdict(str, Enum):
    """The word for it; `value` is what people and JSON see."""

    TOKENIZATION = "CPU-bound tokenization"
    LAUNCH = "launch-bound"
    GRAMMAR = "grammar-bound"
    CORES = "short of cores"
    MEMORY = "memory-bound"
    DELIVERY = "delivery-bound"
    GPU = "GPU-bound"
    ENGINE = "engine-bound"
    UNHINDERED = "unhindered"
    IDLE = "idle"


class Severity(IntEnum):
    """The exit code of the command."""

    OK = 0  # nothing to change
    WARNING = 3  # requests wait, or clients do not take what they get
    CRITICAL = 4  # the CPU holds up the device


@dataclass(frozen=True, slots=True)
class Finding:
    verdict: Verdict
    severity: Severity
    because: str
    change: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Diagnosis:
    finding: Finding
    also: tuple[Finding, ...]  # in the order of the rules
    signals: Signals | MachineSignals


# Coarser than what a sample can be off by (see signals.py).
MANY_WAITING_CORES = 0.3  # below it, waiting for a core costs nobody anything worth a change
HIGH_WAITING_SHARE = 0.4  # runnable threads got little more than half of the time that they asked for
HIGH_THROTTLED_SHARE = 0.05
HIGH_TOKENIZE_SHARE = 0.3  # of the time to first token
HIGH_BUSY_SHARE = 0.8
HIGH_GAP_SHARE = 0.15
HIGH_LAUNCH_SHARE = 0.9  # a launch that takes as long as the step leaves the device no work ahead
HIGH_MASK_WAIT_SHARE = 0.1
HIGH_KV_SHARE, FULL_KV_SHARE = 0.6, 0.95
MANY_PREEMPTIONS_PER_S = 0.1
HIGH_SEND_BUSY = 0.5
HIGH_GPU_UTILISATION = 0.9


def judge(pair: Pair) -> Diagnosis:
    """The verdict on the time between two samples."""
    return judge_signals(read_signals(pair))


def judge_signals(signals: Signals) -> Diagnosis:
    found = [finding for rule in _RULES if (finding := rule(signals)) is not None]
    return Diagnosis(found[0], tuple(found[1:]), signals) if found else Diagnosis(_no_limit(signals), (), signals)


def _tokenization(s: Signals) -> Finding | None:
    """Texts wait for the tokenizer, and it takes a good part of the way to the first token, or all of it."""
    share = (s.tokenize_s or 0.0) / s.ttft_s if s.ttft_s else 1.0
    if s.tokenizer_queue < 1 or share < HIGH_TOKENIZE_SHARE:
        return None
    cost = f"tokenizing takes {share:.0%} of the time to first token" if s.ttft_s else "nothing has come further"
    busy = s.components["tokenizer"].busy_cores if "tokenizer" in s.components else 0.0
    return Finding(
        Verdict.TOKENIZATION,
        Severity.CRITICAL,
        f"{s.tokenizer_queue:.0f} texts wait for the tokenizer, which uses {busy:.1f} cores; {cost}",
        (
            "give the server more cores: `tritandem size --input-tokens N --rps R` says how many",
            "raise --tokenizer-instances where one process cannot use the cores that it has",
            "install the extra `fast`, if the dashboard says that the fast path is off",
        ),
    )


def _launch(s: Signals) -> Finding | None:
    """The device of an engine on a GPU runs out of steps while sequences live."""
    if not s.on_gpu or s.steps_per_s == 0:
        return None
    if s.idle_gap_share >= HIGH_GAP_SHARE:
        because = f"the GPU idles {s.idle_gap_share:.0%} of the time between steps while sequences live"
    elif s.launch_s and s.decode_step_s and s.launch_s >= HIGH_LAUNCH_SHARE * s.decode_step_s and not _gpu_full(s):
        because = f"launching a step takes the host {s.launch_s * 1e3:.2f} ms, as long as the step itself"
    else:
        return None
    return Finding(
        Verdict.LAUNCH,
        Severity.CRITICAL,
        because,
        (
            "give the engine's process a core of its own (placement), and the server more cores",
            "look at run-queue wait of the engine: it must be close to nothing",
            "leave engine.cuda_graphs on, and engine.launch_ahead_steps at its default or higher",
        ),
    )


def _grammar(s: Signals) -> Finding | None:
    """Steps wait until the host has said what the structures of answers allow next."""
    if s.mask_wait_share < HIGH_MASK_WAIT_SHARE:
        return None
    masks = f", which take {s.masks_s * 1e3:.2f} ms a step" if s.masks_s is not None else ""
    return Finding(
        Verdict.GRAMMAR,
        Severity.CRITICAL,
        f"steps wait {s.mask_wait_share:.0%} of the time for the masks of structured answers{masks}",
        (
            "give the engine's process more cores: masks are written by as many threads",
            "prefer choices and small expressions, which a device follows by itself, to open schemas",
            "bound strings and lists in schemas, and leave out what the answer need not say",
        ),
    )


def _cores(s: Signals) -> Finding | None:
    """Threads of the server could run and do not, or its quota stops them."""
    if not s.active:
        return None  # what an idle server waits for holds nobody up
    change: tuple[str, ...]
    if s.throttled_share >= HIGH_THROTTLED_SHARE:
        because = f"the CPU quota stops the server {s.throttled_share:.0%} of the time"
        change = ("raise the container's CPU limit, or set a request and no limit",)
    elif s.waiting_cores >= MANY_WAITING_CORES and s.waiting_share >= HIGH_WAITING_SHARE:
        name, worst = max(s.components.items(), key=lambda item: item[1].waiting_cores)
        because = (
            f"the server's threads got {s.busy_cores:.1f} cores and waited for {s.waiting_cores:.1f} more, "
            f"most of it the {name} ({worst.waiting_cores:.1f})"
        )
        change = (
            "give the server more cores: `tritandem size` says how many",
            "move other work off these cores, or pin it elsewhere",
        )
    else:
        return None
    return Finding(Verdict.CORES, Severity.CRITICAL, because, change)


def _memory(s: Signals) -> Finding | None:
    """Sequences wait or are thrown out for want of KV blocks, not of slots."""
    used = s.kv_used_share or 0.0
    slots_left = s.sequences < s.sequence_limit
    if s.preemptions_per_s >= MANY_PREEMPTIONS_PER_S:
        because = f"{s.preemptions_per_s:.1f} sequences a second are preempted, with {used:.0%} of the KV blocks in use"
    elif s.waiting >= 1 and (used >= FULL_KV_SHARE or (used >= HIGH_KV_SHARE and slots_left)):
        because = f"{s.waiting:.0f} requests wait while {used:.0%} of the KV blocks are in use, most of the time"
    else:
        return None
    return Finding(
        Verdict.MEMORY,
        Severity.WARNING,
        because,
        (
            "raise engine.kv_memory_fraction (GPU) or engine.cpu_kv_bytes (CPU), or engine.num_blocks where it is set",
            'set engine.kv_dtype = "fp8_e4m3" where it is not: twice as many blocks in the same memory as bf16',
            "lower engine.max_context_tokens or what clients ask for with max_tokens",
            "add a server",
        ),
    )


def _delivery(s: Signals) -> Finding | None:
    """Text is there and does not leave: clients take nothing, or the senders are behind."""
    if s.stalled_clients >= 1:
        return Finding(
            Verdict.DELIVERY,
            Severity.WARNING,
            f"{s.stalled_clients:.0f} client connections are stalled; {s.unsent_bytes / 1024:.0f} KiB wait to be read",
            (
                "look at those clients and what is between: a proxy that buffers, a reader that does other work",
                "the server loses nothing by it but memory: other streams go on",
            ),
        )
    if s.unsent_characters >= 1 and s.send_busy >= HIGH_SEND_BUSY:
        return Finding(
            Verdict.DELIVERY,
            Severity.WARNING,
            f"{s.unsent_characters:.0f} characters wait for a sender, and {s.send_busy:.1f} threads are sending"
            + (f"; a stream stands still for {s.longest_pause_s:.2f} s at its longest" if s.longest_pause_s else ""),
            (
                "raise scheduler.sender_threads, and see that the scheduler has a core",
                "ask without `stream` where nobody reads along",
            ),
        )
    return None


def _device(s: Signals) -> Finding | None:
    """The device computes all the time: as it should be, unless requests wait."""
    full = s.sequence_limit > 0 and s.sequences >= HIGH_BUSY_SHARE * s.sequence_limit
    if s.steps_per_s == 0 or not (s.waiting >= 1 or full or _gpu_full(s)):
        return None
    verdict = Verdict.GPU if s.on_gpu else Verdict.ENGINE
    device = "GPU" if s.on_gpu else "engine on this CPU"
    if s.waiting < 1:
        return Finding(verdict, Severity.OK, f"the {device} is busy and nobody waits: this is how it should be")
    return Finding(
        verdict,
        Severity.WARNING,
        f"{s.waiting:.0f} requests wait for the {device}, which runs {s.sequences:.0f} sequences",
        (
            "add a server, or a larger device" if s.on_gpu else "use a GPU, a smaller model, or more servers",
            "raise engine.max_sequences if the limit is reached and KV blocks are free",
            "with scheduler.dynamic_batch, scheduler.target_inter_token_s trades the pace of a stream for their number",
        ),
    )


def _gpu_full(s: Signals) -> bool:
    return s.gpu_utilisation is not None and s.gpu_utilisation >= HIGH_GPU_UTILISATION


def _no_limit(s: Signals) -> Finding:
    if s.active:
        return Finding(Verdict.UNHINDERED, Severity.OK, "requests run, and nothing holds them up")
    return Finding(Verdict.IDLE, Severity.OK, "no request ran")


_RULES: tuple[Callable[[Signals], Finding | None], ...] = (
    _tokenization,
    _launch,
    _grammar,
    _cores,
    _memory,
    _delivery,
    _device,
)
