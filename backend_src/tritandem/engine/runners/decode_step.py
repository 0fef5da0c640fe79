"""One decode step on CUDA as a fixed sequence of launches: slots -> model -> sample -> slots -> report ring.

Keep this file minimal: every token passes through it. Owns the step's input rows, its scratch tensors and the report
ring. Everything is of fixed shape for a batch size and set of sampling features, so that `graphs.py` can capture it.
Core thread, current stream.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from triton import next_power_of_2

from ...contracts.fields import MAX_TOP_LOGPROBS
from ..rows.advance_kernels import argmax_kernel, begin_kernel, greedy_advance_kernel, keep_logits_kernel, report_kernel
from ..rows.inputs import PassBatch, PassInputs, begin_pass
from ..rows.layout import RECENT_TOKENS
from ..rows.mask_kernels import await_masks_kernel, follow_kernel, mask_kernel, table_kernel
from ..rows.state import SlotState
from ..sampling.sampler import sample
from ..step import GREEDY, STRUCTURED, TABLED, SamplingFeatures, mask_words

_ARGMAX_PARTS = 32
_KEPT_AT_ONCE = 8192  # logits that one program copies
_MASKED_AT_ONCE = 128  # words of a mask, of 32 logits each
_TABLED_AT_ONCE = 2048  # logits
_MOST_POLLS = 5_000_000  # seconds: a host that writes no masks for so long writes none
WORDS_PER_ROW = 3 + 2 * MAX_TOP_LOGPROBS


class DecodeForward(Protocol):
    """Logits [R, V] of one token a row; `rows` int64 [R] are slots, `batch` has no block tables of its own."""

    def __call__(
        self, ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, context_lens: torch.Tensor
    ) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class Report:
    """Where reports go: `ring` int32 [depth, words] (pinned), `record` int64 [1] the number of the next one. And what
    steps with masks read and note, both pinned: `masks_ready` int64 [1], the newest record whose masks are written,
    and `mask_waits` int64 [depth], ns that a record's step waited for them."""

    ring: torch.Tensor
    record: torch.Tensor
    masks_ready: torch.Tensor
    mask_waits: torch.Tensor


class DecodeStep:
    """The step for up to `max_rows` rows; the slots that decode stand in `rows` (padding: the pad slot)."""

    def __init__(
        self, state: SlotState, forward: DecodeForward, report: Report, max_rows: int, max_firsts: int = 0
    ) -> None:
        """`max_firsts`: rows beside `max_rows` that `choose` may be given."""
        device = state.words.device
        self.rows = torch.full((max_rows,), state.pad_slot, dtype=torch.int64, device=device)
        self._pad_rows = self.rows.clone()
        self._state, self._forward, self._report = state, forward, report
        self._rehearsal = Report(
            torch.zeros_like(report.ring[:1], device=device),
            torch.zeros_like(report.record),
            torch.full_like(report.record, torch.iinfo(torch.int64).max),  # waits for nothing
            torch.zeros_like(report.record),
        )
        self._late = torch.zeros(1, dtype=torch.int32, device=device)
        self._always = torch.ones(1, dtype=torch.int32, device=device)
        self._best = torch.empty((max_rows + max_firsts, _ARGMAX_PARTS), dtype=torch.float32, device=device)
        self._best_ids = torch.empty_like(self._best, dtype=torch.int32)

    def enqueue(self, bucket: int, features: SamplingFeatures, rehearsal: bool = False) -> None:
        """Launch one step over the first `bucket` rows. A rehearsal compiles the kernels and leaves no trace."""
        ids, positions, context_lens, rows = self.begin(bucket, rehearsal)
        logits = self._forward(ids, positions, rows, context_lens)
        self.choose(logits, rows, features, bucket, rehearsal)

    def begin(self, bucket: int, rehearsal: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Read what the first `bucket` rows feed to the model and count the report up.

        Returns ids and positions (int64 [bucket]), context lengths (int32, 0 for idle rows) and the rows' slots.
        """
        rows = (self._pad_rows if rehearsal else self.rows)[:bucket]
        state = self._state
        ids, positions = torch.empty_like(rows), torch.empty_like(rows)
        context_lens = torch.empty(bucket, dtype=torch.int32, device=rows.device)
        begin_kernel[(bucket,)](
            rows,
            state.words,
            ids,
            positions,
            context_lens,
            (self._rehearsal if rehearsal else self._report).record,
            num_warps=1,
        )
        return ids, positions, context_lens, rows

    def begin_pass(
        self, inputs: PassInputs, bucket: int, choosing: torch.Tensor, block_tokens: int, rehearsal: bool
    ) -> tuple[PassBatch, torch.Tensor]:
        """The same for a pass of the first `bucket` rows (0 is allowed) and the chunks in `inputs`: what the model is
        fed and the rows' slots. `choosing` int64 [bucket + C] takes the slots that the pass has logits for."""
        rows = (self._pad_rows if rehearsal else self.rows)[:bucket]
        record = (self._rehearsal if rehearsal else self._report).record
        return begin_pass(inputs, self._state, rows, choosing, block_tokens, record), rows

    def choose(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        features: SamplingFeatures,
        decoding: int,
        rehearsal: bool = False,
    ) -> None:
        """Next tokens of `rows` (int64 [R] slots) from logits [R, V]: pick, advance the slots, report.

        The first `decoding` of them have stored one more token, so their length goes up too.
        """
        report = self._rehearsal if rehearsal else self._report
        structured = features.asked & {STRUCTURED, TABLED}
        if structured:
            self._keep_structures(logits, rows, structured, report)
            self._choose(logits, rows, replace(features, asked=features.asked - structured), decoding, report)
            if TABLED in structured:
                self._follow_tables(rows)
        else:
            self._choose(logits, rows, features, decoding, report)

    def _choose(
        self, logits: torch.Tensor, rows: torch.Tensor, features: SamplingFeatures, decoding: int, report: Report
    ) -> None:
        if features == GREEDY:
            self._pick(logits, rows, report, self._always, decoding)
            return
        state, count = self._state, rows.shape[0]
        sampled = sample(logits.float(), rows, state, features)
        state.store_one(rows[:decoding])
        tokens, finish = state.advance(rows, sampled.tokens, sampled.broken, features.penalised)
        top_ids, top_logprobs = sampled.top_ids, sampled.top_logprobs
        alternatives = top_ids.shape[1] if top_ids is not None else 0
        report_kernel[(count,)](
            tokens,
            finish,
            sampled.logprobs if sampled.logprobs is not None else tokens,
            top_ids if top_ids is not None else tokens,
            top_logprobs.contiguous() if top_logprobs is not None else tokens,
            report.record,
            report.ring,
            report.ring.shape[0],
            report.ring.shape[1],
            count,
            K=alternatives,
            K_PAD=next_power_of_2(max(1, alternatives)),
            HAS_LOGPROBS=sampled.logprobs is not None,
            num_warps=1,
        )

    def choose_if(
        self,
        active: torch.Tensor,
        logits: torch.Tensor,
        kept: torch.Tensor,
        rows: torch.Tensor,
        decoding: int,
        rehearsal: bool,
    ) -> None:
        """`choose` greedily where `active` (int32 [1]) holds; else nothing changes, and `logits` [R, V] are copied to
        `kept` for a `choose` that follows and reports into the same record."""
        count = logits.numel()
        keep_logits_kernel[(-(-count // _KEPT_AT_ONCE),)](logits, kept, active, count, BLOCK=_KEPT_AT_ONCE, num_warps=8)
        self._pick(logits, rows, self._rehearsal if rehearsal else self._report, active, decoding)

    def _keep_structures(self, logits: torch.Tensor, rows: torch.Tensor, kinds: frozenset[str], report: Report) -> None:
        """Change `logits` [R, V] to what the structures of `rows` allow, once the host has said what that is."""
        state, (count, vocab_size), words = self._state, logits.shape, self._state.masks.shape[1]
        if TABLED in kinds:
            table_kernel[(count, -(-vocab_size // _TABLED_AT_ONCE))](
                logits,
                rows,
                state.words,
                state.ensure_tables(),
                vocab_size,
                32 * mask_words(state.vocab_size),
                BLOCK=_TABLED_AT_ONCE,
                num_warps=4,
            )
        if STRUCTURED not in kinds:
            return
        await_masks_kernel[(1,)](
            report.masks_ready,
            report.record,
            self._late,
            report.mask_waits,
            report.mask_waits.shape[0],
            _MOST_POLLS,
            TIMED=logits.is_cuda,
            num_warps=1,
        )
        mask_kernel[(count, -(-words // _MASKED_AT_ONCE))](
            logits,
            rows,
            state.words,
            state.masks,
            self._late,
            vocab_size,
            words,
            BLOCK=_MASKED_AT_ONCE,
            num_warps=4,
        )

    def _follow_tables(self, rows: torch.Tensor) -> None:
        state = self._state
        follow_kernel[(len(rows),)](
            rows, state.words, state.ensure_tables(), 32 * mask_words(state.vocab_size), num_warps=1
        )

    def _pick(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        report: Report,
        active: torch.Tensor,
        decoding: int,
    ) -> None:
        state, (count, vocab_size) = self._state, logits.shape
        argmax_kernel[(count, _ARGMAX_PARTS)](
            logits,
            rows,
            active,
            state.words,
            self._best,
            self._best_ids,
            vocab_size,
            PARTS=_ARGMAX_PARTS,
            BLOCK_V=min(2048, next_power_of_2(-(-vocab_size // _ARGMAX_PARTS))),
            num_warps=4,
        )
        greedy_advance_kernel[(count,)](
            self._best,
            self._best_ids,
            rows,
            active,
            decoding,
            state.words,
            report.record,
            report.ring,
            report.ring.shape[0],
            report.ring.shape[1],
            count,
            PARTS=_ARGMAX_PARTS,
            RECENT_PAD=next_power_of_2(RECENT_TOKENS),
            num_warps=1,
        )
