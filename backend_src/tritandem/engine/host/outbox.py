"""Tokens on their way out: everything since the receiver last looked becomes one TokenBatch.

Owns the lock under which the core adds tokens and the receiver takes them; a slow receiver costs larger
messages, never a slower step. Knows nothing about steps or devices.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np

from ...contracts.arrays import Float32Array, Int32Array
from ...contracts.stream import FinishCode, LoadSnapshot, TokenBatch
from .sequence import SequenceState


class Outbox:
    """Sequences with news, in order of their oldest news."""

    def __init__(self) -> None:
        self.lock = threading.Lock()  # held by the core while it adds tokens to sequences
        self._news = threading.Condition(self.lock)
        self._pending: dict[int, SequenceState] = {}
        self._load = LoadSnapshot()
        self._closed = False

    def publish(self, sequences: Sequence[SequenceState], load: LoadSnapshot) -> None:
        """Announce sequences that have new tokens or an end. The caller holds `lock`."""
        self._load = load
        for sequence in sequences:
            self._pending[sequence.seq_id] = sequence
        if self._pending:
            self._news.notify_all()

    def take(self, timeout_s: float) -> TokenBatch | None:
        """Everything pending as one message; waits for news, None on timeout or after `close`."""
        with self._news:
            self._news.wait_for(lambda: self._pending or self._closed, timeout_s)
            if not self._pending:
                return None
            sequences = list(self._pending.values())
            self._pending = {}
            batch = _token_batch(sequences, self._load)
            for sequence in sequences:
                sequence.sent = len(sequence.output_ids)
                sequence.logprobs, sequence.top, sequence.scores = [], [], None
            return batch

    def close(self) -> None:
        with self._news:
            self._closed = True
            self._news.notify_all()


def _token_batch(sequences: Sequence[SequenceState], load: LoadSnapshot) -> TokenBatch:
    fresh = [sequence.output_ids[sequence.sent :] for sequence in sequences]
    counts = np.fromiter(map(len, fresh), np.int32, len(fresh))
    tokens = np.fromiter((token for tokens in fresh for token in tokens), np.int32, int(counts.sum()))
    logprobs, top_ids, top_logprobs = _logprob_arrays(sequences, counts)
    stamps = [(s.accepted_ns, s.prefill_start_ns, s.first_token_ns, s.latest_token_ns) for s in sequences]
    return TokenBatch(
        seq_ids=np.array([s.seq_id for s in sequences], np.int64),
        token_counts=counts,
        tokens=tokens,
        finish=np.fromiter((s.finish for s in sequences), np.uint8, len(sequences)),
        cached_tokens=np.array([s.cached_tokens for s in sequences], np.int32),
        stamps_ns=np.array(stamps, np.int64).reshape(-1, 4),
        load=load,
        logprobs=logprobs,
        top_ids=top_ids,
        top_logprobs=top_logprobs,
        errors={row: s.error for row, s in enumerate(sequences) if s.finish == FinishCode.ERROR},
        prompts={row: s.scores for row, s in enumerate(sequences) if s.scores is not None and s.output_ids},
    )


def _logprob_arrays(
    sequences: Sequence[SequenceState], counts: Int32Array
) -> tuple[Float32Array | None, Int32Array | None, Float32Array | None]:
    """Flat arrays over all tokens of the message; None when no sequence asked for them."""
    wanted = [-1 if s.request.sampling.logprobs is None else s.request.sampling.logprobs for s in sequences]
    if max(wanted) < 0:
        return None, None, None
    total, width = int(counts.sum()), max(wanted)
    logprobs = np.full(total, np.nan, np.float32)
    top_ids = np.full((total, width), -1, np.int32)
    top_logprobs = np.full((total, width), np.nan, np.float32)
    start = 0
    for sequence, count, alternatives in zip(sequences, counts, wanted, strict=True):
        if alternatives >= 0:
            logprobs[start : start + count] = sequence.logprobs
        if alternatives > 0:
            for row, (ids, values) in enumerate(sequence.top, start):
                top_ids[row, : len(ids)], top_logprobs[row, : len(ids)] = ids, values
        start += count
    return logprobs, (top_ids if width else None), (top_logprobs if width else None)
