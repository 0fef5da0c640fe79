"""How often a stream may get a response, so that sending never takes the interpreter from those who decide.

A response takes as long with one token as with sixty: a sender waits for the interpreter, for a core and for Triton.
With many streams each gets its next response an interval after the last, with all tokens since, so that senders rest
for a part of their time; with few the interval is too short to matter. Called with the desk's lock held.
"""

from __future__ import annotations

FIRST_COST_NS = 100_000  # of a response, until some were sent
MOST_COST_NS = 500_000  # so that a busy machine does not make streams stand still
LEAST_NS = 4_000_000  # a shorter interval would only round what a sender's turn takes anyway
TICK_NS = 2_000_000  # intervals end on these, so that a sender that wakes finds several streams due
WEIGHT = 0.1  # of the newest figure in the mean cost


class Cadence:
    """`share` of the senders' time is what all responses together may take; 1 or more: no interval."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._cost_ns = float(FIRST_COST_NS)
        self.streams = 0  # that have got their first response and not their last

    def note_cost(self, busy_ns: float, responses: int) -> None:
        """So many responses took so much of all senders' time, their waits for work left out."""
        self._cost_ns += WEIGHT * (busy_ns / responses - self._cost_ns)

    def interval_ns(self) -> int:
        """Between two responses of one stream; 0: there is none."""
        if self._share >= 1:
            return 0
        interval_ns = int(self.streams * min(self._cost_ns, MOST_COST_NS) / self._share)
        return interval_ns if interval_ns >= LEAST_NS else 0

    def due_ns(self, taken_ns: int, now_ns: int) -> int:
        """When a stream may be sent to again whose last response was taken at `taken_ns`."""
        due_ns = taken_ns + self.interval_ns()
        return now_ns if due_ns <= now_ns else -(-due_ns // TICK_NS) * TICK_NS
