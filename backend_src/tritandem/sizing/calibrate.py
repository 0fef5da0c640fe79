"""Measures the coefficients of the sizing model on this machine: in this process, without server or GPU.

Owns the order of the measurements and the text that is tokenized. CPU time is that of the whole process, so that
helper threads count; run it on a machine that is otherwise quiet. Main thread.
"""

from __future__ import annotations

import dataclasses
import datetime
import os
import time
from collections.abc import Callable
from pathlib import Path

from ..config import TokenizerConfig
from ..tokenizer import TextTokenizer, load_tokenizer
from .coefficients import Coefficients, CoefficientsFile, load_coefficients
from .engine_cost import ROWS, engine_cost
from .scheduler_cost import scheduler_cost

MEASURED = "measured by `tritandem calibrate`"
PROMPT_CHARS = 30_000
_SENTENCES = (
    "The committee's report, published in {} pages, says nothing about the {} other cases. ",
    "def area_{}(width: float, height: float) -> float:\n    return width * height / {}\n\n",
    "Übermorgen fahren wir um {}:{} Uhr nach Köln; das Wetter soll schön werden! ",
    '{{"id": {}, "name": "sensor-{}", "values": [0.25, 17, null]}}\n',
    "Ask yourself whether step {} could be left out, and what step {} would then need. ",
)


def calibrate(model: Path, seconds: float, say: Callable[[str], None]) -> CoefficientsFile:
    """Measure for about `seconds` each; `say` gets a line a measurement. Raises ConfigError for a bad model."""
    defaults = load_coefficients()
    text = prompt_text(PROMPT_CHARS)
    slow = _tokenizer(model, fast=False)
    try:
        slow_rate = encode_rate(slow, text, seconds)
        say(f"tokenizer, slow path: {slow_rate:,.0f} tokens per core-second")
        per_request_s, per_response_s = scheduler_cost(slow.streams(), slow.vocab_size, seconds)
    finally:
        slow.close()
    say(f"scheduler: {1e6 * per_request_s:.0f} us a request, {1e6 * per_response_s:.0f} us a response")
    fast = _tokenizer(model, fast=True)
    try:
        fast_rate = encode_rate(fast, text, seconds) if fast.stats().fast_enabled else 0.0
    finally:
        fast.close()
    say(f"tokenizer, fast path: {f'{fast_rate:,.0f} tokens per core-second' if fast_rate else 'not in use here'}")
    step_s = engine_cost(seconds)
    say(f"engine: {1e6 * step_s:.0f} us of host time a step of {ROWS} sequences")
    values = Coefficients(
        tokenizer_fast_tokens_per_core_s=fast_rate,
        tokenizer_slow_tokens_per_core_s=slow_rate,
        scheduler_cpu_s_per_request=per_request_s,
        scheduler_cpu_s_per_response=per_response_s,
        triton_cpu_s_per_response=defaults.values.triton_cpu_s_per_response,
        engine_host_s_per_step=step_s,
    )
    sources = {field.name: MEASURED for field in dataclasses.fields(Coefficients)}
    sources["triton_cpu_s_per_response"] = defaults.sources["triton_cpu_s_per_response"]
    sources["engine_host_s_per_step"] = f"{MEASURED}: planning and bookkeeping of {ROWS} rows, without a device"
    return CoefficientsFile(datetime.date.today().isoformat(), machine_name(), values, sources)


def prompt_text(chars: int) -> str:
    """Prose, code, numbers and accents; no sentence twice the same, so that no cache of words does all the work."""
    parts: list[str] = []
    length = number = 0
    while length < chars:
        number += 1
        part = _SENTENCES[number % len(_SENTENCES)].format(number * 37 % 1009, number * 101 % 4099)
        parts.append(part)
        length += len(part)
    return "".join(parts)[:chars]


def machine_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's name and how many of its cores this process may use."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        lines = []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown CPU")
    return f"{model}, {len(os.sched_getaffinity(0))} cores"


def _tokenizer(model: Path, fast: bool) -> TextTokenizer:
    """One whose every text goes the same way, and nothing is remembered or checked beside."""
    return load_tokenizer(model, TokenizerConfig(fast=fast, shadow_check_rate=0.0, prefix_cache=False))


def encode_rate(tokenizer: TextTokenizer, text: str, seconds: float) -> float:
    """Tokens per second of CPU time, over at least `seconds` of it."""
    tokenizer.encode(text)  # lazy parts of the engines
    tokens, start_s = 0, time.process_time()
    while (spent_s := time.process_time() - start_s) < seconds or not tokens:
        tokens += len(tokenizer.encode(text).ids)
    return tokens / spent_s
