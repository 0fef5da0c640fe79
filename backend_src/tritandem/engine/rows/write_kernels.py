"""What a step must know, from one packed copy into the slot rows and the inputs of a pass: one launch.

Owns the kernels only; `inputs.py` launches them. The fast twin of `SlotState.release_rows`,
`init_row` and `update_blocks`. What differs from step to step is an argument that is not
specialised, so that nothing compiles while streams run.
"""

# Constants of a kernel are written in capitals; `triton.jit` functions are not Python to a type checker.
# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,no-any-return"

from __future__ import annotations

import triton
import triton.language as tl

from .layout import INIT_HEAD, OFFSETS, ROW_WORDS

_ROW_WORDS = tl.constexpr(ROW_WORDS)
_LAST_TOKEN = tl.constexpr(OFFSETS["last_token"])
_LENGTH = tl.constexpr(OFFSETS["length"])
_FINISHED = tl.constexpr(OFFSETS["finished"])
_INIT_HEAD = tl.constexpr(INIT_HEAD)
_VARYING = ["inits", "releases", "updates", "decode_rows", "chunks", "lasts", "tokens", "T", "C", "pick"]

# The kinds of program are functions of their own: branches of one function may not differ in a name's type.


@triton.jit
def _rewrite_blocks(updates, block_table, slot, begin, end, max_blocks, BLOCK: tl.constexpr):
    """The row's blocks are the null block, except for its updates [begin, end)."""
    lanes = tl.arange(0, BLOCK)
    table = block_table + slot * max_blocks
    for start in range(0, max_blocks, BLOCK):
        tl.store(table + start + lanes, tl.zeros([BLOCK], tl.int32), mask=start + lanes < max_blocks)
    tl.debug_barrier()  # an entry is cleared by one thread and written by another
    for start in range(begin, end, BLOCK):
        ok = start + lanes < end
        update = updates + 3 * (start + lanes)
        tl.store(table + tl.load(update + 1, mask=ok, other=0), tl.load(update + 2, mask=ok, other=0), mask=ok)


@triton.jit
def _copy_row(init, state, slot, ROW_PAD: tl.constexpr):
    """The row of an init, which is packed as it lies in `state`."""
    lanes = tl.arange(0, ROW_PAD)
    ok = lanes < _ROW_WORDS
    tl.store(state + slot * _ROW_WORDS + lanes, tl.load(init + _INIT_HEAD + lanes, mask=ok), mask=ok)


@triton.jit
def _update_blocks(updates, count, part, block_table, max_blocks, BLOCK: tl.constexpr):
    index = part * BLOCK + tl.arange(0, BLOCK)
    ok = index < count
    slots = tl.load(updates + 3 * index, mask=ok, other=0).to(tl.int64)
    entry = slots * max_blocks + tl.load(updates + 3 * index + 1, mask=ok, other=0)
    tl.store(block_table + entry, tl.load(updates + 3 * index + 2, mask=ok, other=0), mask=ok)


@triton.jit
def _set_decode_rows(slots, count, part, rows, max_rows, pad_slot, BLOCK: tl.constexpr):
    index = part * BLOCK + tl.arange(0, BLOCK)
    given = tl.load(slots + index, mask=index < count, other=0)
    tl.store(rows + index, tl.where(index < count, given, pad_slot).to(tl.int64), mask=index < max_rows)


@triton.jit
def _spread_tokens(
    table,
    chunks,
    packed_ids,
    tokens,
    part,
    token_slots,
    ids,
    positions,
    T,
    pad_slot,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Slot, id and position of each packed token, padding behind them."""
    index = part * BLOCK + tl.arange(0, BLOCK)
    begun = tl.zeros([BLOCK], tl.int32)  # chunks that begin at or before the token: the last of them is its own
    for first in range(0, chunks, CHUNKS):
        number = first + tl.arange(0, CHUNKS)
        begins = tl.load(table + 4 * number + 2, mask=number < chunks, other=0x7FFFFFFF)
        begun += tl.sum((begins[None, :] <= index[:, None]).to(tl.int32), axis=1)
    ok = index < tokens
    chunk = table + 4 * (begun - 1)
    slots = tl.load(chunk, mask=ok, other=0)
    position = tl.load(chunk + 1, mask=ok, other=0) + index - tl.load(chunk + 2, mask=ok, other=0)
    tl.store(token_slots + index, tl.where(ok, slots, pad_slot).to(tl.int64), mask=index < T)
    tl.store(ids + index, tl.load(packed_ids + index, mask=ok, other=0), mask=index < T)
    tl.store(positions + index, tl.where(ok, position, 0), mask=index < T)


@triton.jit
def _spread_chunks(
    table,
    chunks,
    lasts,
    tokens,
    slots,
    last_rows,
    last_slots,
    starts,
    context_lens,
    C,
    pad_slot,
    BLOCK: tl.constexpr,
):
    """What attention and the choice of first tokens know of each chunk, padding behind them."""
    for first in range(0, C + 1, BLOCK):
        number = first + tl.arange(0, BLOCK)
        ok = number < chunks
        chunk = table + 4 * number
        slot = tl.load(chunk, mask=ok, other=0)
        begin = tl.load(chunk + 2, mask=ok, other=0)
        rank = tl.load(chunk + 3, mask=ok, other=-1)
        following = tl.load(chunk + 6, mask=number + 1 < chunks, other=0)
        end = tl.where(number + 1 < chunks, following, tokens)
        reach = tl.load(chunk + 1, mask=ok, other=0) + end - begin
        tl.store(starts + number, tl.where(ok, begin, tokens), mask=number <= C)
        tl.store(slots + number, tl.where(ok, slot, pad_slot).to(tl.int64), mask=number < C)
        tl.store(context_lens + number, tl.where(ok, reach, 0), mask=number < C)
        padding = (number >= lasts) & (number < C)
        tl.store(last_rows + number, tl.zeros([BLOCK], tl.int64), mask=padding)
        tl.store(last_slots + number, tl.zeros([BLOCK], tl.int64) + pad_slot, mask=padding)
        tl.store(last_rows + rank, (end - 1).to(tl.int64), mask=rank >= 0)
        tl.store(last_slots + rank, slot.to(tl.int64), mask=rank >= 0)


@triton.jit(do_not_specialize=_VARYING)
def step_input_kernel(
    words,  # int32: inits [.., INIT_WORDS], releases [.., 3], chunks [.., 4], updates [.., 3], decode rows, ids
    state,  # int32 [N + 1, ROW_WORDS]
    block_table,  # int32 [N + 1, max_blocks]
    rows,  # int64 [max_rows] of decode steps
    longs,  # int64, of a pass: token slots [T], slots [C], last rows [C], last slots [C]
    ints,  # int32, of a pass: ids [T], positions [T], starts [C + 1], context lengths [C], pick [1]
    inits,  # how many there are of each
    releases,
    updates,
    decode_rows,  # negative: they stay as they are
    chunks,
    lasts,
    tokens,
    T,  # 0: there is no pass
    C,
    pick,
    pad_slot,
    max_rows,
    max_blocks,
    ALIGN: tl.constexpr,  # each array in `longs` and `ints` begins at a multiple of so many
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,  # that a program looks at together
    ROW_PAD: tl.constexpr,  # ROW_WORDS, as a power of two
):
    """Programs: one an init, one a release, one for BLOCK updates, BLOCK decode rows and BLOCK tokens each, one for
    the chunks. Updates of rows that are rewritten here are written twice, with the same values."""
    program = tl.program_id(0)
    releases_at = words + inits * (_INIT_HEAD + _ROW_WORDS)
    chunks_at = releases_at + 3 * releases
    updates_at = chunks_at + 4 * chunks
    rows_at = updates_at + 3 * updates
    ids_at = rows_at + tl.maximum(decode_rows, 0)
    first_update = inits + releases
    first_row = first_update + tl.cdiv(updates, BLOCK)
    first_token = first_row + tl.where(decode_rows < 0, 0, tl.cdiv(max_rows, BLOCK))
    tokens_wide, chunks_wide = tl.cdiv(T, ALIGN) * ALIGN, tl.cdiv(C + 1, ALIGN) * ALIGN
    slots_out, starts_out = longs + tokens_wide, ints + 2 * tokens_wide

    if program < inits:
        init = words + program * (_INIT_HEAD + _ROW_WORDS)
        slot = tl.load(init).to(tl.int64)
        _rewrite_blocks(updates_at, block_table, slot, tl.load(init + 1), tl.load(init + 2), max_blocks, BLOCK)
        _copy_row(init, state, slot, ROW_PAD)
    elif program < first_update:
        release = releases_at + 3 * (program - inits)
        gone = tl.load(release).to(tl.int64)
        _rewrite_blocks(updates_at, block_table, gone, tl.load(release + 1), tl.load(release + 2), max_blocks, BLOCK)
        tl.store(state + gone * _ROW_WORDS + _FINISHED, 1)
    elif program < first_row:
        _update_blocks(updates_at, updates, program - first_update, block_table, max_blocks, BLOCK)
    elif program < first_token:
        _set_decode_rows(rows_at, decode_rows, program - first_row, rows, max_rows, pad_slot, BLOCK)
    elif program < first_token + tl.cdiv(T, BLOCK):
        part = program - first_token
        positions = ints + tokens_wide
        _spread_tokens(chunks_at, chunks, ids_at, tokens, part, longs, ints, positions, T, pad_slot, BLOCK, CHUNKS)
    else:
        last_rows, last_slots = slots_out + chunks_wide, slots_out + 2 * chunks_wide
        lens = starts_out + chunks_wide
        _spread_chunks(
            chunks_at, chunks, lasts, tokens, slots_out, last_rows, last_slots, starts_out, lens, C, pad_slot, BLOCK
        )
        tl.store(lens + chunks_wide, pick)


@triton.jit
def _begin_rows(part, rows, state, packed_ids, row_lens, logit_rows, choosing, S, BLOCK: tl.constexpr):
    """Decode rows come first in the pass; the logits of every one are wanted."""
    row = part * BLOCK + tl.arange(0, BLOCK)
    ok = row < S
    slot = tl.load(rows + row, mask=ok, other=0)
    own = state + slot * _ROW_WORDS
    at = tl.load(own + _LENGTH, mask=ok, other=0)
    idle = tl.load(own + _FINISHED, mask=ok, other=1) != 0
    tl.store(packed_ids + row, tl.load(own + _LAST_TOKEN, mask=ok, other=0).to(tl.int64), mask=ok)
    tl.store(row_lens + row, tl.where(idle, 0, at + 1), mask=ok)
    tl.store(logit_rows + row, row.to(tl.int64), mask=ok)
    tl.store(choosing + row, slot, mask=ok)


@triton.jit
def _begin_tokens(
    part,
    token_slots,
    ids,
    positions,
    block_table,
    packed_ids,
    wide_positions,
    slot_mapping,
    T,
    block_tokens,
    max_blocks,
    BLOCK: tl.constexpr,
):
    index = part * BLOCK + tl.arange(0, BLOCK)
    ok = index < T
    position = tl.load(positions + index, mask=ok, other=0)
    entry = tl.load(token_slots + index, mask=ok, other=0) * max_blocks + position // block_tokens
    block = tl.load(block_table + entry, mask=ok, other=0).to(tl.int64)
    tl.store(slot_mapping + index, block * block_tokens + position % block_tokens, mask=ok)
    tl.store(wide_positions + index, position.to(tl.int64), mask=ok)
    tl.store(packed_ids + index, tl.load(ids + index, mask=ok, other=0).to(tl.int64), mask=ok)


@triton.jit
def _begin_chunk(
    chunk,
    slots,
    last_rows,
    last_slots,
    context_lens,
    state,
    block_table,
    tables,
    logit_rows,
    choosing,
    S,
    max_blocks,
    BLOCK: tl.constexpr,
):
    slot = tl.load(slots + chunk)
    tl.store(state + slot * _ROW_WORDS + _LENGTH, tl.load(context_lens + chunk))
    tl.store(logit_rows + S + chunk, tl.load(last_rows + chunk) + S)
    tl.store(choosing + S + chunk, tl.load(last_slots + chunk))
    lanes = tl.arange(0, BLOCK)
    for start in range(0, max_blocks, BLOCK):
        ok = start + lanes < max_blocks
        blocks = tl.load(block_table + slot * max_blocks + start + lanes, mask=ok, other=0)
        tl.store(tables + chunk.to(tl.int64) * max_blocks + start + lanes, blocks, mask=ok)


@triton.jit(do_not_specialize=["S", "T", "C"])
def begin_pass_kernel(
    rows,  # int64 [S] slots that decode
    state,  # int32 [N + 1, ROW_WORDS]
    block_table,
    token_slots,  # what `step_input_kernel` left, from here
    slots,
    last_rows,
    last_slots,
    ids,
    positions,
    context_lens,
    packed_ids,  # int64 [S + T] out
    wide_positions,  # int64 [T] out
    slot_mapping,  # int64 [T] out
    row_lens,  # int32 [S] out: 0 for idle rows
    tables,  # int32 [C, max_blocks] out
    logit_rows,  # int64 [S + C] out: decode rows, then the packed index of the ends of prompts
    choosing,  # int64 [S + C] out: their slots
    record,  # int64 [1] number of the report this pass writes: counted up
    S,
    T,
    C,
    block_tokens,
    max_blocks,
    BLOCK: tl.constexpr,
):
    """Read what a pass feeds to the model. Programs: one for BLOCK decode rows and BLOCK tokens each, one a chunk.

    The chunks' lengths go up here already: nothing in the pass reads those of rows that do not decode.
    """
    program = tl.program_id(0)
    first_token = tl.cdiv(S, BLOCK)
    first_chunk = first_token + tl.cdiv(T, BLOCK)
    if program == 0:
        tl.store(record, tl.load(record) + 1)
    if program < first_token:
        _begin_rows(program, rows, state, packed_ids, row_lens, logit_rows, choosing, S, BLOCK)
    elif program < first_chunk:
        part = program - first_token
        token_ids = packed_ids + S
        _begin_tokens(
            part,
            token_slots,
            ids,
            positions,
            block_table,
            token_ids,
            wide_positions,
            slot_mapping,
            T,
            block_tokens,
            max_blocks,
            BLOCK,
        )
    else:
        chunk = program - first_chunk
        _begin_chunk(
            chunk,
            slots,
            last_rows,
            last_slots,
            context_lens,
            state,
            block_table,
            tables,
            logit_rows,
            choosing,
            S,
            max_blocks,
            BLOCK,
        )
