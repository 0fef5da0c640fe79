"""How long steps take: moving averages for the scheduler's estimates. Owned by the core's thread."""

from __future__ import annotations

from .step import StepResult

_SHARE = 0.1  # weight of the newest step


class Pace:
    """Decode steps are timed when they carry no prefill; a prefill's time is what it adds to a decode step."""

    def __init__(self) -> None:
        self.decode_step_ns = 0
        self.prefill_token_ns = 0
        self._previous_finish_ns = 0

    def note(self, result: StepResult, prefill_tokens: int) -> None:
        """A step launched ahead starts when its predecessor ends."""
        taken_ns = result.finished_ns - max(result.launched_ns, self._previous_finish_ns)
        self._previous_finish_ns = result.finished_ns
        if prefill_tokens:
            per_token_ns = max(0, taken_ns - self.decode_step_ns) // prefill_tokens
            self.prefill_token_ns = _average(self.prefill_token_ns, per_token_ns)
        else:
            self.decode_step_ns = _average(self.decode_step_ns, taken_ns)


def _average(old: int, new: int) -> int:
    return int(old + _SHARE * (new - old)) if old else new
