"""A window that begins behind the load probe's few tokens is found all the same, or the model is refused."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import masking_utils
from tritandem.config import EngineConfig
from tritandem.engine.host.kv_blocks import BlockPool
from tritandem.engine.model.loader import LoadedModel
from tritandem.engine.model.support import PROBE_TOKENS, UnsupportedModel, inspect_model, window_of
from tritandem.engine.runners.cpu import CpuRunner

from tests.engine.engine_rig import Rig, generate, make_runner, prompts, request, tokens_of

WINDOW, PROMPT_TOKENS, VOCAB = 40, 90, 131
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
SLIDING: dict[str, tuple[Callable[[], transformers.PreTrainedConfig], list[int | None]]] = {
    "in the mask alone": (
        lambda: transformers.PhimoeConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2, sliding_window=WINDOW),
        [WINDOW, WINDOW],
    ),
    "passed to attention": (lambda: transformers.Starcoder2Config(**SMALL, sliding_window=WINDOW), [WINDOW, WINDOW]),
    "of some layers": (
        lambda: transformers.Qwen2Config(
            **SMALL, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1
        ),
        [None, WINDOW],
    ),
    "switched off": (
        lambda: transformers.Qwen2Config(**SMALL, use_sliding_window=False, sliding_window=WINDOW),
        [None, None],
    ),
    "as long as the context": (lambda: transformers.MistralConfig(**SMALL, sliding_window=256), [None, None]),
}  # fmt: skip


@pytest.mark.parametrize(("config", "windows"), SLIDING.values(), ids=SLIDING.keys())
def test_a_prompt_longer_than_the_window_gets_the_tokens_of_transformers(
    config: Callable[[], transformers.PreTrainedConfig], windows: list[int | None]
) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        theirs = transformers.AutoModelForCausalLM.from_config(config(), dtype=torch.float32).eval()
    ours = copy.deepcopy(theirs)
    layers = inspect_model(ours)
    assert [layer.sliding_window for layer in layers] == windows
    ids = torch.from_numpy(np.random.default_rng(1).integers(0, VOCAB, PROMPT_TOKENS))[None]
    want = theirs.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)[0]
    settings = EngineConfig(num_blocks=64, max_sequences=1, block_tokens=4, prefill_tokens_per_step=64)
    answer = Rig(CpuRunner(LoadedModel(ours, layers, VOCAB, 256), settings)).run([request(0, ids[0], max_tokens=8)])[0]
    assert answer.tokens == want[PROMPT_TOKENS:].tolist()


def test_a_long_window_costs_no_long_pass() -> None:
    long = SMALL | {"max_position_embeddings": 131_072}
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.MistralConfig(**long, sliding_window=4096)
    ).eval()
    lengths: list[int] = []
    model.get_input_embeddings().register_forward_pre_hook(lambda _module, args: lengths.append(args[0].shape[-1]))
    assert [layer.sliding_window for layer in inspect_model(model)] == [4096, 4096]
    assert max(lengths) == PROBE_TOKENS


@pytest.mark.parametrize("context", [1, 2, 3, 64, 65, 127, 128, 1000, 4096])
@pytest.mark.parametrize("window", [1, 2, 32, 64, 999])
def test_windows_and_chunks_are_told_apart_by_transformers_own_mask_functions(context: int, window: int) -> None:
    assert window_of(masking_utils.causal_mask_function, context, "cpu") is None
    sliding = masking_utils.sliding_window_causal_mask_function(window)
    assert window_of(sliding, context, "cpu") == (window if window < context else None)
    chunked = masking_utils.chunked_causal_mask_function(window, torch.zeros(1, dtype=torch.int64))
    if window >= context:
        assert window_of(chunked, context, "cpu") is None
    elif window > 1:  # chunks of one token are windows of one
        with pytest.raises(UnsupportedModel, match="neither causal nor a sliding window"):
            window_of(chunked, context, "cpu")


def test_masks_that_show_the_future_or_leave_gaps_are_refused() -> None:
    def every_other(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return (key <= query) & ((query - key) % 2 == 0)

    def prompt_in_both_directions(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return (key <= query) | (key < 7)

    both_ways = masking_utils.bidirectional_mask_function
    for function in (every_other, prompt_in_both_directions, both_ways):
        with pytest.raises(UnsupportedModel, match="neither causal nor a sliding window"):
            window_of(function, 100, "cpu")


def windowed_rig(num_blocks: int = 40, **settings: Any) -> Rig:
    """All layers of the model see nine tokens."""
    return Rig(make_runner("mistral", num_blocks=num_blocks, prefill_tokens_per_step=16, **settings))


def test_blocks_that_no_layer_sees_any_more_are_given_back() -> None:
    batch = prompts(5, seed=4, low=3, high=30)
    rig = windowed_rig()
    rig.add(*(request(number, ids, max_tokens=40) for number, ids in enumerate(batch)))
    while not rig.core.idle():
        rig.step()
        for sequence in rig.core.running:
            if sequence.stored > sequence.prefill_tokens + 4:
                held = [block for block in sequence.blocks if block]
                assert len(held) <= 3 + 8 + 2  # the window, what was reserved, and two begun
                assert sequence.blocks[: sequence.dropped_blocks] == [0] * sequence.dropped_blocks
    answers = tokens_of(rig.answers)
    assert rig.core.load().free_blocks == 39
    for number, ids in enumerate(batch):
        assert answers[number] == generate("mistral", ids, 40)


@pytest.mark.parametrize("settings", [{}, {"attention": "dense"}], ids=["block_runs", "dense"])
def test_what_lies_before_the_window_may_be_anything(settings: dict[str, Any]) -> None:
    """Blocks that were given back, the null block among them, are spoilt in every step."""
    ids = prompts(1, seed=6, low=29, high=30)[0]
    rig = windowed_rig(**settings)
    cache = rig.runner._forward.cache  # type: ignore[attr-defined]
    for turn in range(2):  # the second finds the last blocks of the first in the prefix cache
        rig.add(request(turn, ids, max_tokens=40))
        while not rig.core.idle():
            rig.step()
            held = {block for sequence in rig.core.running for block in sequence.blocks}
            spoilt = [
                block
                for block in range(40)
                if block == 0 or (block not in held | set(rig.core.residency.pool._name_of))
            ]
            for tensor in (*cache.keys, *cache.values):
                tensor[spoilt] = float("nan")
    assert rig.answers[0].tokens == rig.answers[1].tokens == generate("mistral", ids, 40)
    assert rig.answers[1].cached_tokens == 28


def test_a_prefix_is_found_by_the_blocks_that_a_window_sees() -> None:
    pool = BlockPool(12)
    names = [bytes([number]) for number in range(6)]
    blocks = pool.allocate(6)
    for block, name in zip(blocks, names, strict=True):
        pool.register(block, name)
    assert pool.lookup(names, seen_blocks=2) == [0, 0, 0, 0, *blocks[4:]]
    pool.forget([blocks[1], blocks[5]])
    assert pool.lookup(names) == blocks[:1]
    assert pool.lookup(names, seen_blocks=2) == [0, 0, 0, *blocks[3:5]][-5:]
    assert pool.lookup(names, seen_blocks=3) == [0, 0, *blocks[2:5]]
    assert pool.lookup(names, seen_blocks=4) == blocks[:1]
    found = pool.lookup(names, seen_blocks=2)
    pool.share(found)
    pool.free(found)
    pool.free(blocks)
    pool.check_integrity()
    assert pool.free_blocks == 11


def test_cramped_sequences_with_windows_keep_their_tokens() -> None:
    batch = prompts(8, seed=8, low=1, high=6)
    rig = windowed_rig(num_blocks=15)
    answers = tokens_of(rig.run([request(number, ids, max_tokens=24) for number, ids in enumerate(batch)]))
    assert rig.core.load().preemptions > 0
    for number, ids in enumerate(batch):
        assert answers[number] == generate("mistral", ids, 24)


def test_siblings_fork_from_what_their_prompts_end_sees() -> None:
    """One of three is ahead by some tokens when the others get a place: it keeps what they begin on."""
    ids = prompts(1, seed=9, low=27, high=28)[0]
    rig = windowed_rig(max_sequences=2)
    family = [dataclasses.replace(request(number, ids, max_tokens=20 + 9 * number), family=3) for number in range(3)]
    answers = rig.run(family)
    for number in range(3):
        assert answers[number].tokens == generate("mistral", ids, 20 + 9 * number)
    assert answers[2].cached_tokens >= 24
