"""What a tokenizer counted, into a registry. `note` runs where texts are answered, the rest on a publisher's thread."""

from __future__ import annotations

from collections.abc import Callable

from ...telemetry import families as f
from ...telemetry.duration_counts import LockedDurationCounts
from ...telemetry.registry import Registry
from ...tokenizer import Encoded, TokenizerStats


class TokenizerReport:
    """Call it once a period. `process`: the label that keeps one instance's series apart from another's."""

    def __init__(self, registry: Registry, process: str, stats: Callable[[], TokenizerStats]) -> None:
        self._registry, self._process, self._stats = registry, process, stats
        self._queue_wait = LockedDurationCounts(f.TOKENIZE_QUEUE_WAIT, process=process)
        self._encode = LockedDurationCounts(f.TOKENIZE_ENCODE, process=process)
        self._trial = LockedDurationCounts(f.GRAMMAR_TRIAL, process=process)

    def note(self, encoded: Encoded) -> None:
        """One text is done. Any thread."""
        self._queue_wait.note(encoded.queue_ns)
        self._encode.note(encoded.encode_ns)

    def note_trial(self, taken_ns: int) -> None:
        """One grammar was tried. Any thread."""
        self._trial.note(taken_ns)

    def __call__(self) -> None:
        registry, process, stats = self._registry, self._process, self._stats()
        registry.set(f.TOKENIZATION_QUEUE, stats.queue_size, process=process)
        registry.set(f.TOKENIZER_FAST, float(stats.fast_enabled), process=process)
        registry.add_up_to(f.TOKENIZER_MISMATCHES, stats.shadow_mismatches, process=process)
        for path, texts in stats.texts.items():
            registry.add_up_to(f.TOKENIZED_TEXTS, texts, process=process, path=path)
        for path, tokens in stats.tokens.items():
            registry.add_up_to(f.TOKENIZED_TOKENS, tokens, process=process, path=path)
        registry.add_up_to(f.TOKENIZER_CACHE, stats.cache_hits, process=process, result="hit")
        registry.add_up_to(f.TOKENIZER_CACHE, stats.cache_misses, process=process, result="miss")
        for histogram in (self._queue_wait, self._encode, self._trial):
            counts, total_s = histogram.totals()
            registry.histogram_up_to(histogram.family, counts, total_s, **histogram.labels)
