"""How long steps take: moving averages for the scheduler's estimates, the depth of launch-ahead and its moment.

Owned by the core's thread; knows nothing about sequences.
"""

from __future__ import annotations

from collections import deque

from ..step import StepResult

_SHARE = 0.1  # weight of the newest step
_ENDED_SHARE = 1 / 256  # weight of the latest sequence that ended
MOST_BEHIND_NS = 2_000_000_000
PAUSE_NS = 120_000_000  # a step of prompts beside streams; the rest of the 150 ms is for what estimates miss
_PRICED_TOKENS = 64  # of a step that says what prompt tokens cost; a few say what a step costs
_LONGEST_ROUND_NS = 100_000_000  # between launches; longer ones were idle
LAUNCH_AHEAD_NS = 3_000_000  # device work enqueued beyond the running step; more only delays who joins
SLACK_NS = 1_000_000  # a launch must be done this long before the running step ends
_RECENT_STEPS = 8  # of a kind
_COST_DECAY = 0.98  # of the costliest launch, at each launch


class Pace:
    """Decode steps are timed when they carry no prefill; a prefill's time is what it adds to a decode step.

    Time and tokens of prefill are averaged apart: a step that prefills the last six tokens of a cached prompt
    says little about the price of a token and must not weigh as much as one that prefills a thousand.
    """

    def __init__(self) -> None:
        self.decode_step_ns = 0
        self._prefill_ns = self._prefill_tokens = 0.0
        self._chunk_ns = self._chunk_tokens = 0.0  # the same of steps of _PRICED_TOKENS or more
        self._previous_finish_ns = 0
        # (prefill tokens, ns) of the latest steps of a kind: those whose tokens have the same number of binary digits
        self._recent: dict[int, deque[tuple[int, int]]] = {}
        self._launch_ns = {False: 0.0, True: 0.0}  # host time of a launch, with prefill or without
        self._prompt_tokens = self._output_tokens = 0.0  # of a sequence that ended: prefilled, given
        self._behind_ns = self._previous_launch_ns = 0

    @property
    def prefill_token_ns(self) -> int:
        """0 until a prefill was timed."""
        return int(self._prefill_ns / self._prefill_tokens) if self._prefill_tokens else 0

    def note(self, result: StepResult, prefill_tokens: int) -> int:
        """The step's time in ns. A step launched ahead starts when its predecessor ends."""
        taken_ns = result.finished_ns - max(result.launched_ns, self._previous_finish_ns)
        self._previous_finish_ns = result.finished_ns
        if prefill_tokens:
            added_ns = max(0, taken_ns - self.decode_step_ns)
            self._prefill_ns = _average(self._prefill_ns, added_ns)
            self._prefill_tokens = _average(self._prefill_tokens, prefill_tokens)
            if prefill_tokens >= _PRICED_TOKENS:
                self._chunk_ns = _average(self._chunk_ns, added_ns)
                self._chunk_tokens = _average(self._chunk_tokens, prefill_tokens)
        else:
            self.decode_step_ns = int(_average(self.decode_step_ns, taken_ns))
        recent = self._recent.setdefault(prefill_tokens.bit_length(), deque(maxlen=_RECENT_STEPS))
        recent.append((prefill_tokens, taken_ns))
        return taken_ns

    @property
    def prompt_share(self) -> float:
        """Prompt tokens to prefill for each token that sequences give, by those that ended; 0 before any did."""
        return self._prompt_tokens / self._output_tokens if self._output_tokens else 0.0

    def note_end(self, prompt_tokens: int, output_tokens: int) -> None:
        """A sequence ended: what had to be prefilled for it and what it gave."""
        self._prompt_tokens += _ENDED_SHARE * (prompt_tokens - self._prompt_tokens)
        self._output_tokens += _ENDED_SHARE * (output_tokens - self._output_tokens)

    @property
    def behind_s(self) -> float:
        """Time in which prompts waited for chunks, less the time since in which none did; 2 s at most."""
        return self._behind_ns / 1e9

    @property
    def pause_tokens(self) -> int:
        """Prompt tokens that make a step as long as streams may pause, at the latest price; 0 until one was timed."""
        if not self._chunk_ns:
            return 0
        return max(1, int((PAUSE_NS - self.decode_step_ns) * self._chunk_tokens / self._chunk_ns))

    def note_backlog(self, launched_ns: int, behind: bool) -> None:
        """A step was launched, and prompts had to wait for a later one or not."""
        round_ns = min(_LONGEST_ROUND_NS, launched_ns - self._previous_launch_ns)
        self._previous_launch_ns = launched_ns
        self._behind_ns = min(MOST_BEHIND_NS, max(0, self._behind_ns + (round_ns if behind else -round_ns)))

    def note_launch(self, taken_ns: int, with_prefill: bool) -> None:
        """The host time that a launch took. The costliest counts, and is forgotten slowly."""
        self._launch_ns[with_prefill] = max(taken_ns, self._launch_ns[with_prefill] * _COST_DECAY)

    def launch_due_ns(self, running_since_ns: int, prefill_tokens: int, with_prefill: bool) -> int:
        """When to launch the step behind the only one on the device, which was launched at `running_since_ns` and
        prefills so many tokens; monotonic ns. Early enough for the device not to wait, going by the shortest of the
        latest steps of its kind (a smaller prefill never takes longer, and never less than its share of a larger
        one): whoever arrives until then joins the step instead of waiting for it. 0: none of that kind was timed.
        """
        recent = self._recent.get(prefill_tokens.bit_length())
        if recent is None:
            return 0
        takes_ns = min(ns * min(1.0, prefill_tokens / tokens) if tokens else ns for tokens, ns in recent)
        ends_ns = max(running_since_ns, self._previous_finish_ns) + takes_ns
        return int(ends_ns - self._launch_ns[with_prefill] - SLACK_NS)

    def steps_ahead(self, most: int) -> int:
        """Launches to keep waiting behind the running step: as many as LAUNCH_AHEAD_NS holds, 1 to `most`.

        A prompt that arrives waits for all of them, so long steps need fewer; 0 where nothing is launched ahead.
        """
        if most == 0 or self.decode_step_ns == 0:
            return most
        return min(most, max(1, -(-LAUNCH_AHEAD_NS // self.decode_step_ns)))


def _average(old: float, new: float) -> float:
    return old + _SHARE * (new - old) if old else new
