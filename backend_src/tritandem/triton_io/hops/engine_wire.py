"""The engine's messages as a few flat arrays: requests in, token batches and load snapshots out.

Owns the layout of both sides of the hop; every message is at most three tensors because each tensor costs.
No JSON in the token path (only errors, which are rare, carry text). Pure; knows nothing about Triton, nor about the
key that stands before a call's header (see inner_key).

    call     header int64: [op, n, ...rows]        tokens int32: all prompts, lists of ids and grammars, joined
    batch    header int64: [R, T, K, P, ...load, ...rows, ...prompts]    tokens int32: [T] + top ids [T*K]
             floats float32: with log-probabilities (else K is -1) [T] + top log-probabilities [T*K]
             P prompts whose tokens are scored, each (row, tokens n, alternatives k): behind all that in tokens the
             top ids [n*k], in floats the log-probabilities [n] and those of top ids [n*k]
"""

from __future__ import annotations

import json
from collections.abc import Sequence, Sized
from dataclasses import astuple, dataclass, fields
from enum import IntEnum
from typing import Any

import numpy as np

from ...contracts import error_codec
from ...contracts.arrays import Float32Array, Int32Array, Int64Array
from ...contracts.errors import TritandemError
from ...contracts.fields import FIELDS, TYPES, SamplingParams
from ...contracts.grammars import Grammar
from ...contracts.requests import EngineRequest
from ...contracts.stream import LoadSnapshot, TokenBatch, TokenScores

CALL_OUTPUTS = ["header", "errors"]
STREAM_OUTPUTS = ["header", "tokens", "floats", "errors"]


class Op(IntEnum):
    SUBMIT = 1
    CANCEL = 2
    STREAM = 3
    LOAD = 4
    END_STREAM = 5


@dataclass(frozen=True, slots=True)
class WireBatch:
    """A TokenBatch as it travels."""

    header: Int64Array
    tokens: Int32Array
    floats: Float32Array | None = None
    errors: bytes | None = None  # JSON {row: message}


# --------------------------------------------------------------------------------------------------
# Requests
# --------------------------------------------------------------------------------------------------

# One row of int64 a request; floats travel as their float64 bits.
_SAMPLING = tuple(FIELDS)
_NONE = -1  # not asked for
_OPTIONAL = frozenset(f.name for f in fields(SamplingParams) if f.default is None)
# seq_id, prompt tokens, stop ids, bad words, biased ids, allowed ids, bytes of the grammar, prefix salt, family
_HEAD = 9
_SAME = -1  # instead of prompt tokens: the prompt of the request before
_ROW = _HEAD + len(_SAMPLING)


def pack_submit(requests: Sequence[EngineRequest]) -> tuple[Int64Array, Int32Array]:
    """header and tokens of a submit call; behind the rows, request by request, the lengths of
    bad words and the values of biased ids."""
    rows = np.empty((len(requests), _ROW), np.int64)
    tail: list[int] = []
    parts: list[Int32Array] = []
    prompt: Int32Array | None = None
    for row, request in zip(rows, requests, strict=True):
        bias, allowed = request.logit_bias, request.allowed_token_ids
        same, prompt = request.prompt_ids is prompt, request.prompt_ids
        grammar = b"" if request.grammar is None else request.grammar.to_bytes()
        lists: tuple[Sized, ...] = request.stop_ids, request.bad_words, bias, allowed, grammar
        lengths = _SAME if same else len(prompt), *map(len, lists)
        row[:_HEAD] = request.seq_id, *lengths, request.prefix_salt, request.family
        row[_HEAD:] = [_to_int64(name, getattr(request.sampling, name)) for name in _SAMPLING]
        tail.extend(len(word) for word in request.bad_words)
        tail.extend(_bits(value) for _, value in bias)
        if not same:
            parts.append(prompt)
        words = (i for word in request.bad_words for i in word)
        parts.append(np.array([*request.stop_ids, *words, *(i for i, _ in bias), *allowed], np.int32))
        parts.append(np.frombuffer(grammar.ljust(-len(grammar) // 4 * -4), np.int32))
    # Every part int64 by itself: an empty list would count as float64, in which long integers lose their end.
    head, last = np.array([Op.SUBMIT, len(requests)], np.int64), np.array(tail, np.int64)
    header: Int64Array = np.concatenate((head, rows.reshape(-1), last))
    return header, np.concatenate(parts, dtype=np.int32) if parts else np.zeros(0, np.int32)


def unpack_submit(header: Int64Array, tokens: Int32Array) -> list[EngineRequest]:
    """Raises InvalidRequest for sampling values out of range. The arrays are copied from."""
    count = int(header[1])
    rows = header[2 : 2 + count * _ROW].reshape(count, _ROW)
    tail = iter(header[2 + count * _ROW :])
    position = 0

    def take(length: int) -> Int32Array:
        nonlocal position
        position += length
        return tokens[position - length : position]

    requests = []
    prompt = tokens[:0]
    for row in rows:
        seq_id, prompt_tokens, stop_ids, bad_words, biased, allowed, grammar, salt, family = map(int, row[:_HEAD])
        prompt = prompt if prompt_tokens == _SAME else np.array(take(prompt_tokens))
        sampling: dict[str, Any] = {
            name: _from_int64(name, value) for name, value in zip(_SAMPLING, row[_HEAD:], strict=True)
        }
        requests.append(
            EngineRequest(
                seq_id=seq_id,
                prompt_ids=prompt,
                sampling=SamplingParams(**sampling),
                stop_ids=tuple(take(stop_ids).tolist()),
                bad_words=tuple(tuple(take(int(next(tail))).tolist()) for _ in range(bad_words)),
                logit_bias=tuple((i, _float(next(tail))) for i in take(biased).tolist()),
                allowed_token_ids=tuple(take(allowed).tolist()),
                grammar=Grammar.from_bytes(take(-(-grammar // 4)).tobytes()) if grammar else None,
                prefix_salt=salt,
                family=family,
            )
        )
    return requests


def pack_call(op: Op, seq_ids: Sequence[int] = ()) -> Int64Array:
    """header of a cancel, stream or load call."""
    return np.array([op, len(seq_ids), *seq_ids], np.int64)


def unpack_cancel(header: Int64Array) -> list[int]:
    ids: list[int] = header[2 : 2 + int(header[1])].tolist()
    return ids


def _to_int64(name: str, value: float | int | None) -> int:
    if TYPES[name] is float:
        return _bits(value)
    return _NONE if value is None else int(value)


def _from_int64(name: str, value: np.int64) -> float | int | None:
    if TYPES[name] is float:
        return _float(value)
    if name in _OPTIONAL and value == _NONE:
        return None
    return int(value)


def _bits(value: float | int | None) -> int:
    return int(np.float64(value).view(np.int64))


def _float(bits: np.int64) -> float:
    return float(bits.view(np.float64))


# --------------------------------------------------------------------------------------------------
# Errors
# --------------------------------------------------------------------------------------------------


def pack_errors(errors: Sequence[TritandemError | None]) -> bytes:
    """JSON [[index, ...error_codec]] of the refused ones; b"" when all were accepted."""
    rows = [[i, *error_codec.pack(error)] for i, error in enumerate(errors) if error is not None]
    return json.dumps(rows).encode() if rows else b""


def unpack_errors(text: bytes, count: int) -> list[TritandemError | None]:
    errors: list[TritandemError | None] = [None] * count
    for index, *fields_ in json.loads(text) if text else ():
        errors[index] = error_codec.unpack(fields_)
    return errors


# --------------------------------------------------------------------------------------------------
# Batches
# --------------------------------------------------------------------------------------------------

_LOAD = len(fields(LoadSnapshot))
_PREFIX = 4 + _LOAD
_NO_LOGPROBS = -1  # instead of K
_COLUMNS = 8  # seq_id, tokens, finish, cached tokens, 4 stamps


def pack_load(load: LoadSnapshot) -> Int64Array:
    return np.array(astuple(load), np.int64)


def unpack_load(row: Int64Array) -> LoadSnapshot:
    return LoadSnapshot(*row.tolist())


def pack_batch(batch: TokenBatch) -> WireBatch:
    rows, tokens = len(batch.seq_ids), len(batch.tokens)
    width = 0 if batch.top_ids is None else batch.top_ids.shape[1]
    header = np.empty(_PREFIX + rows * _COLUMNS + 3 * len(batch.prompts), np.int64)
    header[:4] = rows, tokens, _NO_LOGPROBS if batch.logprobs is None else width, len(batch.prompts)
    header[4:_PREFIX] = astuple(batch.load)
    table = header[_PREFIX : _PREFIX + rows * _COLUMNS].reshape(rows, _COLUMNS)
    table[:, 0], table[:, 1] = batch.seq_ids, batch.token_counts
    table[:, 2], table[:, 3] = batch.finish, batch.cached_tokens
    table[:, 4:] = batch.stamps_ns
    all_tokens, floats = batch.tokens, batch.logprobs
    if batch.top_ids is not None and batch.top_logprobs is not None and floats is not None:
        all_tokens = np.concatenate((all_tokens, batch.top_ids.reshape(-1)), dtype=np.int32)
        floats = np.concatenate((floats, batch.top_logprobs.reshape(-1)), dtype=np.float32)
    if batch.prompts:
        scores = batch.prompts.values()
        prompts = [(row, *one.top_ids.shape) for row, one in batch.prompts.items()]
        header[_PREFIX + rows * _COLUMNS :] = np.array(prompts, np.int64).reshape(-1)
        all_tokens = np.concatenate((all_tokens, *(one.top_ids.reshape(-1) for one in scores)), dtype=np.int32)
        listed = (part.reshape(-1) for one in scores for part in (one.logprobs, one.top_logprobs))
        floats = np.concatenate(([] if floats is None else floats, *listed), dtype=np.float32)
    errors = json.dumps(batch.errors).encode() if batch.errors else None
    return WireBatch(header, all_tokens, floats, errors)


def unpack_batch(wire: WireBatch) -> TokenBatch:
    """Copies out of the arrays, which may be borrowed."""
    rows, tokens, width, prompts = (int(value) for value in wire.header[:4])
    table = wire.header[_PREFIX : _PREFIX + rows * _COLUMNS].reshape(rows, _COLUMNS)
    logprobs = top_ids = top_logprobs = None
    if wire.floats is not None and width >= 0:
        logprobs, end = np.array(wire.floats[:tokens]), tokens * (1 + width)
        if width:
            top_ids = np.array(wire.tokens[tokens:end]).reshape(tokens, width)
            top_logprobs = np.array(wire.floats[tokens:end]).reshape(tokens, width)
    return TokenBatch(
        seq_ids=np.array(table[:, 0]),
        token_counts=table[:, 1].astype(np.int32),
        tokens=np.array(wire.tokens[:tokens]),
        finish=table[:, 2].astype(np.uint8),
        cached_tokens=table[:, 3].astype(np.int32),
        stamps_ns=np.array(table[:, 4:]),
        load=unpack_load(wire.header[4:_PREFIX]),
        logprobs=logprobs,
        top_ids=top_ids,
        top_logprobs=top_logprobs,
        errors={int(row): message for row, message in json.loads(wire.errors).items()} if wire.errors else {},
        prompts=_unpack_prompts(wire, prompts, tokens * (1 + max(width, 0)), 0 if logprobs is None else end),
    )


def _unpack_prompts(wire: WireBatch, count: int, token: int, number: int) -> dict[int, TokenScores]:
    """The last `count` rows of the header; `token` and `number`: where their ids and floats begin."""
    prompts: dict[int, TokenScores] = {}
    if not count:
        return prompts
    assert wire.floats is not None
    for row, size, width in wire.header[-3 * count :].reshape(count, 3).tolist():
        ids, token = wire.tokens[token : token + size * width], token + size * width
        logprobs, number = wire.floats[number : number + size], number + size
        values, number = wire.floats[number : number + size * width], number + size * width
        shape = (size, width)
        prompts[row] = TokenScores(np.array(logprobs), np.array(ids).reshape(shape), np.array(values).reshape(shape))
    return prompts
