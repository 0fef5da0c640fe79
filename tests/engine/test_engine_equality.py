"""Greedy tokens and logits equal transformers' own, whatever the architecture and the company."""

from __future__ import annotations

import pytest
import torch
from tritandem.contracts.stream import FinishCode
from tritandem.engine.attention.dense import DenseAttention
from tritandem.engine.attention.interface import AttentionBatch
from tritandem.engine.model.packed import KvCache, PackedForward
from tritandem.engine.model.states.cache import StateCache

from tests.engine.engine_rig import (
    CONFIGS,
    Rig,
    generate,
    loaded_model,
    make_runner,
    prompts,
    reference_model,
    request,
    tokens_of,
    top2_gap,
)

KINDS = sorted(CONFIGS)
ROUNDING_GAP = 1e-3


def assert_same_or_tied(kind: str, ids: list[int], ours: list[int], theirs: list[int]) -> None:
    """Equal, or first different where transformers' two best logits are closer than rounding."""
    for index, (mine, their) in enumerate(zip(ours, theirs, strict=True)):
        if mine != their:
            gap = top2_gap(kind, ids + theirs[:index])
            assert gap < ROUNDING_GAP, f"{kind}: token {index} is {mine}, not {their}; top-2 gap {gap:.1e}"
            return


@pytest.mark.parametrize("kind", KINDS)
def test_sequences_all_at_once_equal_generate_one_by_one(kind: str) -> None:
    batch = prompts(6, seed=3)
    rig = Rig(make_runner(kind, prefill_tokens_per_step=24))
    answers = rig.run([request(i, ids) for i, ids in enumerate(batch)])
    for i, ids in enumerate(batch):
        assert answers[i].finish == FinishCode.LENGTH
        assert_same_or_tied(kind, ids.tolist(), answers[i].tokens, generate(kind, ids, 12))


@pytest.mark.parametrize("kind", KINDS)
def test_logits_of_a_chunked_paged_pass_equal_a_full_forward(kind: str) -> None:
    loaded, length, cut, block_tokens = loaded_model(kind), 37, 21, 8
    ids = torch.arange(length) * 31 % loaded.vocab_size
    blocks = torch.tensor([[7, 2, 5, 1, 6]], dtype=torch.int32)
    cache = KvCache.allocate(loaded.layers, 8, block_tokens, torch.float32, "cpu")
    forward = PackedForward(loaded.model, cache, DenseAttention(), StateCache.allocate(loaded.model, slots=1))
    parts = []
    for start, end in ((0, cut), (cut, length)):
        positions = torch.arange(start, end)
        batch = AttentionBatch(
            slot_mapping=blocks[0, positions // block_tokens].long() * block_tokens + positions % block_tokens,
            block_tables=blocks,
            context_lens=torch.tensor([end], dtype=torch.int32),
            query_starts=torch.tensor([0, end - start], dtype=torch.int32),
            max_query_tokens=end - start,
            max_context_tokens=end,
            decode=False,
            slots=torch.zeros(1, dtype=torch.int64),
        )
        parts.append(forward.logits(ids[start:end], positions, torch.arange(end - start), batch))
    with torch.no_grad():
        truth = reference_model(kind)(ids[None]).logits[0]
    torch.testing.assert_close(torch.cat(parts), truth, atol=2e-3, rtol=1e-3)


def test_chunked_prefill_equals_prefill_in_one_piece() -> None:
    batch = [request(i, ids) for i, ids in enumerate(prompts(5, seed=1, low=30, high=60))]
    whole = Rig(make_runner(prefill_tokens_per_step=1000)).run(batch)
    for budget in (1, 7, 16):
        assert tokens_of(Rig(make_runner(prefill_tokens_per_step=budget)).run(batch)) == tokens_of(whole)


def test_over_an_fp8_cache_neither_cuts_nor_prefix_hits_nor_company_change_a_token() -> None:
    shared = prompts(1, seed=5, low=30, high=31)[0].tolist()
    batch = [request(i, [*shared, *ids]) for i, ids in enumerate(prompts(4, seed=6, low=1, high=9))]
    alone = {i: Rig(make_runner(kv_dtype="fp8_e4m3")).run([batch[i]])[i].tokens for i in range(4)}
    for budget in (7, 1000):
        runner = make_runner(kv_dtype="fp8_e4m3", prefill_tokens_per_step=budget)
        together = Rig(runner, prefix_cache=budget == 7).run(batch)
        assert tokens_of(together) == alone
    assert alone != tokens_of(Rig(make_runner()).run(batch)), "the rounding of FP8 shows in a random model"


def test_an_fp8_cache_of_the_same_bytes_has_twice_the_blocks_of_a_bf16_one() -> None:
    blocks = {
        kind: make_runner(num_blocks=0, cpu_kv_bytes=1536 << 10, kv_dtype=kind).spec.num_blocks
        for kind in ("auto", "bf16", "fp8_e4m3")
    }
    assert blocks["fp8_e4m3"] == 2 * blocks["bf16"] == 4 * blocks["auto"], "auto: float32 on a CPU"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_a_copied_block_holds_what_the_other_holds_whatever_its_type(dtype: torch.dtype) -> None:
    cache = KvCache.allocate(loaded_model("llama").layers, 6, 4, dtype, "cpu")
    for layer in (*cache.keys, *cache.values):
        layer.copy_(torch.randn(layer.shape))
    before = [layer.float() for layer in (*cache.keys, *cache.values)]
    cache.copy_blocks(torch.tensor([(1, 4), (2, 5)]))
    for layer, old in zip((*cache.keys, *cache.values), before, strict=True):
        assert torch.equal(layer.float(), old[[0, 1, 2, 3, 1, 2]])


def test_a_prefix_hit_changes_no_token() -> None:
    shared = prompts(1, seed=5, low=30, high=31)[0].tolist()
    batch = [request(i, [*shared, *ids]) for i, ids in enumerate(prompts(4, seed=6, low=1, high=9))]
    cold = Rig(make_runner(), prefix_cache=False).run(batch)
    rig = Rig(make_runner())
    rig.run(batch[:1])
    warm = rig.run(batch[1:])
    assert tokens_of(warm) == tokens_of(cold)
    assert [warm[i].cached_tokens for i in range(4)] == [0, 28, 28, 28]


def test_output_blocks_are_shared_with_the_next_turn_of_a_conversation() -> None:
    rig = Rig(make_runner())
    first = rig.run([request(0, range(10), max_tokens=20)])[0].tokens
    second_prompt = [*range(10), *first, 3, 4]
    answer = rig.run([request(1, second_prompt)])[1]
    assert answer.cached_tokens >= 24
    assert answer.tokens == Rig(make_runner()).run([request(1, second_prompt)])[1].tokens


def test_a_stop_id_ends_the_sequence_and_is_reported() -> None:
    free = generate("llama", range(9), 12)
    stop = free[4]
    answer = Rig(make_runner()).run([request(0, range(9), stop_ids=(stop,))])[0]
    assert answer.tokens == free[: free.index(stop) + 1]
    assert answer.finish == FinishCode.STOP


def test_the_context_ends_a_sequence_as_length() -> None:
    answer = Rig(make_runner(max_context_tokens=20)).run([request(0, range(15), max_tokens=50)])[0]
    assert len(answer.tokens) == 5
    assert answer.finish == FinishCode.LENGTH
