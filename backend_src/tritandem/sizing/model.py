"""Cores for a target rate, prompt and answer length: from measured costs, and by a rule of thumb. Pure functions.

Work is added up per component as busy cores. A core that is busy all the time makes others wait, so that the
sum is divided by a target utilisation; engines get whole cores of their own, because a step must never wait.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .coefficients import Coefficients

MIN_CORES = 4  # of the published rule
REFERENCE_TOKENS = 1024
TARGET_UTILISATION = 0.7
# The scheduler is one process: what it cannot send one by one it sends in larger responses.
SCHEDULER_BUSY_LIMIT = 0.8


@dataclass(frozen=True, slots=True)
class Workload:
    """What is to be served, over all GPUs. `decode_step_s`: how long one decode step takes on the device."""

    gpus: int
    input_tokens: float  # mean, of one prompt
    output_tokens: float  # mean, of one answer
    requests_per_s: float
    decode_step_s: float = 0.01
    fast_tokenizer: bool = True


@dataclass(frozen=True, slots=True)
class CoreNeed:
    """Busy cores by component, what they add up to, and which limits more cores would not lift."""

    tokenizer: float
    scheduler: float
    triton: float
    engine: float  # reserved, one or more whole cores a GPU
    cores: int
    tokens_per_response: float
    limits: tuple[str, ...]


def rule_cores(gpus: int, mean_input_tokens: float) -> int:
    """The published rule of thumb: max(4, gpus x (2 + log2(mean input tokens / 1024))), rounded up to whole cores."""
    exact = gpus * (2 + math.log2(mean_input_tokens / REFERENCE_TOKENS))
    # A hair above a whole number is rounding, not another core.
    return max(MIN_CORES, math.ceil(exact - 1e-9))


def core_need(workload: Workload, cost: Coefficients) -> CoreNeed:
    """The measured counterpart of `rule_cores`."""
    rate, limits = workload.requests_per_s, []
    fast = workload.fast_tokenizer and cost.tokenizer_fast_tokens_per_core_s > 0
    token_rate = cost.tokenizer_fast_tokens_per_core_s if fast else cost.tokenizer_slow_tokens_per_core_s
    tokenizer = rate * workload.input_tokens / token_rate
    per_response = tokens_per_response(rate, workload.output_tokens, cost)
    if math.isinf(per_response):
        limits.append("scheduler: requests alone take more than its one process has; run more servers")
        per_response = workload.output_tokens
    responses = rate * max(1.0, workload.output_tokens / per_response)
    scheduler = rate * cost.scheduler_cpu_s_per_request + responses * cost.scheduler_cpu_s_per_response
    triton = responses * cost.triton_cpu_s_per_response
    if per_response > 1 and not limits:
        limits.append(f"scheduler: one process; at this rate a response carries {per_response:.1f} tokens")
    busy_engine = cost.engine_host_s_per_step / workload.decode_step_s
    if busy_engine > 1:
        limits.append("engine: a step takes the host longer than the device; more cores do not help")
    engine = float(workload.gpus)
    cores = workload.gpus + math.ceil((tokenizer + scheduler + triton) / TARGET_UTILISATION - 1e-9)
    return CoreNeed(tokenizer, scheduler, triton, engine, max(1, cores), per_response, tuple(limits))


def tokens_per_response(requests_per_s: float, output_tokens: float, cost: Coefficients) -> float:
    """How many tokens share a response so that the scheduler keeps up: 1 while it can, inf when it never can."""
    left = SCHEDULER_BUSY_LIMIT - requests_per_s * cost.scheduler_cpu_s_per_request
    least = requests_per_s * cost.scheduler_cpu_s_per_response  # one response a request
    if left < least:
        return math.inf
    return max(1.0, requests_per_s * output_tokens * cost.scheduler_cpu_s_per_response / left)
