"""The device's own record of every running sequence: one row (slot) per sequence for its whole life.

Owns the slot tensors and how a step changes them. Every operation is a fixed-shape tensor operation
without host synchronisation, so that it can be captured in a CUDA graph; `init_row` and `release_rows` are
the exceptions: they run between steps, from host values. Knows nothing about blocks or requests.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...contracts import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_STOP_TOKEN_IDS, FinishCode
from ..step import SlotInit

RECENT_TOKENS = MAX_BAD_WORD_TOKENS - 1


@dataclass(frozen=True, slots=True)
class PenaltyTables:
    """What penalties look at. Rows of sequences without penalties hold leftovers, which change nothing."""

    seen: torch.Tensor  # bool [N + 1, V] the token is in prompt or output
    output_counts: torch.Tensor  # int32 [N + 1, V]

    def init_row(self, slot: int, tokens: torch.Tensor, prompt_tokens: int) -> None:
        """`tokens`: int64, prompt then output."""
        tokens = tokens.to(self.seen.device)
        self.seen[slot] = False
        self.seen[slot, tokens] = True
        self.output_counts[slot] = 0
        outputs = tokens[prompt_tokens:]
        self.output_counts[slot].index_add_(0, outputs, torch.ones_like(outputs, dtype=torch.int32))

    def add(self, rows: torch.Tensor, tokens: torch.Tensor) -> None:
        self.seen[rows, tokens] = True
        self.output_counts.index_put_((rows, tokens), torch.ones_like(tokens, dtype=torch.int32), accumulate=True)


@dataclass(slots=True)
class SlotState:
    """N slots and one more row, `pad_slot` = N, for the padding rows of a batch: always finished, null blocks."""

    last_token: torch.Tensor  # int64 [N + 1] sampled, its K and V not stored yet
    length: torch.Tensor  # int32 [N + 1] tokens in the KV cache; the position of last_token
    remaining: torch.Tensor  # int32 [N + 1] output tokens still allowed
    produced: torch.Tensor  # int32 [N + 1] output tokens so far; the random counter
    finished: torch.Tensor  # bool [N + 1] the row idles
    block_table: torch.Tensor  # int32 [N + 1, max_blocks]
    stop_ids: torch.Tensor  # int64 [N + 1, MAX_STOP_TOKEN_IDS] filled with -1
    min_tokens: torch.Tensor  # int32 [N + 1]
    temperature: torch.Tensor  # float32 [N + 1], 0: greedy
    top_k: torch.Tensor  # int32 [N + 1], 0: off
    top_p: torch.Tensor  # float32 [N + 1]
    min_p: torch.Tensor  # float32 [N + 1]
    repetition_penalty: torch.Tensor  # float32 [N + 1]
    presence_penalty: torch.Tensor  # float32 [N + 1]
    frequency_penalty: torch.Tensor  # float32 [N + 1]
    seed: torch.Tensor  # int64 [N + 1]
    recent: torch.Tensor  # int64 [N + 1, RECENT_TOKENS] the last tokens, right-aligned, filled with -1
    bad_words: torch.Tensor  # int64 [N + 1, MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS] right-aligned, filled with -1
    vocab_size: int
    penalties: PenaltyTables | None = None  # exists once a penalty was used

    @classmethod
    def empty(cls, num_slots: int, max_blocks: int, vocab_size: int, device: torch.device | str) -> SlotState:
        rows = num_slots + 1

        def full(fill: float | bool, dtype: torch.dtype, *shape: int) -> torch.Tensor:
            return torch.full((rows, *shape), fill, dtype=dtype, device=device)

        i32, i64, f32 = torch.int32, torch.int64, torch.float32
        return cls(
            last_token=full(0, i64),
            length=full(0, i32),
            remaining=full(0, i32),
            produced=full(0, i32),
            finished=full(True, torch.bool),
            block_table=full(0, i32, max_blocks),
            stop_ids=full(-1, i64, MAX_STOP_TOKEN_IDS),
            min_tokens=full(0, i32),
            temperature=full(0, f32),
            top_k=full(0, i32),
            top_p=full(1, f32),
            min_p=full(0, f32),
            repetition_penalty=full(1, f32),
            presence_penalty=full(0, f32),
            frequency_penalty=full(0, f32),
            seed=full(0, i64),
            recent=full(-1, i64, RECENT_TOKENS),
            bad_words=full(-1, i64, MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS),
            vocab_size=vocab_size,
        )

    @property
    def pad_slot(self) -> int:
        return self.last_token.shape[0] - 1

    def ensure_penalties(self) -> PenaltyTables:
        """The tables, allocated on first use (5 bytes per slot and vocabulary entry)."""
        if self.penalties is None:
            shape, device = (self.last_token.shape[0], self.vocab_size), self.last_token.device
            self.penalties = PenaltyTables(
                torch.zeros(shape, dtype=torch.bool, device=device),
                torch.zeros(shape, dtype=torch.int32, device=device),
            )
        return self.penalties

    def init_row(self, init: SlotInit, max_context_tokens: int) -> None:
        """Write a new sequence's row. The block table follows by block updates."""
        slot, sampling = init.slot, init.sampling
        resident = len(init.prompt_ids) + len(init.output_ids)
        self.last_token[slot] = 0
        self.length[slot] = 0
        self.remaining[slot] = output_budget(sampling.max_tokens, len(init.prompt_ids), max_context_tokens) - len(
            init.output_ids
        )
        self.produced[slot] = len(init.output_ids)
        self.finished[slot] = False
        self.block_table[slot] = 0
        self.stop_ids[slot] = torch.tensor(padded_right(init.stop_ids, MAX_STOP_TOKEN_IDS))
        self.min_tokens[slot] = sampling.min_tokens
        self.temperature[slot] = sampling.temperature
        self.top_k[slot] = min(sampling.top_k, self.vocab_size)
        self.top_p[slot] = sampling.top_p
        self.min_p[slot] = sampling.min_p
        self.repetition_penalty[slot] = sampling.repetition_penalty
        self.presence_penalty[slot] = sampling.presence_penalty
        self.frequency_penalty[slot] = sampling.frequency_penalty
        self.seed[slot] = sampling.seed
        tokens = torch.zeros(resident, dtype=torch.int64)
        tokens[: len(init.prompt_ids)] = torch.as_tensor(init.prompt_ids)
        tokens[len(init.prompt_ids) :] = torch.as_tensor(init.output_ids)
        self.recent[slot] = torch.tensor(padded_left(tokens[-RECENT_TOKENS:].tolist(), RECENT_TOKENS))
        words = [padded_left(word, MAX_BAD_WORD_TOKENS) for word in init.bad_words]
        words += [[-1] * MAX_BAD_WORD_TOKENS] * (MAX_BAD_WORDS - len(words))
        self.bad_words[slot] = torch.tensor(words)
        if sampling.penalised:
            self.ensure_penalties().init_row(slot, tokens, len(init.prompt_ids))

    def release_rows(self, slots: list[int]) -> None:
        self.finished[slots] = True
        self.block_table[slots] = 0

    def advance(
        self, rows: torch.Tensor, tokens: torch.Tensor, broken: torch.Tensor, penalised: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take `tokens` (int64 [R]) as the next ones of `rows` (int64 [R]); finished rows change nothing.

        `broken` (bool [R]) marks rows whose logits were not finite. Returns the reported tokens
        (int32 [R], -1 for idle rows) and FinishCodes (uint8 [R]).
        """
        idle = self.finished[rows]
        stop = (self.stop_ids[rows] == tokens[:, None]).any(dim=1)
        remaining = self.remaining[rows] - 1
        finish = torch.zeros_like(tokens, dtype=torch.uint8)
        finish = finish.masked_fill(remaining <= 0, int(FinishCode.LENGTH))
        finish = finish.masked_fill(stop, int(FinishCode.STOP)).masked_fill(broken, int(FinishCode.ERROR))
        finish = finish.masked_fill(idle, int(FinishCode.RUNNING))
        recent = self.recent[rows]
        moved = torch.cat((recent[:, 1:], tokens[:, None]), dim=1)
        self.last_token[rows] = torch.where(idle, self.last_token[rows], tokens)
        self.remaining[rows] = torch.where(idle, self.remaining[rows], remaining)
        self.produced[rows] += (~idle).to(torch.int32)
        self.recent[rows] = torch.where(idle[:, None], recent, moved)
        self.finished[rows] = idle | (finish != 0)
        if penalised:
            self.ensure_penalties().add(rows, tokens)
        return torch.where(idle, -1, tokens).to(torch.int32), finish


def output_budget(max_tokens: int, prompt_tokens: int, max_context_tokens: int) -> int:
    """Output tokens that a sequence may produce: its own limit or what the context has left."""
    return min(max_tokens, max_context_tokens - prompt_tokens)


def padded_right(values: tuple[int, ...], width: int) -> list[int]:
    return [*values, *[-1] * (width - len(values))]


def padded_left(values: tuple[int, ...] | list[int], width: int) -> list[int]:
    return [*[-1] * (width - len(values)), *values]
