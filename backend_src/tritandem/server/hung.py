"""Which process of a server hangs: decided from what was seen of each at two looks or more. No clock, no I/O."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..config import WatchConfig

# A look that comes late says that this process got no core; the others may have had none either.
LONGEST_LOOK_S = 1.0
# Silence of so many seconds is worth asking the kernel who waits for a core.
SHORT_SILENCE_S = 2.0


@dataclass(frozen=True, slots=True)
class Sign:
    """Of one process at one look. `beat`: (beats so far, what hangs in it, in words); None: it does not beat."""

    name: str
    stopped: bool  # by a signal
    beat: tuple[int, str] | None = None


@dataclass(slots=True)
class _Record:
    sign: Sign
    stopped_s: float = 0.0
    silent_s: float = 0.0
    waited_s: float | None = None  # for a core, until the last look; None: not asked


class HungWatch:
    """`waited_s` gives the seconds that the threads of a process have waited for a core so far."""

    def __init__(self, limits: WatchConfig, waited_s: Callable[[int], float]) -> None:
        self._limits, self._waited_s = limits, waited_s
        self._records: dict[int, _Record] = {}
        self._looked_s = 0.0

    def look(self, signs: Mapping[int, Sign], now_s: float) -> dict[int, str]:
        """What is wrong, in words, by the id of each process that hangs."""
        passed_s, self._looked_s = now_s - self._looked_s, now_s
        records = {}
        for pid, sign in signs.items():
            record = self._records.get(pid, _Record(sign))
            self._note(pid, record, sign, passed_s)
            records[pid] = record
        self._records = records
        return {pid: what for pid, record in records.items() if (what := self._verdict(record))}

    def _note(self, pid: int, record: _Record, sign: Sign, passed_s: float) -> None:
        record.stopped_s = record.stopped_s + passed_s if sign.stopped and record.sign.stopped else 0.0
        if sign.beat is None or record.sign.beat is None or sign.beat[0] != record.sign.beat[0]:
            record.silent_s, record.waited_s = 0.0, None
        else:
            counted_s = min(passed_s, LONGEST_LOOK_S)
            if record.silent_s >= SHORT_SILENCE_S:
                waited_s = self._waited_s(pid)
                # Less than before: of threads that have ended the kernel knows nothing any more.
                counted_s -= max(0.0, waited_s - (waited_s if record.waited_s is None else record.waited_s))
                record.waited_s = waited_s
            record.silent_s += max(0.0, counted_s)
        record.sign = sign

    def _verdict(self, record: _Record) -> str:
        sign, limits = record.sign, self._limits
        if record.stopped_s > limits.stopped_s:
            return f"{sign.name} has been stopped by a signal"
        if record.silent_s > limits.silent_s:
            return f"{sign.name} has given no sign of life for {record.silent_s:.0f} s"
        if sign.beat is not None and sign.beat[1]:
            return f"{sign.name} hangs: {sign.beat[1]}"
        return ""
