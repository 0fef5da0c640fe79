"""Whatever crosses the engine hop arrives as it was sent."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tritandem.contracts.errors import DeadlineExpired, EngineFailed, InvalidRequest, Saturated, TritandemError
from tritandem.contracts.fields import SamplingParams
from tritandem.contracts.grammars import Grammar, Kind, Thinking
from tritandem.contracts.requests import EngineRequest
from tritandem.contracts.stream import LoadSnapshot, TokenBatch, TokenScores
from tritandem.triton_io.hops import engine_wire

ids = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=40)
unit = st.floats(0.01, 1.0)
sampling = st.builds(
    SamplingParams,
    max_tokens=st.integers(8, 2**31 - 1),
    min_tokens=st.integers(0, 8),
    temperature=st.floats(0, 100),
    top_k=st.integers(0, 1000),
    top_p=unit,
    min_p=unit,
    repetition_penalty=unit,
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    seed=st.integers(0, 2**63 - 1),
    logprobs=st.none() | st.integers(0, 20),
    prompt_logprobs=st.none() | st.integers(0, 20),
)
thoughts = st.builds(Thinking, st.text(), st.text(), st.booleans())
requests = st.builds(
    EngineRequest,
    seq_id=st.integers(0, 2**62),
    prompt_ids=ids.map(lambda values: np.array(values, np.int32)),
    sampling=sampling,
    stop_ids=st.lists(st.integers(0, 50_000), max_size=16).map(tuple),
    bad_words=st.lists(st.lists(st.integers(0, 50_000), min_size=1, max_size=8).map(tuple), max_size=4).map(tuple),
    logit_bias=st.dictionaries(st.integers(0, 50_000), st.floats(-100, 100), max_size=5).map(
        lambda d: tuple(d.items())
    ),
    allowed_token_ids=st.lists(st.integers(0, 50_000), max_size=9).map(tuple),
    grammar=st.none() | st.builds(Grammar, st.sampled_from(Kind), st.text(), st.none() | thoughts),
    prefix_salt=st.integers(-(2**63), 2**63 - 1),
    family=st.integers(0, 2**62),
)


@given(st.lists(requests, max_size=6))
@settings(max_examples=100, deadline=None)
def test_requests_survive_the_hop_bit_by_bit(sent: list[EngineRequest]) -> None:
    header, tokens = engine_wire.pack_submit(sent)
    assert (header.dtype, tokens.dtype) == (np.int64, np.int32)
    arrived = engine_wire.unpack_submit(header, tokens)
    assert len(arrived) == len(sent)
    none: Any = None  # arrays are compared by themselves
    for one, other in zip(sent, arrived, strict=True):
        assert np.array_equal(one.prompt_ids, other.prompt_ids)
        assert replace(one, prompt_ids=none) == replace(other, prompt_ids=none)


def test_the_prompt_of_a_family_travels_once() -> None:
    prompt, other = np.arange(1000, dtype=np.int32), np.arange(5, dtype=np.int32)
    asked = [(1, prompt), (2, prompt), (3, other), (4, prompt)]
    header, tokens = engine_wire.pack_submit([EngineRequest(i, ids, SamplingParams(), (7,)) for i, ids in asked])
    assert len(tokens) == 2005 + 4
    arrived = engine_wire.unpack_submit(header, tokens)
    assert [one.prompt_ids.tolist() for one in arrived] == [ids.tolist() for _, ids in asked]
    assert all(one.stop_ids == (7,) for one in arrived)


def test_unpacked_prompts_own_their_memory() -> None:
    header, tokens = engine_wire.pack_submit([EngineRequest(1, np.array([5, 6], np.int32), SamplingParams())])
    [request] = engine_wire.unpack_submit(header, tokens)
    tokens[:] = 0
    assert request.prompt_ids.tolist() == [5, 6]


def batch(counts: list[int], width: int | None, with_errors: bool) -> TokenBatch:
    random = np.random.default_rng(sum(counts) + (width or 0))
    rows, total = len(counts), sum(counts)
    floats = random.normal(size=total).astype(np.float32) if width is not None else None
    return TokenBatch(
        seq_ids=random.integers(0, 2**62, rows),
        token_counts=np.array(counts, np.int32),
        tokens=random.integers(0, 2**31 - 1, total).astype(np.int32),
        finish=random.integers(0, 5, rows).astype(np.uint8),
        cached_tokens=random.integers(0, 9999, rows).astype(np.int32),
        stamps_ns=random.integers(0, 2**62, (rows, 4)),
        load=LoadSnapshot(*range(1, 16)),
        logprobs=floats,
        top_ids=random.integers(-1, 9, (total, width)).astype(np.int32) if width else None,
        top_logprobs=random.normal(size=(total, width)).astype(np.float32) if width else None,
        errors={0: "out of memory", 2: "žluťoučký"} if with_errors else {},
    )


@pytest.mark.parametrize("counts", [[], [1], [0, 3, 1], [2] * 256])
@pytest.mark.parametrize("width", [None, 0, 5])
@pytest.mark.parametrize("with_errors", [False, True])
def test_batches_survive_the_hop(counts: list[int], width: int | None, with_errors: bool) -> None:
    sent = batch(counts, width, with_errors)
    wire = engine_wire.pack_batch(sent)
    arrived = engine_wire.unpack_batch(wire)
    for name in ("seq_ids", "token_counts", "tokens", "finish", "cached_tokens", "stamps_ns"):
        one, other = getattr(sent, name), getattr(arrived, name)
        assert one.dtype == other.dtype
        assert np.array_equal(one, other)
    for name in ("logprobs", "top_ids", "top_logprobs"):
        one, other = getattr(sent, name), getattr(arrived, name)
        assert (one is None) == (other is None)
        assert one is None or np.array_equal(one, other)
    assert arrived.load == sent.load
    assert arrived.errors == sent.errors


@pytest.mark.parametrize("width", [None, 0, 5])
def test_scores_of_prompts_survive_the_hop(width: int | None) -> None:
    random = np.random.default_rng(1)

    def scores(size: int, alternatives: int) -> TokenScores:
        values = random.normal(size=(size, 1 + alternatives)).astype(np.float32)
        return TokenScores(values[:, 0], random.integers(0, 9, (size, alternatives)).astype(np.int32), values[:, 1:])

    sent = replace(
        batch([0, 3, 1], width, with_errors=True), prompts={0: scores(7, 2), 2: scores(0, 3), 1: scores(5, 0)}
    )
    wire = engine_wire.pack_batch(sent)
    arrived = engine_wire.unpack_batch(wire)
    wire.header.fill(0)
    wire.tokens.fill(0)
    assert wire.floats is not None
    wire.floats.fill(0)
    assert list(arrived.prompts) == [0, 2, 1]
    for row, one in sent.prompts.items():
        for name in ("logprobs", "top_ids", "top_logprobs"):
            mine, other = getattr(one, name), getattr(arrived.prompts[row], name)
            assert mine.dtype == other.dtype
            assert np.array_equal(mine, other)
    for name in ("tokens", "logprobs", "top_ids", "top_logprobs"):
        one, other = getattr(sent, name), getattr(arrived, name)
        assert (one is None) == (other is None)
        assert one is None or np.array_equal(one, other)
    assert arrived.errors == sent.errors


def test_a_batch_without_extras_is_two_tensors() -> None:
    wire = engine_wire.pack_batch(batch([1, 1], None, with_errors=False))
    assert wire.floats is None
    assert wire.errors is None


def test_an_unpacked_batch_owns_its_memory() -> None:
    wire = engine_wire.pack_batch(batch([2, 1], 3, with_errors=False))
    arrived = engine_wire.unpack_batch(wire)
    before = {name: np.array(getattr(arrived, name)) for name in ("seq_ids", "tokens", "stamps_ns", "top_logprobs")}
    wire.header.fill(0)
    wire.tokens.fill(0)
    assert wire.floats is not None
    wire.floats.fill(0)
    assert all(np.array_equal(getattr(arrived, name), value) for name, value in before.items())


def test_load_survives_the_hop() -> None:
    load = LoadSnapshot(*range(15))
    assert engine_wire.unpack_load(engine_wire.pack_load(load)) == load


def test_cancelled_ids_survive_the_hop() -> None:
    header = engine_wire.pack_call(engine_wire.Op.CANCEL, [3, 2**62])
    assert header[0] == engine_wire.Op.CANCEL
    assert engine_wire.unpack_cancel(header) == [3, 2**62]


def test_refusals_keep_class_and_words() -> None:
    sent: list[TritandemError | None] = [
        None,
        InvalidRequest("seq_id", 7, "an id that is not in use"),
        InvalidRequest("messages[0].role", "x'" * 1_000_000, "a text: one, given two, allowed: three"),
        Saturated("full", 2.5),
        EngineFailed("broken"),
        DeadlineExpired("late"),
    ]
    arrived = engine_wire.unpack_errors(engine_wire.pack_errors(sent), len(sent))
    assert [type(error) for error in arrived] == [type(error) for error in sent]
    assert [str(error) for error in arrived] == [str(error) for error in sent]
    assert isinstance(arrived[3], Saturated)
    assert arrived[3].retry_after_s == 2.5


def test_no_refusal_costs_no_byte() -> None:
    assert engine_wire.pack_errors([None, None]) == b""
    assert engine_wire.unpack_errors(b"", 2) == [None, None]
