"""One launch from packed words writes what the slot rows' own methods write, and lays a pass's chunks out."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from tritandem.contracts.arrays import Int32Array
from tritandem.contracts.fields import SamplingParams
from tritandem.engine.rows.state import SlotState
from tritandem.engine.step import PrefillChunk, SlotInit, StepPlan

from tests.engine_cuda.cuda_reference import assert_same_rows, slot_fields

pytestmark = pytest.mark.gpu

SLOTS, BLOCKS, VOCAB, CONTEXT = 9, 150, 97, 1200


def scrambled(device: torch.device, seed: int) -> SlotState:
    """Every row holds what an earlier owner may have left."""
    state = SlotState.empty(SLOTS, BLOCKS, VOCAB, device)
    generator = torch.Generator().manual_seed(seed)
    for value in slot_fields(state).values():
        value.copy_(torch.randint(0, 90, value.shape, generator=generator).to(value.dtype))
    state.finished.remainder_(2)
    return state


def some_init(slot: int, rng: random.Random) -> SlotInit:
    def ids(count: int) -> Int32Array:
        return np.array([rng.randrange(VOCAB) for _ in range(count)], np.int32)

    max_tokens = rng.choice((1, 30, 2**31 - 1))
    sampling = SamplingParams(
        max_tokens=max_tokens,
        min_tokens=rng.choice((0, max_tokens)),
        temperature=rng.choice((0.0, rng.uniform(0.1, 2.0))),
        top_k=rng.choice((0, 7, 2**31 - 1)),
        top_p=rng.uniform(0.1, 1.0),
        min_p=rng.uniform(0.0, 1.0),
        repetition_penalty=rng.choice((1.0, 1.3)),
        presence_penalty=rng.choice((0.0, -1.5)),
        frequency_penalty=rng.choice((0.0, 0.7)),
        seed=rng.choice((0, 2**32 - 1, 2**31, rng.randrange(2**63))),
    )
    stop_ids = tuple(ids(rng.choice((0, 2, 16))).tolist())
    bad_words = tuple(tuple(ids(rng.randrange(1, 9)).tolist()) for _ in range(rng.choice((0, 0, 3, 64))))
    bias = tuple((token, rng.uniform(-100, 100)) for token in ids(rng.choice((0, 0, 3, 300))).tolist())
    allowed = tuple(ids(rng.choice((0, 0, 1, 1024))).tolist())
    output = ids(rng.choice((0, 3, 9)))
    return SlotInit(slot, ids(rng.randrange(1, 20)), sampling, stop_ids, bad_words, output, bias, allowed)


def tell(
    plan: StepPlan,
    state: SlotState,
    rows: torch.Tensor,
    new_rows: bool,
    size: tuple[int, int] | None = None,
    pick: bool = False,
) -> object:
    """What `CudaRunner` does with a plan before it launches anything else; `size`: tokens and chunks of the pass."""
    from tritandem.engine.rows.inputs import PassInputs, spread
    from tritandem.engine.rows.words import pack_step

    words = pack_step(plan, new_rows, CONTEXT)
    assert words is not None
    inputs = PassInputs.empty(*size, rows.device) if size else None
    packed = torch.from_numpy(np.concatenate(words.arrays)).to(rows.device)
    spread(packed, words, state, rows, inputs, pick)
    for init in plan.inits:
        if init.rare:
            state.write_rare(init)
    return inputs


@pytest.mark.parametrize("seed", range(6))
def test_words_equal_field_by_field_writes(kernel_device: torch.device, seed: int) -> None:
    """Releases, inits and block updates in random mixtures, a slot that returns at once among them."""
    rng = random.Random(seed)
    state, plain = scrambled(kernel_device, seed), scrambled(kernel_device, seed)
    slots = rng.sample(range(SLOTS), k=SLOTS)
    inits = [some_init(slot, rng) for slot in slots[: rng.randrange(0, 5)]]
    releases = slots[rng.randrange(0, 4) :][: rng.randrange(0, 5)]
    cells = rng.sample([(slot, index) for slot in range(SLOTS) for index in range(BLOCKS)], k=(0, 300, 5)[seed % 3])
    updates = np.array([(slot, index, rng.randrange(1, 99)) for slot, index in cells], np.int32).reshape(-1, 3)
    rows = torch.full((SLOTS,), 77, dtype=torch.int64, device=kernel_device)
    decode = rng.sample(range(SLOTS), k=4)

    plan = StepPlan(0, releases=releases, inits=inits, block_updates=updates, decode_slots=decode)
    tell(plan, state, rows, new_rows=seed % 2 == 0)

    plain.release_rows(releases)
    for init in inits:
        plain.init_row(init, CONTEXT)
    for slot, index, block in updates.tolist():
        plain.block_table[slot, index] = block
    assert_same_rows(state, plain)
    if plain.penalties is not None:
        assert state.penalties is not None
        assert torch.equal(state.penalties.seen.cpu(), plain.penalties.seen.cpu())
        assert torch.equal(state.penalties.output_counts.cpu(), plain.penalties.output_counts.cpu())
    assert rows.tolist() == [*decode, *[SLOTS] * 5] if seed % 2 == 0 else [77] * SLOTS


def test_updates_and_rows_of_several_programs(kernel_device: torch.device) -> None:
    """More block updates and decode rows than one program handles; nothing else changes."""
    state, plain = scrambled(kernel_device, 1), scrambled(kernel_device, 1)
    updates = np.array([(slot, index, 1 + slot + index) for slot in range(4) for index in range(BLOCKS)], np.int32)
    rows = torch.zeros(300, dtype=torch.int64, device=kernel_device)
    decode = [slot % SLOTS for slot in range(290)]
    tell(StepPlan(0, block_updates=updates, decode_slots=decode), state, rows, new_rows=True)
    plain.block_table[:4] = torch.from_numpy(updates[:, 2].reshape(4, BLOCKS)).to(kernel_device)
    assert_same_rows(state, plain)
    assert rows.tolist() == [*decode, *[SLOTS] * 10]


def test_a_steady_step_has_nothing_to_tell() -> None:
    pytest.importorskip("triton")
    from tritandem.engine.rows.words import pack_step

    assert pack_step(StepPlan(0, decode_slots=[1, 2]), False, CONTEXT) is None
    assert pack_step(StepPlan(0, decode_slots=[1, 2]), True, CONTEXT) is not None


def chunks_of(*parts: tuple[int, int, int, bool]) -> list[PrefillChunk]:
    """(slot, start, tokens, last) each; ids count up from 100 * slot + start."""
    return [
        PrefillChunk(slot, start, np.arange(100 * slot + start, 100 * slot + start + count, dtype=np.int32), last)
        for slot, start, count, last in parts
    ]


def laid_out(chunks: Sequence[PrefillChunk], tokens: int, count: int, device: torch.device) -> dict[str, list[int]]:
    state = SlotState.empty(SLOTS, BLOCKS, VOCAB, device)
    rows = torch.zeros(SLOTS, dtype=torch.int64, device=device)
    inputs = tell(StepPlan(0, prefill=chunks), state, rows, new_rows=False, size=(tokens, count), pick=True)
    names = ("token_slots", "slots", "last_rows", "last_slots", "ids", "positions", "starts", "context_lens", "pick")
    return {name: getattr(inputs, name).tolist() for name in names}


def test_padding_belongs_to_the_pad_slot_and_keeps_the_order(kernel_device: torch.device) -> None:
    chunks = chunks_of((3, 4, 2, False), (1, 0, 3, True))
    padded = laid_out(chunks, 8, 4, kernel_device)
    assert padded["token_slots"] == [3, 3, 1, 1, 1, 9, 9, 9]
    assert padded["slots"] == [3, 1, 9, 9]
    assert padded["last_rows"] == [4, 0, 0, 0]
    assert padded["last_slots"] == [1, 9, 9, 9]
    assert padded["ids"] == [304, 305, 100, 101, 102, 0, 0, 0]
    assert padded["positions"] == [4, 5, 0, 1, 2, 0, 0, 0]
    assert padded["starts"] == [0, 2, 5, 5, 5]
    assert padded["context_lens"] == [6, 3, 0, 0]
    assert padded["pick"] == [1]
    exact = laid_out(chunks, 5, 2, kernel_device)
    assert exact["token_slots"] == [3, 3, 1, 1, 1]
    assert exact["starts"] == [0, 2, 5]
    assert exact["context_lens"] == [6, 3]


def test_many_chunks_of_many_tokens(kernel_device: torch.device) -> None:
    """More of both than one program looks at together."""
    rng = random.Random(4)
    parts = [(n % SLOTS, rng.randrange(50), rng.randrange(1, 12), rng.random() < 0.5) for n in range(140)]
    chunks = chunks_of(*parts)
    total = sum(len(chunk.ids) for chunk in chunks)
    got = laid_out(chunks, total + 37, 150, kernel_device)
    ends = np.cumsum([len(chunk.ids) for chunk in chunks]).tolist()
    last = [number for number, chunk in enumerate(chunks) if chunk.last]
    assert got["token_slots"] == [c.slot for c in chunks for _ in c.ids] + [SLOTS] * 37
    assert got["ids"] == [int(i) for c in chunks for i in c.ids] + [0] * 37
    assert got["positions"] == [c.start + i for c in chunks for i in range(len(c.ids))] + [0] * 37
    assert got["starts"] == [0, *ends, *[total] * 10]
    assert got["slots"] == [c.slot for c in chunks] + [SLOTS] * 10
    assert got["context_lens"] == [c.start + len(c.ids) for c in chunks] + [0] * 10
    assert got["last_rows"] == [ends[number] - 1 for number in last] + [0] * (150 - len(last))
    assert got["last_slots"] == [chunks[number].slot for number in last] + [SLOTS] * (150 - len(last))


def test_no_chunk_at_all_leaves_only_padding(kernel_device: torch.device) -> None:
    from tritandem.engine.rows.inputs import PassInputs, spread
    from tritandem.engine.rows.words import StepWords

    state = SlotState.empty(SLOTS, BLOCKS, VOCAB, kernel_device)
    rows = torch.zeros(SLOTS, dtype=torch.int64, device=kernel_device)
    inputs = PassInputs.empty(16, 4, kernel_device)
    spread(inputs.ints, StepWords([]), state, rows, inputs, pick=False)
    assert inputs.token_slots.tolist() == [SLOTS] * 16
    assert inputs.slots.tolist() == inputs.last_slots.tolist() == [SLOTS] * 4
    assert inputs.starts.tolist() == [0] * 5
    assert inputs.context_lens.tolist() == [0] * 4
    assert_same_rows(state, SlotState.empty(SLOTS, BLOCKS, VOCAB, kernel_device))


@pytest.mark.parametrize("decode", [[], [5, 1, 8], [(1, 2, 4, 5, 6, 8)[n % 6] for n in range(150)]], ids=len)
def test_what_a_pass_is_fed_equals_reading_it_one_by_one(kernel_device: torch.device, decode: list[int]) -> None:
    """Without decode rows, with some, and with more than one program reads; the chunks are padded."""
    from tritandem.engine.rows.inputs import PassInputs, begin_pass

    state = scrambled(kernel_device, 3)
    state.finished[SLOTS], state.block_table[SLOTS], state.length[SLOTS] = True, 0, 0
    chunks = chunks_of((3, 4, 200, False), (0, 0, 3, True), (7, 90, 30, True))
    rows = torch.zeros(160, dtype=torch.int64, device=kernel_device)
    inputs = tell(
        StepPlan(0, prefill=chunks, decode_slots=decode), state, rows, new_rows=True, size=(256, 8), pick=True
    )
    assert isinstance(inputs, PassInputs)
    taken = rows[: len(decode) + 2 if decode else 0]  # two rows of padding
    want = inputs.batch(state, 16, 256, BLOCKS * 16)
    ids, lens = state.last_token[taken].long(), torch.where(state.idle(taken), 0, state.length[taken] + 1)
    lengths = state.length.clone()
    lengths[[3, 0, 7]] = torch.tensor([204, 3, 120], dtype=torch.int32, device=kernel_device)
    record = torch.full((1,), 6, dtype=torch.int64, device=kernel_device)
    choosing = torch.zeros(len(taken) + 8, dtype=torch.int64, device=kernel_device)

    got = begin_pass(inputs, state, taken, choosing, 16, record)

    assert torch.equal(got.ids, torch.cat((ids, inputs.ids.long())))
    assert torch.equal(got.positions, inputs.positions.long())
    assert torch.equal(got.row_lens, lens.to(torch.int32))
    assert got.logit_rows.tolist() == [*range(len(taken)), *(len(taken) + row for row in inputs.last_rows.tolist())]
    assert torch.equal(got.chunks.slot_mapping, want.slot_mapping)
    assert torch.equal(got.chunks.block_tables, want.block_tables)
    assert torch.equal(got.chunks.context_lens, want.context_lens)
    assert torch.equal(got.chunks.query_starts, want.query_starts)
    assert (got.chunks.max_query_tokens, got.chunks.max_context_tokens) == (256, BLOCKS * 16)
    assert torch.equal(state.length, lengths)
    assert torch.equal(choosing, torch.cat((taken, inputs.last_slots)))
    assert record.tolist() == [7]
