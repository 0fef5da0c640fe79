"""Sums, choices and gathers over buffers that the ranks of one process read from each other, in the Triton language.

A call has a few stages: show one's part, wait for everybody's, combine. A program is a channel: it alone writes and
reads its part of every buffer, and counts its own calls (epochs) on the device, so that replays of a captured call go
on where the last one ended. Its halves of a buffer take turns: who waits for call e + 1 of a peer knows that the peer
has read call e. Owns the kernels only; `peers.py` launches them. Sums are float32 in the order of ranks.
"""

# Constants of a kernel are written in capitals; `triton.jit` functions are not Python to a type checker.
# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,no-any-return"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

SHOW, MIDDLE, COMBINE = 0, 1, 2  # stages; MIDDLE is the two-shot sum's own
_SHOW, _MIDDLE, _COMBINE = tl.constexpr(SHOW), tl.constexpr(MIDDLE), tl.constexpr(COMBINE)
PATIENCE, BROKEN, CONTROL_WORDS = 0, 1, 2  # words of `control`
_PATIENCE, _BROKEN = tl.constexpr(PATIENCE), tl.constexpr(BROKEN)
_POLLS_BETWEEN = tl.constexpr(1024)  # looks at the peer's word for one over the bus at the host's


@triton.jit
def _tell(flags, rank, phase: tl.constexpr, epoch, channels, RANKS: tl.constexpr):
    """Everything this program stored is to be seen by whoever sees `epoch`."""
    tl.debug_barrier()
    for peer in tl.static_range(RANKS):
        if peer != rank:
            at = flags[peer] + (phase * RANKS + rank) * channels + tl.program_id(0)
            tl.atomic_xchg(at, epoch, sem="release", scope="sys")


@triton.jit
def _await(
    own_flags,
    rank,
    phase: tl.constexpr,
    epoch,
    channels,
    control,
    failures,
    RANKS: tl.constexpr,
    CLOCK: tl.constexpr,
):
    """Until every peer has told `epoch`, or patience ends, or the host says so; then nobody waits any more here, and
    `failures` says for whom it was. Patience is in ns with CLOCK, in polls without; with none, nobody is missed."""
    patience = tl.load(control + _PATIENCE)
    alone = (patience == 0) | (tl.load(control + _BROKEN) != 0)
    patience = tl.where(alone, 0, patience)
    for peer in tl.static_range(RANKS):
        if peer != rank:
            at = own_flags + (phase * RANKS + peer) * channels + tl.program_id(0)
            seen = tl.atomic_add(at, 0, sem="acquire", scope="sys")
            if seen < epoch:
                began = patience * 0
                if CLOCK:
                    began = globaltimer()
                spent = patience * 0
                polls = 0
                while (seen < epoch) & (spent < patience):
                    seen = tl.atomic_add(at, 0, sem="acquire", scope="sys")
                    polls += 1
                    if CLOCK:
                        spent = globaltimer() - began
                    else:
                        spent += 1
                    if polls % _POLLS_BETWEEN == 0:  # noqa: SIM102 - `and` would load each time
                        if tl.load(failures, volatile=True) != 0:
                            spent = patience
                if (seen < epoch) & (not alone):
                    tl.store(failures + 1 + peer, 1)
                    tl.store(control + _BROKEN, 1)
    tl.debug_barrier()


@triton.jit
def _show(part, own, count, BLOCK: tl.constexpr):
    """This channel's tiles of `part`, one behind the other."""
    lanes = tl.arange(0, BLOCK)
    slot = 0
    for start in range(tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK):
        values = tl.load(part + start + lanes, mask=start + lanes < count)
        tl.store(own + slot + lanes, values, mask=start + lanes < count)
        slot += BLOCK


@triton.jit
def _total(buffers, half, slot, lanes, ok, RANKS: tl.constexpr, BLOCK: tl.constexpr):
    """float32 [BLOCK], added in the order of ranks."""
    total = tl.zeros([BLOCK], tl.float32)
    for peer in tl.static_range(RANKS):
        total += tl.load(buffers[peer] + half + slot + lanes, mask=ok, other=0.0, cache_modifier=".cg").to(tl.float32)
    return total


@triton.jit
def _half(epoch, region):
    """Where this channel's half of a buffer for call `epoch` begins; `region` elements are a multiple of 16."""
    return tl.multiple_of((tl.program_id(0).to(tl.int64) * 2 + (epoch & 1)) * region, 16)


@triton.jit(do_not_specialize=["rank"])
def one_shot_kernel(
    part,  # [count]
    residual,  # [count], read when HAS_RESIDUAL
    out,  # [count], may be `residual` or `part`
    own,  # [channels * 2 * region], this rank's buffer
    buffers,  # the same of every rank
    own_flags,  # int64 [2, RANKS, channels]: what each rank has told this one
    flags,  # the same of every rank
    epochs,  # int64 [channels]
    control,  # int64 [CONTROL_WORDS]
    failures,  # int32 [1 + RANKS] in host memory: its word to give up, then who did not come
    rank,
    count,
    channels,
    region,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    CLOCK: tl.constexpr,
    FIRST: tl.constexpr,  # stages
    LAST: tl.constexpr,
):
    """out = [residual +] the sum of every rank's `part`, each rank for itself."""
    channel = tl.program_id(0)
    epoch = tl.load(epochs + channel) + 1
    half = _half(epoch, region)
    if FIRST <= _SHOW:
        _show(part, own + half, count, BLOCK)
        _tell(flags, rank, 0, epoch, channels, RANKS)
    if LAST >= _COMBINE:
        _await(own_flags, rank, 0, epoch, channels, control, failures, RANKS, CLOCK)
        lanes = tl.arange(0, BLOCK)
        slot = 0
        for start in range(channel * BLOCK, count, tl.num_programs(0) * BLOCK):
            at = start + lanes
            total = _total(buffers, half, slot, lanes, at < count, RANKS, BLOCK)
            if HAS_RESIDUAL:
                total += tl.load(residual + at, mask=at < count, other=0.0).to(tl.float32)
            tl.store(out + at, total.to(out.dtype.element_ty), mask=at < count)
            slot += BLOCK
        tl.store(epochs + channel, epoch)


@triton.jit(do_not_specialize=["rank"])
def two_shot_kernel(
    part,
    residual,
    out,
    own,
    buffers,
    own_flags,
    flags,
    epochs,
    control,
    failures,
    rank,
    count,
    channels,
    region,  # all as in `one_shot_kernel`
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    CLOCK: tl.constexpr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
):
    """As `one_shot_kernel`, but each rank sums a part of the tiles for all, in place of what it showed: fewer bytes
    cross from three ranks on, for one more wait. The sum is rounded before the residual is added."""
    channel = tl.program_id(0)
    stride = tl.num_programs(0) * BLOCK
    lanes = tl.arange(0, BLOCK)
    epoch = tl.load(epochs + channel) + 1
    half = _half(epoch, region)
    if FIRST <= _SHOW:
        _show(part, own + half, count, BLOCK)
        _tell(flags, rank, 0, epoch, channels, RANKS)
    if (FIRST <= _MIDDLE) & (LAST >= _MIDDLE):
        _await(own_flags, rank, 0, epoch, channels, control, failures, RANKS, CLOCK)
        slot = rank * BLOCK  # tile k of a channel is rank k % RANKS's
        for start in range(channel * BLOCK + rank * stride, count, RANKS * stride):
            ok = start + lanes < count
            total = _total(buffers, half, slot, lanes, ok, RANKS, BLOCK)
            tl.store(own + half + slot + lanes, total.to(out.dtype.element_ty), mask=ok)
            slot += RANKS * BLOCK
        _tell(flags, rank, 1, epoch, channels, RANKS)
    if LAST >= _COMBINE:
        _await(own_flags, rank, 1, epoch, channels, control, failures, RANKS, CLOCK)
        for owner in tl.static_range(RANKS):
            slot = owner * BLOCK
            for start in range(channel * BLOCK + owner * stride, count, RANKS * stride):
                at = start + lanes
                value = tl.load(buffers[owner] + half + slot + lanes, mask=at < count, other=0.0, cache_modifier=".cg")
                if HAS_RESIDUAL:
                    more = tl.load(residual + at, mask=at < count, other=0.0).to(tl.float32)
                    value = (value.to(tl.float32) + more).to(out.dtype.element_ty)
                tl.store(out + at, value, mask=at < count)
                slot += RANKS * BLOCK
        tl.store(epochs + channel, epoch)


@triton.jit(do_not_specialize=["rank"])
def gather_kernel(
    part,  # [count], rows of `columns`
    out,  # rows of RANKS * columns
    own,
    buffers,
    own_flags,
    flags,
    epochs,
    control,
    failures,
    rank,
    count,
    channels,
    region,  # all as in `one_shot_kernel`
    columns,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
    CLOCK: tl.constexpr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
):
    """Every rank's columns beside each other, rank 0's first."""
    channel = tl.program_id(0)
    epoch = tl.load(epochs + channel) + 1
    half = _half(epoch, region)
    if FIRST <= _SHOW:
        _show(part, own + half, count, BLOCK)
        _tell(flags, rank, 0, epoch, channels, RANKS)
    if LAST >= _COMBINE:
        _await(own_flags, rank, 0, epoch, channels, control, failures, RANKS, CLOCK)
        lanes = tl.arange(0, BLOCK)
        slot = 0
        for start in range(channel * BLOCK, count, tl.num_programs(0) * BLOCK):
            at = start + lanes
            row = (at // columns).to(tl.int64)
            for peer in tl.static_range(RANKS):
                value = tl.load(buffers[peer] + half + slot + lanes, mask=at < count, cache_modifier=".cg")
                tl.store(out + row * (RANKS - 1) * columns + peer * columns + at, value, mask=at < count)
            slot += BLOCK
        tl.store(epochs + channel, epoch)


@triton.jit(do_not_specialize=["rank"])
def best_kernel(
    values,  # float32 [count]
    ids,  # int64 [count], below 2 ** 31
    best,  # float32 [count] out
    best_ids,  # int64 [count] out
    own,
    buffers,
    own_flags,
    flags,
    epochs,
    control,
    failures,
    rank,
    count,
    channels,
    region,  # all as in `one_shot_kernel`, in elements of int64
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
    CLOCK: tl.constexpr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
):
    """Of equal values the lowest id; NaN beats numbers. A value and its id are one word."""
    channel = tl.program_id(0)
    epoch = tl.load(epochs + channel) + 1
    half = _half(epoch, region)
    lanes = tl.arange(0, BLOCK)
    at = channel * BLOCK + lanes
    ok = at < count
    if FIRST <= _SHOW:
        bits = tl.load(values + at, mask=ok, other=0.0).to(tl.int32, bitcast=True)
        tl.store(own + half + lanes, (bits.to(tl.int64) << 32) | tl.load(ids + at, mask=ok, other=0), mask=ok)
        _tell(flags, rank, 0, epoch, channels, RANKS)
    if LAST >= _COMBINE:
        _await(own_flags, rank, 0, epoch, channels, control, failures, RANKS, CLOCK)
        word = tl.load(buffers[0] + half + lanes, mask=ok, other=0, cache_modifier=".cg")
        top = (word >> 32).to(tl.int32).to(tl.float32, bitcast=True)
        top_id = word & 0xFFFFFFFF
        for peer in tl.static_range(1, RANKS):
            word = tl.load(buffers[peer] + half + lanes, mask=ok, other=0, cache_modifier=".cg")
            value = (word >> 32).to(tl.int32).to(tl.float32, bitcast=True)
            better = (value > top) | ((value != value) & (top == top))
            same = (value == top) | ((value != value) & (top != top))
            take = better | (same & ((word & 0xFFFFFFFF) < top_id))
            top = tl.where(take, value, top)
            top_id = tl.where(take, word & 0xFFFFFFFF, top_id)
        tl.store(best + at, top, mask=ok)
        tl.store(best_ids + at, top_id, mask=ok)
        tl.store(epochs + channel, epoch)
