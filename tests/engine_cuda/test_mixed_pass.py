"""Prefill chunks and decode rows in one pass give what the two passes give, whatever the padding."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config
from tritandem.config import EngineConfig
from tritandem.engine.model.loader import LoadedModel
from tritandem.engine.model.support import inspect_model
from tritandem.engine.rows.state import SlotState
from tritandem.engine.runners.staging import StagingPool
from tritandem.engine.step import PrefillChunk, SamplingFeatures, StepPlan

from tests.engine_cuda.cuda_reference import assert_same_rows, relative_error
from tests.engine_cuda.tiny_shape import SHAPE, VOCAB

SLOTS, BLOCK, BLOCKS_EACH = 6, 4, 8


class Passed:
    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...

    def record(self) -> None: ...


class Bench:
    """A fused model, slots 0..5 with blocks of their own, and passes over them; no graphs."""

    def __init__(self, config: Any, device: torch.device) -> None:
        from tritandem.engine.model.device_forward import DeviceForward
        from tritandem.engine.model.packed import KvCache
        from tritandem.engine.runners.decode_step import WORDS_PER_ROW, DecodeStep, Report
        from tritandem.engine.runners.graphs import GraphCache
        from tritandem.engine.runners.mixed_pass import MixedPasses
        from tritandem.engine.runners.pass_size import MAX_CHUNKS

        torch.manual_seed(5)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(device).eval()
        loaded = LoadedModel(model, inspect_model(model), VOCAB, 128)
        self.forward = DeviceForward(loaded, EngineConfig(), SLOTS, lambda note: None)
        assert self.forward.fused
        self.cache = KvCache.allocate(loaded.layers, 1 + SLOTS * BLOCKS_EACH, BLOCK, torch.float32, device)
        self.forward.use(self.cache)
        self.state = state = SlotState.empty(SLOTS, BLOCKS_EACH, VOCAB, device)
        state.block_table[:SLOTS] = 1 + torch.arange(SLOTS * BLOCKS_EACH, dtype=torch.int32).view(SLOTS, BLOCKS_EACH)
        state.finished[:SLOTS] = False
        ring = torch.zeros((4, (SLOTS + MAX_CHUNKS) * WORDS_PER_ROW), dtype=torch.int32, device=device)
        record, masks_ready = (torch.zeros(1, dtype=torch.int64, device=device) for _ in range(2))
        self.report = Report(ring, record, masks_ready, torch.zeros(4, dtype=torch.int64, device=device))
        self.step = DecodeStep(state, self._decode, self.report, SLOTS, MAX_CHUNKS)
        no_graphs = GraphCache(SimpleNamespace(device=device), enabled=False)  # type: ignore[arg-type]
        self.passes = MixedPasses(state, BLOCK, self.forward, self.step, no_graphs, SLOTS, 32, torch.float32)
        self.staging = StagingPool(device, Passed, pin=device.type == "cuda")

    def _decode(self, ids: Any, positions: Any, rows: Any, lens: Any) -> torch.Tensor:
        return self.forward.decode(self.state, BLOCK, ids, positions, rows, lens)

    def mixed(
        self,
        decode_slots: list[int],
        chunks: list[PrefillChunk],
        rows: int,
        tokens: int,
        features: SamplingFeatures | None = None,
    ) -> torch.Tensor:
        """Logits: a row each decode slot, then a row each chunk that is its prompt's last. Tokens are chosen where
        `features` are given, into a record of `stride` rows."""
        from tritandem.engine.rows.inputs import spread
        from tritandem.engine.rows.words import pack_step
        from tritandem.engine.runners.pass_size import PassSize, rows_of_pass

        size = PassSize(rows, tokens)
        words = pack_step(StepPlan(0, prefill=chunks, decode_slots=decode_slots), True, 128)
        assert words is not None
        packed = self.staging.pack(words.arrays)
        self.staging.copy(packed)
        inputs = self.passes.inputs(size)
        greedy = SamplingFeatures()
        spread(packed.words, words, self.state, self.step.rows, inputs, pick=features == greedy)
        self.staging.release(packed)
        last = [chunk.slot for chunk in chunks if chunk.last]
        self.passes.run(size, len(last), features or greedy)
        self.stride = rows_of_pass(size, len(last), features or greedy)
        logits = self.passes.logits
        assert inputs.last_slots[: len(last)].tolist() == last
        return torch.cat((logits[: len(decode_slots)], logits[rows : rows + len(last)])).clone()


def chunk(slot: int, start: int, count: int, last: bool = True) -> PrefillChunk:
    ids = (np.arange(start, start + count, dtype=np.int32) * 31 + 7 * slot) % VOCAB
    return PrefillChunk(slot, start, ids, last)


@pytest.mark.gpu
@pytest.mark.parametrize("config", [LlamaConfig(**SHAPE), Qwen3Config(**SHAPE)], ids=["llama", "qwen3"])
def test_one_pass_equals_prefill_and_decode_apart(kernel_device: torch.device, config: Any) -> None:
    def prepared() -> Bench:
        bench = Bench(config, kernel_device)
        bench.mixed([], [chunk(1, 0, 9), chunk(4, 0, 13), chunk(2, 0, 5, last=False)], rows=0, tokens=32)
        bench.state.last_token[[1, 4]] = torch.tensor([3, 8], dtype=bench.state.last_token.dtype, device=kernel_device)
        return bench

    with torch.inference_mode():
        apart, together = prepared(), prepared()
        new = [chunk(2, 5, 6), chunk(3, 0, 7)]
        first = apart.mixed([1, 4], [], rows=SLOTS, tokens=32)
        second = apart.mixed([], new, rows=0, tokens=32)
        both = together.mixed([1, 4], new, rows=SLOTS, tokens=32)
        assert relative_error(both, torch.cat((first, second))) < 1e-4
        assert together.state.length[:SLOTS].tolist() == apart.state.length[:SLOTS].tolist() == [0, 9, 11, 7, 13, 0]
        for ours, theirs in zip(together.cache.keys, apart.cache.keys, strict=True):
            assert relative_error(ours[1:], theirs[1:]) < 1e-4


@pytest.mark.gpu
def test_the_decode_rows_of_a_pass_equal_a_decode_step(kernel_device: torch.device) -> None:
    with torch.inference_mode():
        bench = Bench(LlamaConfig(**SHAPE), kernel_device)
        bench.mixed([], [chunk(1, 0, 9), chunk(4, 0, 13)], rows=0, tokens=32)
        rows = torch.tensor([4, 1], device=kernel_device)
        bench.state.last_token[rows] = torch.tensor([5, 6], dtype=bench.state.last_token.dtype, device=kernel_device)
        lengths = bench.state.length[rows]
        step = bench._decode(bench.state.last_token[rows].long(), lengths.long(), rows, (lengths + 1).to(torch.int32))
        got = bench.mixed([4, 1], [chunk(2, 0, 3)], rows=SLOTS, tokens=32)
        assert relative_error(got[:2], step) < 1e-4


def reported(bench: Bench, rows: int, first: int, count: int) -> list[tuple[int, int]]:
    """(token, finish) of rows [first, first + count) of the newest record, which holds `rows`."""
    record = bench.report.ring[int(bench.report.record) % len(bench.report.ring)]
    return list(
        zip(record[first : first + count].tolist(), record[rows + first : rows + first + count].tolist(), strict=True)
    )


FEATURES = {
    "greedy": SamplingFeatures(),
    "sampled": SamplingFeatures(frozenset({"sampled", "filtered"})),
    "penalised": SamplingFeatures(frozenset({"penalised", "bad_words"})),
    "logprobs": SamplingFeatures(top_logprobs=2),
    "token rules": SamplingFeatures(frozenset({"logit_bias", "allowed_token_ids"})),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", sorted(FEATURES))
def test_a_pass_chooses_what_is_chosen_behind_it(kernel_device: torch.device, name: str) -> None:
    """Chunks alone and beside decode rows, with none, some and all of them the last of their prompts, a row that
    finishes on the way and one that idles."""
    steps: list[tuple[list[int], list[PrefillChunk], int, int]] = [
        ([], [chunk(2, 0, 5, last=False)], 0, 32),
        ([], [chunk(1, 0, 9), chunk(4, 0, 3), chunk(2, 5, 2, last=False)], 0, 32),
        ([1, 4], [chunk(2, 7, 6, last=False)], SLOTS, 32),
        ([4, 1], [chunk(2, 13, 2), chunk(3, 0, 7)], SLOTS, 16),
        ([4, 1, 2, 3], [chunk(0, 0, 1)], SLOTS, 32),
    ]
    features = FEATURES[name]
    with torch.inference_mode():
        behind, inside = (Bench(LlamaConfig(**SHAPE), kernel_device) for _ in range(2))
        for state in (behind.state, inside.state):
            state.remaining[:SLOTS] = torch.tensor([9, 9, 9, 9, 3, 9], dtype=torch.int32)
            state.min_tokens[1] = 2
            state.stop_ids[:SLOTS] = torch.arange(40, 56)
            state.seed[:SLOTS] = torch.arange(SLOTS)
            state.bias_ids[:SLOTS], state.bias_values[:SLOTS] = torch.arange(300) % 60, -0.5
            state.bias_count[:SLOTS], state.allowed_count[2:SLOTS] = torch.arange(SLOTS) * 9, 1
            state.allowed_ids[:SLOTS] = torch.arange(1024) % 50
            state.temperature[:SLOTS], state.top_p[:SLOTS], state.repetition_penalty[:SLOTS] = 0.9, 0.8, 1.4
        finished = 0
        for number, (decode, chunks, rows, tokens) in enumerate(steps, start=1):
            last = [c.slot for c in chunks if c.last]
            logits = behind.mixed(decode, chunks, rows, tokens)
            want = []
            for slots, part in ((decode, logits[: len(decode)]), (last, logits[len(decode) :])):
                if slots:
                    where = torch.tensor(slots, device=kernel_device)
                    behind.step.choose(part, where, features, decoding=len(slots) if slots is decode else 0)
                    want += reported(behind, len(slots), 0, len(slots))
            inside.mixed(decode, chunks, rows, tokens, features)
            stride = inside.stride
            got = reported(inside, stride, 0, len(decode)) + reported(inside, stride, rows, len(last))
            assert got == want
            assert int(inside.report.record) == int(behind.report.record) == number
            padding = reported(inside, stride, rows + len(last), stride - rows - len(last))
            assert padding == [(-1, 0)] * len(padding)
            assert_same_rows(inside.state, behind.state)
            finished += sum(finish != 0 for _, finish in got)
        assert finished >= 1
        assert (-1, 0) in got  # slot 4 had used its budget up


@pytest.mark.gpu
def test_a_rehearsal_leaves_no_trace(kernel_device: torch.device) -> None:
    from tritandem.engine.runners.pass_size import ChoiceSize, PassSize

    with torch.inference_mode():
        bench, other = (Bench(LlamaConfig(**SHAPE), kernel_device) for _ in range(2))
        for b in (bench, other):
            b.state.remaining[:SLOTS] = 9
            b.mixed([], [chunk(1, 0, 9)], 0, 32, SamplingFeatures())
        for rows in (0, SLOTS):
            bench.passes.work(PassSize(rows, 32))(True)
            bench.passes.work(ChoiceSize(rows, rows + 4, FEATURES["sampled"]))(True)
        assert_same_rows(bench.state, other.state)
        assert torch.equal(bench.report.ring, other.report.ring)
        assert int(bench.report.record) == 1


def test_sizes_grow_in_small_steps_and_end_at_the_limits() -> None:
    pytest.importorskip("triton")
    from tritandem.engine.runners.pass_size import PassSize, row_buckets, token_buckets

    assert row_buckets(256) == [0, 8, 32, 64, 128, 256]
    assert row_buckets(4) == [0, 4]
    buckets = token_buckets(2048)
    assert buckets[0] == 32
    assert buckets[-1] == 2048
    assert buckets == sorted(set(buckets))
    assert all(b - a <= max(64, b / 4) for a, b in itertools.pairwise(buckets))
    assert token_buckets(2304)[-3:] == [2048, 2176, 2304]
    assert token_buckets(48) == [32, 48]
    assert PassSize(8, 32).chunks == 4
    assert PassSize(8, 2048).chunks == 64


def test_a_pass_is_replaced_by_a_cheaper_one_that_holds_it() -> None:
    pytest.importorskip("triton")
    from tritandem.engine.runners.pass_size import PassSize, cheapest

    costs = {PassSize(0, 64): 5.0, PassSize(0, 128): 6.0, PassSize(8, 64): 9.0, PassSize(8, 128): 7.0}
    choices = cheapest(costs, lambda rows: 4.0)
    assert choices[PassSize(8, 64)] == PassSize(8, 128)
    assert choices[PassSize(0, 64)] == PassSize(0, 64)
    assert cheapest(costs, lambda rows: 0.5)[PassSize(8, 64)] == PassSize(0, 64)
    assert cheapest(costs, lambda rows: 0.5)[PassSize(8, 128)] == PassSize(0, 128)


def test_the_efficient_chunk_is_the_least_that_costs_about_as_little_a_token_as_any_beside_so_many_rows() -> None:
    pytest.importorskip("triton")
    from tritandem.engine.runners.pass_size import PassSize, efficient_tokens

    beside_64 = {PassSize(64, 64): 5.0, PassSize(64, 320): 9.0, PassSize(64, 2048): 47.4}
    assert efficient_tokens(beside_64, lambda rows: 4.5) == ((64, 320),)
    beside_256 = {PassSize(256, 128): 9.8, PassSize(256, 640): 20.0, PassSize(256, 2048): 48.0}
    assert efficient_tokens({**beside_256, **beside_64}, lambda rows: rows / 44) == ((64, 320), (256, 640))
    apart = {PassSize(0, 256): 3.0, PassSize(64, 256): 9.0, PassSize(64, 512): 11.0}
    assert efficient_tokens(apart, lambda rows: 4.0) == ((64, 256),), "by itself, as `cheapest` would run it"
    assert efficient_tokens({PassSize(64, 320): 1.1, PassSize(64, 2048): 2.5}, lambda rows: 0.6) == ((64, 2048),)
    assert efficient_tokens({PassSize(8, 48): 1.0}, lambda rows: 0.5) == ()
    assert efficient_tokens({PassSize(64, 320): 1.1, PassSize(64, 2048): 1.2}, lambda rows: 1.3) == ((64, 320),)
