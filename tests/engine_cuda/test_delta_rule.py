"""Layers with a state: the kernels equal transformers' own functions for whatever sequences a pass packs together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel
from tritandem.config import EngineConfig
from tritandem.engine.attention.interface import AttentionBatch
from tritandem.engine.model.loader import LoadedModel
from tritandem.engine.model.packed import KvCache
from tritandem.engine.model.states.cache import StateCache
from tritandem.engine.model.states.reference import delta_rule as reference
from tritandem.engine.model.support import inspect_model

from tests.engine_cuda.cuda_reference import relative_error

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
SLOTS = 6
IDLE = -1  # as the number of tokens of a row
BASE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
}
KINDS = {
    "Qwen3NextConfig": {"linear_num_key_heads": 2, "linear_num_value_heads": 4},
    "Qwen3_5TextConfig": {"linear_num_key_heads": 3, "linear_num_value_heads": 3},
    "Qwen3_5MoeTextConfig": {"linear_num_key_heads": 1, "linear_num_value_heads": 4},
    "OlmoHybridConfig": {"linear_num_key_heads": 4, "linear_num_value_heads": 4},
}
DIMS = [(16, 16, 4), (24, 8, 3), (8, 40, 2), (128, 128, 4)]
# Tokens of each row, pass by pass: chunks that begin and go on, single tokens, rows that idle.
PASSES = [
    [(0, 5), (3, 1), (5, 33)],
    [(3, 1), (0, 1), (1, IDLE), (5, 1)],
    [(2, 3), (5, 17), (0, 2), (3, 1)],
    [(0, 1), (2, 1)],
    [(0, 18)],
]


def model_of(kind: str, dims: tuple[int, int, int], device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    key_dim, value_dim, kernel = dims
    sizes = {"linear_key_head_dim": key_dim, "linear_value_head_dim": value_dim, "linear_conv_kernel_dim": kernel}
    config = getattr(transformers, kind)(**BASE, **KINDS[kind], **sizes, pad_token_id=None, eos_token_id=None)
    with torch.random.fork_rng():
        torch.manual_seed(sum(dims))
        return AutoModelForCausalLM.from_config(config).to(device, dtype).eval().requires_grad_(False)


def packed(passed: list[tuple[int, int]], stored: dict[int, int], device: torch.device) -> AttentionBatch:
    counts = [1 if count == IDLE else count for _, count in passed]
    contexts = []
    for slot, count in passed:
        stored[slot] = stored.get(slot, 0) + max(0, count)
        contexts.append(0 if count == IDLE else stored[slot])
    nothing = torch.zeros(0, device=device)
    return AttentionBatch(
        slot_mapping=nothing,
        block_tables=nothing,
        context_lens=torch.tensor(contexts, dtype=torch.int32, device=device),
        query_starts=torch.tensor([0, *counts], device=device).cumsum(0).to(torch.int32),
        max_query_tokens=max(counts),
        max_context_tokens=max(contexts),
        decode=max(counts) == 1,
        slots=torch.tensor([slot for slot, _ in passed], device=device),
    )


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dims", DIMS)
def test_kernels_equal_transformers_functions_pass_after_pass(
    kernel_device: torch.device, kind: str, dims: tuple[int, int, int]
) -> None:
    from tritandem.engine.model.states.launches import delta_rule

    on_gpu = kernel_device.type == "cuda"
    if dims[0] == 128 and not on_gpu and kind != "Qwen3NextConfig":
        pytest.skip("slow in the interpreter")
    for dtype in [torch.float32, torch.bfloat16] if on_gpu else [torch.float32]:
        model = model_of(kind, dims, kernel_device, dtype)
        caches = [StateCache.allocate(model, SLOTS) for _ in range(2)]
        ours, theirs = (replace(c, rule=rule) for c, rule in zip(caches, (delta_rule, reference), strict=True))
        for cache in (ours, theirs):  # a slot's last owner leaves its state behind
            for tensor in (*cache.conv.values(), *cache.recurrent.values()):
                tensor.fill_(7.0)
        generator, stored = torch.Generator().manual_seed(3), dict[int, int]()
        for passed in PASSES:
            batch = packed(passed, stored, kernel_device)
            hidden = torch.randn(1, int(batch.query_starts[-1]), 64, generator=generator).to(kernel_device, dtype)
            got, want = (cache.mix(1, hidden, batch) for cache in (ours, theirs))
            active = torch.cat(
                [torch.full((max(1, count),), count != IDLE, device=kernel_device) for _, count in passed]
            )
            assert relative_error(got[:, active], want[:, active]) < TOLERANCE[dtype]
            assert torch.isfinite(got).all()
            for mine, other in ((ours.conv, theirs.conv), (ours.recurrent, theirs.recurrent)):
                assert relative_error(mine[1], other[1]) < TOLERANCE[dtype]
        assert bool((ours.recurrent[1][1] == 7.0).all())  # idled all the time
        assert bool((ours.recurrent[1][4] == 7.0).all())  # was in no pass


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_norms_in_a_kernel_equal_the_models_own(kernel_device: torch.device, kind: str) -> None:
    from tritandem.engine.model.states.norms import use_norms

    for dtype in [torch.float32, torch.bfloat16] if kernel_device.type == "cuda" else [torch.float32]:
        model = model_of(kind, (16, 16, 4), kernel_device, dtype)
        generator = torch.Generator().manual_seed(1)
        norms = [module for module in model.modules() if type(module).__name__.endswith("RMSNorm")]
        for norm in norms:
            norm.weight.data += torch.randn(norm.weight.shape, generator=generator).to(norm.weight)
        shapes = [(1, 5, n.weight.shape[0]) for n in norms] + [(1, 5, 4, n.weight.shape[0]) for n in norms]
        given = [3 * torch.randn(*s[:-1], 2 * s[-1], generator=generator).to(kernel_device, dtype) for s in shapes]
        given = [x[..., : x.shape[-1] // 2] for x in given]  # rows that are not next to each other
        want = [norm(x) for norm, x in zip(norms * 2, given, strict=True)]
        assert use_norms(model) == len(norms) >= 11
        for norm, x, right in zip(norms * 2, given, want, strict=True):
            assert relative_error(norm(x), right) < TOLERANCE[dtype]
            assert torch.equal(norm(x.transpose(0, 1)), type(norm).forward(norm, x.transpose(0, 1)))


@pytest.mark.gpu
def test_chunks_and_decode_steps_on_a_device_equal_transformers(kernel_device: torch.device) -> None:
    """Two sequences in rows of their own; decode steps have them in another order, with rows of padding between."""
    from tritandem.engine.model.device_forward import DeviceForward
    from tritandem.engine.model.states.launches import delta_rule
    from tritandem.engine.rows.inputs import PassInputs
    from tritandem.engine.rows.state import SlotState

    model = model_of("Qwen3NextConfig", (16, 16, 4), kernel_device, torch.float32)
    texts = [torch.arange(count, device=kernel_device) * factor % 97 for count, factor in ((20, 7), (9, 5))]
    whole = [model(text[None]).logits[0] for text in texts]
    loaded = LoadedModel(model, inspect_model(model), 97, 128)
    forward = DeviceForward(loaded, EngineConfig(), 3, lambda message: None)
    assert forward._packed.states is not None
    forward._packed.states = replace(forward._packed.states, rule=delta_rule)
    forward.use(KvCache.allocate(loaded.layers, 9, 16, torch.float32, kernel_device))
    state = SlotState.empty(3, 4, 97, kernel_device)
    state.block_table[1, :2] = torch.tensor([3, 4], dtype=torch.int32)
    state.block_table[2, :2] = torch.tensor([5, 6], dtype=torch.int32)
    inputs = PassInputs.empty(25, 2, kernel_device)
    inputs.token_slots[:] = torch.tensor([1] * 18 + [2] * 7)
    inputs.slots[:] = torch.tensor([1, 2])
    inputs.positions[:] = torch.tensor([*range(18), *range(7)])
    inputs.starts[:] = torch.tensor([0, 18, 25])
    inputs.context_lens[:] = torch.tensor([18, 7])
    chunks, ids = inputs.batch(state, 16, 18, 18), torch.cat((texts[0][:18], texts[1][:7]))
    with torch.inference_mode():
        last = torch.tensor([17, 24], device=kernel_device)
        got = forward.prefill(ids, inputs.positions.long(), last, chunks)
        assert relative_error(got, torch.stack((whole[0][17], whole[1][6]))) < 1e-3
        for step in range(2):
            fed = [int(texts[1][7 + step]), 0, int(texts[0][18 + step]), 0]
            at = torch.tensor([7 + step, 0, 18 + step, 0], device=kernel_device)
            lens = torch.tensor([8 + step, 0, 19 + step, 0], dtype=torch.int32, device=kernel_device)
            rows = torch.tensor([2, 3, 1, 3], device=kernel_device)
            got = forward.decode(state, 16, torch.tensor(fed, device=kernel_device), at, rows, lens)
            assert relative_error(got[[2, 0]], torch.stack((whole[0][18 + step], whole[1][7 + step]))) < 1e-3


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_a_hybrid_gives_transformers_tokens_on_cuda(cuda_device: torch.device, kind: str) -> None:
    """Through the whole runner: chunks, decode steps in graphs, rows that come and go."""
    import numpy as np
    from tritandem.engine.runners.cuda import CudaRunner

    from tests.engine.engine_rig import Rig, request

    model = model_of(kind, (16, 16, 4), cuda_device, torch.float32)
    rng = np.random.default_rng(7)
    prompts = [rng.integers(0, 97, size, dtype=np.int32) for size in (30, 1, 9, 17, 4)]
    wanted = []
    for ids in prompts:
        prompt = torch.from_numpy(ids).long()[None].to(cuda_device)
        answer = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, min_new_tokens=12, do_sample=False
        )
        wanted.append(answer[0, len(ids) :].tolist())
    loaded = LoadedModel(model, inspect_model(model), 97, 128)
    config = EngineConfig(
        device="cuda", num_blocks=24, max_sequences=3, block_tokens=16, prefill_tokens_per_step=16, dtype="float32"
    )
    runner = CudaRunner(loaded, config, lambda message: None)
    try:
        answers = Rig(runner).run([request(i, ids, max_tokens=12) for i, ids in enumerate(prompts)])
        assert runner.device.captures.captured() > 0
    finally:
        runner.close()
    assert [answers[i].tokens for i in range(len(prompts))] == wanted
