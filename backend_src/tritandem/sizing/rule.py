"""The published rule of thumb: cores from the number of GPUs and the mean length of a prompt.

One pure function. Its result needs no measurement, and knows nothing about rates or about this project.
"""

from __future__ import annotations

import math

MIN_CORES = 4
REFERENCE_TOKENS = 1024


def rule_cores(gpus: int, mean_input_tokens: float) -> int:
    """max(4, gpus x (2 + log2(mean input tokens / 1024))), rounded up to whole cores."""
    exact = gpus * (2 + math.log2(mean_input_tokens / REFERENCE_TOKENS))
    # A hair above a whole number is rounding, not another core.
    return max(MIN_CORES, math.ceil(exact - 1e-9))
