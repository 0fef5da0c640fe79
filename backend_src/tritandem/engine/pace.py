"""How long steps take: moving averages for the scheduler's estimates and the depth of launch-ahead.

Owned by the core's thread; knows nothing about sequences.
"""

from __future__ import annotations

from .step import StepResult

_SHARE = 0.1  # weight of the newest step
LAUNCH_AHEAD_NS = 3_000_000  # device work enqueued beyond the running step; more only delays who joins


class Pace:
    """Decode steps are timed when they carry no prefill; a prefill's time is what it adds to a decode step.

    Time and tokens of prefill are averaged apart: a step that prefills the last six tokens of a cached prompt
    says little about the price of a token and must not weigh as much as one that prefills a thousand.
    """

    def __init__(self) -> None:
        self.decode_step_ns = 0
        self._prefill_ns = self._prefill_tokens = 0.0
        self._previous_finish_ns = 0

    @property
    def prefill_token_ns(self) -> int:
        """0 until a prefill was timed."""
        return int(self._prefill_ns / self._prefill_tokens) if self._prefill_tokens else 0

    def note(self, result: StepResult, prefill_tokens: int) -> int:
        """The step's time in ns. A step launched ahead starts when its predecessor ends."""
        taken_ns = result.finished_ns - max(result.launched_ns, self._previous_finish_ns)
        self._previous_finish_ns = result.finished_ns
        if prefill_tokens:
            self._prefill_ns = _average(self._prefill_ns, max(0, taken_ns - self.decode_step_ns))
            self._prefill_tokens = _average(self._prefill_tokens, prefill_tokens)
        else:
            self.decode_step_ns = int(_average(self.decode_step_ns, taken_ns))
        return taken_ns

    def steps_ahead(self, most: int) -> int:
        """Launches to keep waiting behind the running step: as many as LAUNCH_AHEAD_NS holds, 1 to `most`.

        A prompt that arrives waits for all of them, so long steps need fewer; 0 where nothing is launched ahead.
        """
        if most == 0 or self.decode_step_ns == 0:
            return most
        return min(most, max(1, -(-LAUNCH_AHEAD_NS // self.decode_step_ns)))


def _average(old: float, new: float) -> float:
    return old + _SHARE * (new - old) if old else new
