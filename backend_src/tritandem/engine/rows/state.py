"""The device's own record of every running sequence: one row (slot) per sequence for its whole life.

Owns the slot tensors and how a step changes them; nothing outside this room writes a row. Every operation is a
fixed-shape tensor operation without host synchronisation, so that it can be captured in a CUDA graph; `init_row`,
`release_rows` and `write_rare` are the exceptions: they run between steps, from host values. Knows nothing about
blocks or requests.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from ...contracts.fields import MAX_ALLOWED_TOKEN_IDS, MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_LOGIT_BIAS
from ...contracts.stream import FinishCode
from ..step import PENALISED, TABLE_CLASSES, TABLE_PLACES, TABLES, SlotInit, mask_words, table_words
from .layout import FIELDS, OFFSETS, ROW_WORDS, WORD_BYTES, pack_row, padded_left

_TORCH_TYPES = {"i": torch.int32, "f": torch.float32, "q": torch.int64}


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
        # By a tensor: a number of Python's would be copied from the host, which waits for the device and fits no graph.
        self.seen.index_put_((rows, tokens), torch.ones_like(tokens, dtype=torch.bool))
        self.output_counts.index_put_((rows, tokens), torch.ones_like(tokens, dtype=torch.int32), accumulate=True)


@dataclass(slots=True)
class SlotState:
    """N slots and one more row, `pad_slot` = N, for the padding rows of a batch: always finished, null blocks.

    A field of `layout.FIELDS` is an attribute: a view [N + 1] of `words`, or [N + 1, count] where it holds several
    values, in the field's own type.
    """

    words: torch.Tensor  # int32 [N + 1, ROW_WORDS]
    block_table: torch.Tensor  # int32 [N + 1, max_blocks]
    bad_words: torch.Tensor  # int32 [N + 1, MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS] right-aligned, filled with -1
    bias_ids: torch.Tensor  # int64 [N + 1, MAX_LOGIT_BIAS]
    bias_values: torch.Tensor  # float32, likewise
    allowed_ids: torch.Tensor  # int64 [N + 1, MAX_ALLOWED_TOKEN_IDS] behind the row's own stands its first again
    masks: torch.Tensor  # int32 [N + 1, mask_words] in host memory, a bit a token; of rows that are MASKED
    vocab_size: int
    penalties: PenaltyTables | None = None  # exists once a penalty was used
    tables: torch.Tensor | None = None  # int32 [TABLE_PLACES, table_words]; exists once a table was written
    _views: dict[str, torch.Tensor] = field(default_factory=dict, repr=False)

    @classmethod
    def empty(
        cls,
        num_slots: int,
        max_blocks: int,
        vocab_size: int,
        device: torch.device | str,
        masks: torch.Tensor | None = None,
    ) -> SlotState:
        """`masks`: memory that a device other than the CPU can read."""
        rows = num_slots + 1
        if masks is None:
            masks = torch.zeros((rows, mask_words(vocab_size)), dtype=torch.int32)
        state = cls(
            words=torch.zeros((rows, ROW_WORDS), dtype=torch.int32, device=device),
            block_table=torch.zeros((rows, max_blocks), dtype=torch.int32, device=device),
            bad_words=torch.full((rows, MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS), -1, dtype=torch.int32, device=device),
            bias_ids=torch.zeros((rows, MAX_LOGIT_BIAS), dtype=torch.int64, device=device),
            bias_values=torch.zeros((rows, MAX_LOGIT_BIAS), dtype=torch.float32, device=device),
            allowed_ids=torch.zeros((rows, MAX_ALLOWED_TOKEN_IDS), dtype=torch.int64, device=device),
            masks=masks,
            vocab_size=vocab_size,
        )
        state.finished.fill_(1)
        state.stop_ids.fill_(-1)
        return state

    def __post_init__(self) -> None:
        for f in FIELDS:
            dtype = _TORCH_TYPES[f.code]
            width = dtype.itemsize // WORD_BYTES
            first = OFFSETS[f.name] // width
            typed = self.words.view(dtype)
            self._views[f.name] = typed[:, first] if f.count == 1 else typed[:, first : first + f.count]

    def __getattr__(self, name: str) -> torch.Tensor:
        try:
            return self._views[name]
        except KeyError:
            raise AttributeError(name) from None

    @property
    def pad_slot(self) -> int:
        return self.words.shape[0] - 1

    def ensure_penalties(self) -> PenaltyTables:
        """The tables, allocated on first use (5 bytes per slot and vocabulary entry)."""
        if self.penalties is None:
            shape, device = (self.words.shape[0], self.vocab_size), self.words.device
            self.penalties = PenaltyTables(
                torch.zeros(shape, dtype=torch.bool, device=device),
                torch.zeros(shape, dtype=torch.int32, device=device),
            )
        return self.penalties

    # Between steps -------------------------------------------------------------------------------------

    def init_row(self, init: SlotInit, max_context_tokens: int) -> None:
        """Write a new sequence's row. The block table follows by block updates."""
        packed = bytearray(ROW_WORDS * WORD_BYTES)
        pack_row(packed, 0, init, max_context_tokens)
        self.words[init.slot] = torch.from_numpy(np.frombuffer(packed, np.int32).copy()).to(self.words.device)
        self.block_table[init.slot] = 0
        self.write_rare(init)

    def write_rare(self, init: SlotInit) -> None:
        """What the row itself does not carry: lists of tokens and the tables of penalties."""
        if init.bad_words:
            words = torch.tensor([padded_left(word, MAX_BAD_WORD_TOKENS) for word in init.bad_words])
            self.bad_words[init.slot, : len(words)] = words.to(self.bad_words)
        if init.logit_bias:
            ids, values = zip(*init.logit_bias, strict=True)
            self.bias_ids[init.slot, : len(ids)] = torch.tensor(ids).to(self.bias_ids)
            self.bias_values[init.slot, : len(ids)] = torch.tensor(values).to(self.bias_values)
        if init.allowed_token_ids:
            allowed = init.allowed_token_ids
            padded = [*allowed, *[allowed[0]] * (MAX_ALLOWED_TOKEN_IDS - len(allowed))]
            self.allowed_ids[init.slot] = torch.tensor(padded).to(self.allowed_ids)
        if PENALISED in init.sampling.features:
            tokens = torch.from_numpy(np.concatenate((init.prompt_ids, init.output_ids)).astype(np.int64))
            self.ensure_penalties().init_row(init.slot, tokens, len(init.prompt_ids))

    def ensure_tables(self) -> torch.Tensor:
        """uint8 [TABLE_PLACES, 4 * table_words]: of each the classes, then the moves; allocated on first use."""
        if self.tables is None:
            shape = (TABLE_PLACES, table_words(self.vocab_size))
            self.tables = torch.zeros(shape, dtype=torch.int32, device=self.words.device)
        return self.tables.view(torch.uint8)

    def write_table(self, place: int, words: torch.Tensor) -> None:
        """`words`: int32, on the device."""
        self.ensure_tables().view(torch.int32)[place] = words

    def table_rows(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Whether `rows` are followed by a table (bool [R]), the classes of all tokens there (uint8 [R, V]) and the
        next state of each class (uint8 [R, TABLE_CLASSES]); of rows without one anything."""
        tables, tokens = self.ensure_tables(), 32 * mask_words(self.vocab_size)
        place = self.structure[rows] - TABLES
        own = tables[place.clamp(min=0)]
        moves = own[:, tokens:].view(len(rows), -1, TABLE_CLASSES)
        return place >= 0, own[:, : self.vocab_size], moves[torch.arange(len(rows)), self.structure_state[rows]]

    def release_rows(self, slots: list[int]) -> None:
        self.finished[slots] = 1
        self.block_table[slots] = 0

    def update_blocks(self, updates: torch.Tensor) -> None:
        """`updates` int [U, 3]: slot, index in its block table, block id."""
        slot, index, block = updates.long().unbind(dim=1)
        self.block_table[slot, index] = block.to(torch.int32)

    # In a step -----------------------------------------------------------------------------------------

    def idle(self, rows: torch.Tensor) -> torch.Tensor:
        """bool [R]"""
        return self.finished[rows] != 0

    def set_lengths(self, slots: torch.Tensor, lengths: torch.Tensor) -> None:
        """So many tokens (int32 [C]) of `slots` (int64 [C]) are in the KV cache now."""
        self.length.index_copy_(0, slots, lengths)

    def store_one(self, rows: torch.Tensor) -> None:
        """The last token of `rows` (int64 [R]) is in the KV cache now; idle ones store nothing."""
        self.length[rows] += 1 - self.finished[rows]

    def follow_tables(self, rows: torch.Tensor) -> None:
        """Behind `advance`: the tables' states after the tokens that were taken. On the CPU; `rows/mask_kernels.py` has
        the fast twin."""
        tabled, classes, moves = self.table_rows(rows)
        kind = classes.gather(1, self.last_token[rows].long().clamp(0, self.vocab_size - 1)[:, None])
        following = moves.gather(1, kind.long())[:, 0].to(torch.int32)
        going = tabled & ~self.idle(rows)
        self.structure_state[rows] = torch.where(going, following, self.structure_state[rows])

    def advance(
        self, rows: torch.Tensor, tokens: torch.Tensor, broken: torch.Tensor, penalised: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take `tokens` (int64 [R]) as the next ones of `rows` (int64 [R]); finished rows change nothing.

        `broken` (bool [R]) marks rows whose logits were not finite. Returns the reported tokens
        (int32 [R], -1 for idle rows) and FinishCodes (uint8 [R]).
        """
        idle, ids = self.idle(rows), tokens.to(torch.int32)
        stop = (self.stop_ids[rows] == ids[:, None]).any(dim=1)
        remaining = self.remaining[rows] - 1
        finish = torch.zeros_like(tokens, dtype=torch.uint8)
        finish = finish.masked_fill(remaining <= 0, int(FinishCode.LENGTH))
        finish = finish.masked_fill(stop, int(FinishCode.STOP)).masked_fill(broken, int(FinishCode.ERROR))
        finish = finish.masked_fill(idle, int(FinishCode.RUNNING))
        recent = self.recent[rows]
        moved = torch.cat((recent[:, 1:], ids[:, None]), dim=1)
        self.last_token[rows] = torch.where(idle, self.last_token[rows], ids)
        self.remaining[rows] = torch.where(idle, self.remaining[rows], remaining)
        self.produced[rows] += (~idle).to(torch.int32)
        self.recent[rows] = torch.where(idle[:, None], recent, moved)
        self.finished[rows] = (idle | (finish != 0)).to(torch.int32)
        if penalised:
            self.ensure_penalties().add(rows, tokens)
        return torch.where(idle, -1, ids), finish
