"""Products of a mixture of experts in the Triton language: per (token, expert) pair, and in tiles of one expert.

Owns the kernels only; `launches.py` decides where they are used. Weights are [E, N, K], as E times `nn.Linear`. What
an expert gets is found on the device, by counting: nothing is sorted, and any routing fits the same grid.
"""

# Constants of a kernel are written in capitals; `triton.jit` functions are not Python to a type checker.
# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,no-any-return"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _gated(gate, up, alpha, limit, GATE: tl.constexpr):
    """`interface.Gate` of float32 values."""
    if GATE == "clamped":
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit) + 1.0
        turned = alpha * gate
    elif GATE == "gelu_tanh":  # 0.5 * (1 + tanh(y)) is sigmoid(2 * y)
        turned = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    else:
        turned = gate
    return gate * tl.sigmoid(turned) * up


@triton.jit
def route_kernel(
    logits,  # [T, E]
    index,  # int32 [T, TOP_K]
    scores,  # float32 [T, TOP_K]
    E,
    BLOCK_E: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    SUM_TO_ONE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """The TOP_K largest logits of a row and their weights: softmax over all experts, with SUM_TO_ONE over those taken.
    Of equal logits the first expert's is taken."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    experts = tl.arange(0, BLOCK_E)
    taken = tl.arange(0, BLOCK_T)
    left = tl.load(logits + row * E + experts, mask=experts < E, other=float("-inf")).to(tl.float32)
    top = tl.max(left, axis=0)
    total = tl.sum(tl.exp(left - top), axis=0)
    values = tl.zeros([BLOCK_T], dtype=tl.float32)
    ids = tl.zeros([BLOCK_T], dtype=tl.int32)
    for place in tl.static_range(TOP_K):
        best = tl.max(left, axis=0)
        # A row of NaN has no largest: it must still name experts that are there.
        at = tl.minimum(tl.min(tl.where(left == best, experts, BLOCK_E), axis=0), E - 1)
        values = tl.where(taken == place, tl.exp(best - top), values)
        ids = tl.where(taken == place, at, ids)
        left = tl.where(experts == at, float("-inf"), left)
    if SUM_TO_ONE:
        total = tl.sum(values, axis=0)
    tl.store(index + row * TOP_K + taken, ids, mask=taken < TOP_K)
    tl.store(scores + row * TOP_K + taken, values / total, mask=taken < TOP_K)


@triton.jit
def pair_gate_up_kernel(
    x,  # [T, K]
    index,  # [T, TOP_K]
    weight,  # [E, 2 * N, K]
    bias,  # HAS_BIAS: [E, 2 * N]
    out,  # [T * TOP_K, N]
    N,
    alpha,
    limit,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GATE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program: BLOCK_N columns of one (token, expert) pair, without the matrix unit."""
    pair = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    column_ok = columns < N
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    first = tl.load(index + pair).to(tl.int64) * 2 * N
    gate_rows = columns
    up_rows = columns + N
    if INTERLEAVED:
        gate_rows = 2 * columns
        up_rows = 2 * columns + 1
    gate_at = weight + (first + gate_rows)[:, None] * K + inner[None, :]
    up_at = weight + (first + up_rows)[:, None] * K + inner[None, :]
    x_at = x + (pair // TOP_K).to(tl.int64) * K + inner
    acc = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
    acc_up = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        inner_ok = inner < K - start
        ok = column_ok[:, None] & inner_ok[None, :]
        value = tl.load(x_at + start, mask=inner_ok, other=0.0).to(tl.float32)[None, :]
        acc += tl.load(gate_at + start, mask=ok, other=0.0, eviction_policy="evict_first").to(tl.float32) * value
        acc_up += tl.load(up_at + start, mask=ok, other=0.0, eviction_policy="evict_first").to(tl.float32) * value
    gate = tl.sum(acc, axis=1)
    up = tl.sum(acc_up, axis=1)
    if HAS_BIAS:
        gate += tl.load(bias + first + gate_rows, mask=column_ok, other=0.0).to(tl.float32)
        up += tl.load(bias + first + up_rows, mask=column_ok, other=0.0).to(tl.float32)
    at = out + pair.to(tl.int64) * N + columns
    tl.store(at, _gated(gate, up, alpha, limit, GATE).to(out.dtype.element_ty), mask=column_ok)


@triton.jit
def pair_down_kernel(
    act,  # [T * TOP_K, K]
    index,  # [T, TOP_K]
    scores,  # [T, TOP_K]
    weight,  # [E, N, K]
    bias,  # HAS_BIAS: [E, N]
    residual,  # HAS_RESIDUAL: [T, N], may be `out`
    out,  # [T, N]
    N,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program: BLOCK_N columns of one token, over all its experts; the same sum at every run."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    column_ok = columns < N
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    acc = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
    result = tl.zeros([BLOCK_N], dtype=tl.float32)
    for place in range(TOP_K):
        pair = row * TOP_K + place
        first = tl.load(index + pair).to(tl.int64) * N
        score = tl.load(scores + pair).to(tl.float32)
        at = weight + (first + columns)[:, None] * K + inner[None, :]
        for start in range(0, K, BLOCK_K):
            inner_ok = inner < K - start
            ok = column_ok[:, None] & inner_ok[None, :]
            value = score * tl.load(act + pair * K + start + inner, mask=inner_ok, other=0.0).to(tl.float32)
            w = tl.load(at + start, mask=ok, other=0.0, eviction_policy="evict_first").to(tl.float32)
            acc += w * value[None, :]
        if HAS_BIAS:
            result += score * tl.load(bias + first + columns, mask=column_ok, other=0.0).to(tl.float32)
    result += tl.sum(acc, axis=1)
    if HAS_RESIDUAL:
        result += tl.load(residual + row * N + columns, mask=column_ok, other=0.0).to(tl.float32)
    tl.store(out + row * N + columns, result.to(out.dtype.element_ty), mask=column_ok)


@triton.jit(do_not_specialize=["PAIRS"])
def plan_kernel(
    index,  # [PAIRS]
    order,  # int32 [PAIRS]: the pairs by expert, and by number within one
    begins,  # int32 [E + 1]: where each expert's begin in `order`
    PAIRS,
    E: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """A pair's place is the number of pairs before it, an expert's beginning the number of pairs of those before it.

    One program: BLOCK pairs, or behind all pairs BLOCK experts.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    program = tl.program_id(0)
    of_pairs = tl.cdiv(PAIRS, BLOCK)
    counts_pairs = program < of_pairs
    mine = tl.where(counts_pairs, program, program - of_pairs) * BLOCK + tl.arange(0, BLOCK)
    expert = mine
    if counts_pairs:
        expert = tl.load(index + mine, mask=mine < PAIRS, other=E).to(tl.int32)
    before = tl.zeros([BLOCK], dtype=tl.int32)
    for start in range(0, PAIRS, CHUNK):
        others = start + tl.arange(0, CHUNK)
        theirs = tl.load(index + others, mask=others < PAIRS, other=E).to(tl.int32)
        earlier = theirs[None, :] < expert[:, None]
        same = (theirs[None, :] == expert[:, None]) & (others[None, :] < mine[:, None]) & counts_pairs
        before += tl.sum((earlier | same).to(tl.int32), axis=1)
    if counts_pairs:
        tl.store(order + before, mine, mask=mine < PAIRS)
    else:
        tl.store(begins + mine, before, mask=mine <= E)


@triton.jit
def _tile(begins, E: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr):
    """(expert, first place in `order`, end of the expert's places) of this program's tile; expert E: there is none."""
    slot = tl.program_id(1)
    experts = tl.arange(0, BLOCK_E)
    first = tl.load(begins + experts, mask=experts < E, other=0)
    last = tl.load(begins + experts + 1, mask=experts < E, other=0)
    tiles = tl.cdiv(last - first, BLOCK_M)
    expert = tl.sum(((tl.cumsum(tiles, axis=0) <= slot) & (experts < E)).to(tl.int32), axis=0)
    before = tl.sum(tl.where(experts < expert, tiles, 0), axis=0)
    begin = tl.sum(tl.where(experts == expert, first, 0), axis=0) + (slot - before) * BLOCK_M
    return expert, begin, tl.sum(tl.where(experts == expert, last, 0), axis=0)


@triton.jit
def tile_gate_up_kernel(
    x,  # [T, K]
    order,  # int32 [T * TOP_K]
    begins,  # int32 [E + 1]
    weight,  # [E, 2 * N, K]
    bias,  # HAS_BIAS: [E, 2 * N]
    out,  # [T * TOP_K, N], in the order of `order`
    N,
    alpha,
    limit,
    K: tl.constexpr,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GATE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program: BLOCK_N columns for up to BLOCK_M tokens of one expert; the grid's second dimension counts tiles and
    may be larger than their number. Weights are the left operand, as in the few-row product."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    expert, begin, end = _tile(begins, E, BLOCK_E, BLOCK_M)
    if expert == E:
        return
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    places = begin + tl.arange(0, BLOCK_M)
    inner = tl.arange(0, BLOCK_K)
    column_ok = columns < N
    place_ok = places < end
    first = expert.to(tl.int64) * 2 * N
    gate_rows = columns
    up_rows = columns + N
    if INTERLEAVED:
        gate_rows = 2 * columns
        up_rows = 2 * columns + 1
    gate_at = weight + (first + gate_rows)[:, None] * K + inner[None, :]
    up_at = weight + (first + up_rows)[:, None] * K + inner[None, :]
    token = tl.load(order + places, mask=place_ok, other=0) // TOP_K
    x_at = x + token.to(tl.int64)[None, :] * K + inner[:, None]
    acc = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    acc_up = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        inner_ok = inner < K - start
        weight_ok = column_ok[:, None] & inner_ok[None, :]
        value = tl.load(x_at + start, mask=place_ok[None, :] & inner_ok[:, None], other=0.0)
        gate = tl.load(gate_at + start, mask=weight_ok, other=0.0)
        acc = tl.dot(gate, value, acc, input_precision="ieee")
        up = tl.load(up_at + start, mask=weight_ok, other=0.0)
        acc_up = tl.dot(up, value, acc_up, input_precision="ieee")
    if HAS_BIAS:
        acc += tl.load(bias + first + gate_rows, mask=column_ok, other=0.0).to(tl.float32)[:, None]
        acc_up += tl.load(bias + first + up_rows, mask=column_ok, other=0.0).to(tl.float32)[:, None]
    at = out + places[None, :].to(tl.int64) * N + columns[:, None]
    result = _gated(acc, acc_up, alpha, limit, GATE)
    tl.store(at, result.to(out.dtype.element_ty), mask=column_ok[:, None] & place_ok[None, :])


@triton.jit
def tile_down_kernel(
    act,  # [T * TOP_K, K], in the order of `order`
    order,  # int32 [T * TOP_K]
    begins,  # int32 [E + 1]
    scores,  # [T * TOP_K]
    weight,  # [E, N, K]
    bias,  # HAS_BIAS: [E, N]
    out,  # [T * TOP_K, N], by pair
    N,
    K: tl.constexpr,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """As above, times the routing's weight; what belongs to one token is summed afterwards."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    expert, begin, end = _tile(begins, E, BLOCK_E, BLOCK_M)
    if expert == E:
        return
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    places = begin + tl.arange(0, BLOCK_M)
    inner = tl.arange(0, BLOCK_K)
    column_ok = columns < N
    place_ok = places < end
    first = expert.to(tl.int64) * N
    weight_at = weight + (first + columns)[:, None] * K + inner[None, :]
    act_at = act + places.to(tl.int64)[None, :] * K + inner[:, None]
    acc = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        inner_ok = inner < K - start
        w = tl.load(weight_at + start, mask=column_ok[:, None] & inner_ok[None, :], other=0.0)
        value = tl.load(act_at + start, mask=place_ok[None, :] & inner_ok[:, None], other=0.0)
        acc = tl.dot(w, value, acc, input_precision="ieee")
    if HAS_BIAS:
        acc += tl.load(bias + first + columns, mask=column_ok, other=0.0).to(tl.float32)[:, None]
    pair = tl.load(order + places, mask=place_ok, other=0).to(tl.int64)
    acc = acc * tl.load(scores + pair, mask=place_ok, other=0.0).to(tl.float32)[None, :]
    at = out + pair[None, :] * N + columns[:, None]
    tl.store(at, acc.to(out.dtype.element_ty), mask=column_ok[:, None] & place_ok[None, :])


@triton.jit
def sum_pairs_kernel(
    parts,  # [T * TOP_K, N]
    residual,  # HAS_RESIDUAL: [T, N], may be `out`
    out,  # [T, N]
    N,
    TOP_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """out[t] = [residual[t] +] the sum of the token's parts, always in the same order."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    ok = columns < N
    total = tl.zeros([BLOCK_N], dtype=tl.float32)
    for place in tl.static_range(TOP_K):
        total += tl.load(parts + (row * TOP_K + place) * N + columns, mask=ok, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        total += tl.load(residual + row * N + columns, mask=ok, other=0.0).to(tl.float32)
    tl.store(out + row * N + columns, total.to(out.dtype.element_ty), mask=ok)
