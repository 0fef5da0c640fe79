"""The layout of a slot row, said once: every field of a sequence that the device keeps, as int32 words side by side.

The host packs whole rows by it, kernels copy them and find single fields by their offsets, torch code sees a view a
field. Owns the packing of a new row as well. No torch here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from struct import Struct

import numpy as np

from ...contracts.fields import FIELDS as FIELDS_OF_SAMPLING
from ...contracts.fields import MAX_BAD_WORD_TOKENS, MAX_STOP_TOKEN_IDS
from ..step import SlotInit, output_budget

RECENT_TOKENS = MAX_BAD_WORD_TOKENS - 1
WORD_BYTES = 4
_WORDS_OF = {"i": 1, "f": 1, "q": 2}


@dataclass(frozen=True, slots=True)
class RowField:
    """`code` is struct's: i int32, f float32, q int64; `count` values of it."""

    name: str
    code: str
    count: int = 1

    @property
    def words(self) -> int:
        return _WORDS_OF[self.code] * self.count


# What a step changes.
STATE = (
    RowField("last_token", "i"),  # sampled, its K and V not stored yet
    RowField("length", "i"),  # tokens in the KV cache; the position of last_token
    RowField("remaining", "i"),  # output tokens still allowed
    RowField("produced", "i"),  # output tokens so far; the random counter
    RowField("finished", "i"),  # 1: the row idles
    RowField("structure_state", "i"),  # where in its table
)
# What the request asked for: fields of SamplingParams, as the table of sampling fields says.
SAMPLING = tuple(RowField(name, facts.row) for name, facts in FIELDS_OF_SAMPLING.items() if facts.row)
LISTS = (
    RowField("structure", "i"),  # FREE, MASKED or the number of a table
    RowField("bad_word_count", "i"),  # rows of `SlotState.bad_words` that are this sequence's
    RowField("bias_count", "i"),  # likewise of `bias_ids` and `bias_values`
    RowField("allowed_count", "i"),  # 0: all tokens are allowed, whatever `allowed_ids` holds
    RowField("stop_ids", "i", MAX_STOP_TOKEN_IDS),  # filled with -1
    RowField("recent", "i", RECENT_TOKENS),  # the last tokens, right-aligned, filled with -1
)
# Two-word fields first: they must begin at an even word.
FIELDS = tuple(sorted((*STATE, *SAMPLING, *LISTS), key=lambda f: f.code != "q"))
OFFSETS = dict(zip((f.name for f in FIELDS), accumulate((f.words for f in FIELDS), initial=0)))  # noqa: B905
_USED_WORDS = sum(f.words for f in FIELDS)
ROW_WORDS = _USED_WORDS + _USED_WORDS % 2  # so that every row begins at an even word
# An init travels as [slot, begin, end, row]; [begin, end) are its block updates.
INIT_HEAD = 3
INIT_WORDS = INIT_HEAD + ROW_WORDS
_ROW = Struct("=" + "".join(f"{f.count}{f.code}" for f in FIELDS) + f"{(ROW_WORDS - _USED_WORDS) * WORD_BYTES}x")


def pack_row(into: bytearray, at: int, init: SlotInit, max_context_tokens: int) -> None:
    """Write the row of a new sequence to `into[at : at + ROW_WORDS * 4]`. Its K and V are not stored yet."""
    sampling, outputs = init.sampling, len(init.output_ids)
    tail = init.prompt_ids[-RECENT_TOKENS:]
    if outputs:
        tail = np.concatenate((tail, init.output_ids))[-RECENT_TOKENS:]
    values = {f.name: getattr(sampling, f.name) for f in SAMPLING} | {
        "last_token": 0,
        "length": 0,
        "remaining": output_budget(sampling.max_tokens, len(init.prompt_ids), max_context_tokens) - outputs,
        "produced": outputs,
        "finished": 0,
        "structure": init.structure,
        "structure_state": init.structure_state,
        "bad_word_count": len(init.bad_words),
        "bias_count": len(init.logit_bias),
        "allowed_count": len(init.allowed_token_ids),
        "stop_ids": padded_right(init.stop_ids, MAX_STOP_TOKEN_IDS),
        "recent": padded_left(tail.tolist(), RECENT_TOKENS),
    }
    words: list[int | float] = []
    for f in FIELDS:
        value = values[f.name]
        words += value if f.count > 1 else [value]
    _ROW.pack_into(into, at, *words)


def padded_right(values: Sequence[int], width: int) -> list[int]:
    return [*values, *[-1] * (width - len(values))]


def padded_left(values: Sequence[int], width: int) -> list[int]:
    return [*[-1] * (width - len(values)), *values]
