"""Membership changes as arrays: what one step must write into the slot rows, packed for a single copy.

Owns the translation of releases, inits and block updates into fixed-width rows (host) and their scatter into
`SlotState` (device). The fast twin of `SlotState.init_row`, which writes field by field from the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..contracts import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_STOP_TOKEN_IDS, Int32Array
from .slots import RECENT_TOKENS, SlotState, output_budget, padded_left, padded_right
from .step import SlotInit

_INT32_FIELDS = ("remaining", "produced", "min_tokens", "top_k")
_FLOAT32_FIELDS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)


def pack_inits(inits: Sequence[SlotInit], vocab_size: int, max_context_tokens: int) -> list[NDArray[Any]]:
    """[slots, int32 fields, float32 fields, int64 rows (seed, stop ids, recent)], one line an init; then, if any
    has bad words, [their slots, their words]."""
    slots = np.array([init.slot for init in inits], np.int64)
    ints = np.empty((len(inits), len(_INT32_FIELDS)), np.int32)
    floats = np.empty((len(inits), len(_FLOAT32_FIELDS)), np.float32)
    longs = np.empty((len(inits), 1 + MAX_STOP_TOKEN_IDS + RECENT_TOKENS), np.int64)
    for row, init in enumerate(inits):
        sampling, prompt_tokens, output_tokens = init.sampling, len(init.prompt_ids), len(init.output_ids)
        budget = output_budget(sampling.max_tokens, prompt_tokens, max_context_tokens)
        ints[row] = (
            budget - output_tokens,
            output_tokens,
            min(sampling.min_tokens, 2**31 - 1),
            min(sampling.top_k, vocab_size),
        )
        floats[row] = [getattr(sampling, name) for name in _FLOAT32_FIELDS]
        tail = np.concatenate((init.prompt_ids[-RECENT_TOKENS:], init.output_ids))[-RECENT_TOKENS:]
        longs[row] = [
            sampling.seed,
            *padded_right(init.stop_ids, MAX_STOP_TOKEN_IDS),
            *padded_left(tail.tolist(), RECENT_TOKENS),
        ]
    arrays: list[NDArray[Any]] = [slots, ints, floats, longs]
    banning = [init for init in inits if init.bad_words]
    if banning:
        words = np.full((len(banning), MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS), -1, np.int64)
        for row, init in enumerate(banning):
            for index, word in enumerate(init.bad_words):
                words[row, index] = padded_left(word, MAX_BAD_WORD_TOKENS)
        arrays += [np.array([init.slot for init in banning], np.int64), words]
    return arrays


def scatter_inits(state: SlotState, arrays: Sequence[torch.Tensor]) -> None:
    """Write packed inits (device views, as `pack_inits` orders them) into their rows."""
    slots, ints, floats, longs, *banning = arrays
    state.last_token.index_fill_(0, slots, 0)
    state.length.index_fill_(0, slots, 0)
    state.block_table.index_fill_(0, slots, 0)
    for column, name in enumerate(_INT32_FIELDS):
        getattr(state, name).index_copy_(0, slots, ints[:, column])
    for column, name in enumerate(_FLOAT32_FIELDS):
        getattr(state, name).index_copy_(0, slots, floats[:, column])
    state.seed.index_copy_(0, slots, longs[:, 0])
    state.stop_ids.index_copy_(0, slots, longs[:, 1 : 1 + MAX_STOP_TOKEN_IDS])
    state.recent.index_copy_(0, slots, longs[:, 1 + MAX_STOP_TOKEN_IDS :])
    state.bad_words.index_fill_(0, slots, -1)
    if banning:
        state.bad_words.index_copy_(0, banning[0], banning[1])
    state.finished.index_fill_(0, slots, False)


def scatter_releases(state: SlotState, slots: torch.Tensor) -> None:
    """`slots` int64 [n]: the rows idle and point at the null block."""
    state.finished.index_fill_(0, slots, True)
    state.block_table.index_fill_(0, slots, 0)


def pack_block_updates(updates: Int32Array, max_blocks: int) -> list[NDArray[Any]]:
    """[U, 3] slot, index, block -> [flat positions in the block table, blocks]."""
    return [updates[:, 0].astype(np.int64) * max_blocks + updates[:, 1], np.ascontiguousarray(updates[:, 2])]


def scatter_block_updates(state: SlotState, arrays: Sequence[torch.Tensor]) -> None:
    positions, blocks = arrays
    state.block_table.view(-1).index_copy_(0, positions, blocks)
