"""Convolution, gated delta rule and norms of packed sequences, in the Triton language.

Owns the kernels only; `launches.py` launches them. All arithmetic is float32; what transformers keeps in the model's
type between two steps is rounded to it. The rule is Gated DeltaNet's (Yang et al. 2024, arXiv 2412.06464).
"""

# Constants of a kernel are written in capitals; `triton.jit` functions are not Python to a type checker.
# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,no-any-return"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def conv_kernel(
    mixed,  # [T, ...] queries, keys and values of a token, `mixed_token` elements apart
    weight,  # [C, KERNEL]
    state,  # [rows, C, KERNEL - 1]
    slots,  # int64 [S]
    starts,  # int32 [S + 1]
    context_lens,  # int32 [S]
    out,  # [T, C]
    mixed_token,
    key_at,  # elements from a token's first query to its first key
    value_at,
    key_group,  # elements from one group's queries (keys) to the next one's
    value_group,
    GROUPS: tl.constexpr,
    GROUP_HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    KERNEL: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Causal convolution along each sequence, then silu; the last inputs are kept. One program a head and sequence:
    the queries of all groups, their keys, the values of all heads."""
    unit, row = tl.program_id(0), tl.program_id(1)
    channels: tl.constexpr = GROUPS * (2 * DK + GROUP_HEADS * DV)
    begin, end = tl.load(starts + row).to(tl.int64), tl.load(starts + row + 1).to(tl.int64)
    context = tl.load(context_lens + row)
    count = end - begin
    fresh = context <= count
    is_value, is_key = unit >= 2 * GROUPS, unit >= GROUPS
    head = unit - 2 * GROUPS
    value_place = value_at + (head // GROUP_HEADS) * value_group + (head % GROUP_HEADS) * DV
    key_place = tl.where(is_key, key_at + (unit - GROUPS) * key_group, unit * key_group)
    place = tl.where(is_value, value_place, key_place)
    channel = tl.where(is_value, 2 * GROUPS * DK + head * DV, unit * DK)
    width = tl.where(is_value, DV, DK)
    dims = tl.arange(0, BLOCK_D)
    there = dims < width
    kept = state + (tl.load(slots + row) * channels + channel + dims) * (KERNEL - 1)
    source = mixed + begin * mixed_token + place + dims
    if context > 0:
        for base in range(0, count, BLOCK_T):
            steps = base + tl.arange(0, BLOCK_T)
            wanted = (steps < count)[:, None] & there[None, :]
            total = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
            for tap in tl.static_range(KERNEL):
                at = steps + tap - (KERNEL - 1)  # of the sequence's tokens in this pass; below 0: kept from before
                inside = (at >= 0)[:, None]
                x = tl.load(source[None, :] + at[:, None] * mixed_token, mask=wanted & inside, other=0.0)
                old = wanted & (at < 0)[:, None] & (fresh == 0)
                y = tl.load(kept[None, :] + at[:, None] + (KERNEL - 1), mask=old, other=0.0)
                w = tl.load(weight + (channel + dims) * KERNEL + tap, mask=there, other=0.0)
                total += (x.to(tl.float32) + y.to(tl.float32)) * w.to(tl.float32)[None, :]
            rounded = total.to(out.dtype.element_ty).to(tl.float32)
            silu = rounded / (1.0 + tl.exp(-rounded))
            target = out + (begin + steps)[:, None] * channels + channel + dims[None, :]
            tl.store(target, silu.to(out.dtype.element_ty), mask=wanted)
        taps = tl.arange(0, BLOCK_S)[:, None]
        at = count + taps - (KERNEL - 1)
        wanted = (taps < KERNEL - 1) & there[None, :]
        x = tl.load(source[None, :] + at * mixed_token, mask=wanted & (at >= 0), other=0.0)
        y = tl.load(kept[None, :] + at + (KERNEL - 1), mask=wanted & (at < 0) & (fresh == 0), other=0.0)
        tl.debug_barrier()  # from here on what was kept is written over
        tl.store(kept[None, :] + taps, x + y, mask=wanted)


@triton.jit
def delta_kernel(
    convolved,  # [T, C] queries, keys, values
    gate,  # [T, groups, GROUP_HEADS * DV]
    beta,  # [T, groups, GROUP_HEADS]
    decay,
    log_rate,  # [heads]
    decay_bias,  # [heads]
    norm_weight,  # [DV]
    state,  # float32 [rows, heads, DK, DV]
    slots,  # int64 [S]
    starts,  # int32 [S + 1]
    context_lens,  # int32 [S]
    out,  # [T, heads * DV]
    gate_token,  # elements from one token to the next
    gate_group,  # and from one group
    beta_token,
    beta_group,
    decay_token,
    decay_group,
    norm_eps,
    beta_scale,
    query_scale,
    GROUPS: tl.constexpr,
    GROUP_HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Token by token: the state decays, learns the value that it does not predict yet for the key, is asked with the
    query; the answer is normed and gated. One program a value head and sequence, whose state stays in registers."""
    head, row = tl.program_id(0), tl.program_id(1)
    heads: tl.constexpr = GROUPS * GROUP_HEADS
    channels: tl.constexpr = 2 * GROUPS * DK + heads * DV
    group, member = head // GROUP_HEADS, head % GROUP_HEADS
    begin, end = tl.load(starts + row).to(tl.int64), tl.load(starts + row + 1).to(tl.int64)
    context = tl.load(context_lens + row)
    keys, values = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    key_there, value_there = keys < DK, values < DV
    there = key_there[:, None] & value_there[None, :]
    place = state + (tl.load(slots + row) * heads + head) * (DK * DV) + keys[:, None] * DV + values[None, :]
    rate = -tl.exp(tl.load(log_rate + head).to(tl.float32))
    bias = tl.load(decay_bias + head).to(tl.float32)
    weight = tl.load(norm_weight + values, mask=value_there, other=0.0).to(tl.float32)
    kind = out.dtype.element_ty
    if context > 0:
        memory = tl.load(place, mask=there & (context > end - begin), other=0.0)
        for token in range(begin, end):
            line = convolved + token * channels
            query = tl.load(line + group * DK + keys, mask=key_there, other=0.0).to(tl.float32)
            key = tl.load(line + (GROUPS + group) * DK + keys, mask=key_there, other=0.0).to(tl.float32)
            value = tl.load(line + 2 * GROUPS * DK + head * DV + values, mask=value_there, other=0.0).to(tl.float32)
            z = tl.load(
                gate + token * gate_token + group * gate_group + member * DV + values, mask=value_there, other=0.0
            )
            b = tl.load(beta + token * beta_token + group * beta_group + member).to(tl.float32)
            a = tl.load(decay + token * decay_token + group * decay_group + member).to(tl.float32) + bias
            query = query * (tl.rsqrt(tl.sum(query * query) + 1e-6) * query_scale)
            key = key * tl.rsqrt(tl.sum(key * key) + 1e-6)
            strength = (1.0 / (1.0 + tl.exp(-b))).to(kind).to(tl.float32) * beta_scale
            softplus = tl.where(a > 20.0, a, tl.log(1.0 + tl.exp(tl.minimum(a, 20.0))))
            memory = memory * tl.exp(rate * softplus)
            predicted = tl.sum(memory * key[:, None], axis=0)
            answer = tl.sum(memory * query[:, None], axis=0)
            change = (value - predicted) * strength
            memory += key[:, None] * change[None, :]
            answer += tl.sum(key * query) * change
            answer = answer.to(kind).to(tl.float32)
            normed = answer * tl.rsqrt(tl.sum(answer * answer) / DV + norm_eps)
            normed = (normed.to(kind).to(tl.float32) * weight).to(kind).to(tl.float32)
            z = z.to(tl.float32)
            result = (normed * (z / (1.0 + tl.exp(-z)))).to(kind)
            tl.store(out + token * (heads * DV) + head * DV + values, result, mask=value_there)
        tl.store(place, memory, mask=there)
    else:
        for token in range(begin, end):
            zero = tl.zeros((BLOCK_V,), kind)
            tl.store(out + token * (heads * DV) + head * DV + values, zero, mask=value_there)


@triton.jit
def norm_kernel(
    x,  # [T, INNER, K]
    weight,  # [K]
    out,  # [T, INNER, K] contiguous
    eps,
    token_stride,  # elements from one token to the next
    inner_stride,
    INNER: tl.constexpr,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ZERO_CENTRED: tl.constexpr,
):
    """RMS norm, times 1 + weight, or rounded and times weight. One program a row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK_K)
    there = columns < K
    place = x + (row // INNER) * token_stride + (row % INNER) * inner_stride
    value = tl.load(place + columns, mask=there, other=0.0).to(tl.float32)
    scale = tl.load(weight + columns, mask=there, other=0.0).to(tl.float32)
    value = value * tl.rsqrt(tl.sum(value * value, axis=0) / K + eps)
    value = value * (1.0 + scale) if ZERO_CENTRED else value.to(out.dtype.element_ty).to(tl.float32) * scale
    tl.store(out + row * K + columns, value.to(out.dtype.element_ty), mask=there)
