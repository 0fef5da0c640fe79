"""Mixtures of experts: the kernels equal a plain loop for any routing, and fused families equal transformers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from tritandem.config import EngineConfig
from tritandem.engine.model.loader import LoadedModel
from tritandem.engine.model.support import inspect_model

from tests.engine_cuda.cuda_reference import relative_error
from tests.engine_cuda.tiny_shape import SHAPE, VOCAB

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1e-2}
GATES: dict[str, dict[str, Any]] = {
    "silu": {"kind": "silu"},
    "gelu": {"kind": "gelu_tanh", "interleaved": True},
    "clamped": {"kind": "clamped", "interleaved": True, "alpha": 1.7, "limit": 2.0},
}


def dtypes(device: torch.device) -> list[torch.dtype]:
    return [torch.float32, torch.bfloat16] if device.type == "cuda" else [torch.float32]


def loop(x: torch.Tensor, index: torch.Tensor, scores: torch.Tensor, weights: Any) -> torch.Tensor:
    """One (token, expert) pair at a time, in float32."""
    from tritandem.engine.model.experts.dense import apply_gate

    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for token, experts in enumerate(index.tolist()):
        for place, expert in enumerate(experts):
            both = weights.gate_up[expert].float() @ x[token].float()
            if weights.gate_up_bias is not None:
                both += weights.gate_up_bias[expert].float()
            result = weights.down[expert].float() @ apply_gate(weights.gate, both).to(x.dtype).float()
            if weights.down_bias is not None:
                result += weights.down_bias[expert].float()
            out[token] += scores[token, place].float() * result
    return out


ROUTINGS = {
    "even": lambda tokens, experts, top_k, g: torch.rand(tokens, experts, generator=g).topk(top_k).indices,
    "to the same few": lambda tokens, experts, top_k, g: torch.arange(top_k).flip(0).expand(tokens, top_k),
    "to the last": lambda tokens, experts, top_k, g: experts - 1 - torch.arange(top_k).expand(tokens, top_k),
}


@pytest.mark.gpu
@pytest.mark.parametrize("routing", ROUTINGS.values(), ids=ROUTINGS.keys())
@pytest.mark.parametrize(
    ("gate", "tokens", "experts", "top_k", "inner", "columns"),
    [
        ("silu", 1, 8, 2, 64, 48),
        ("clamped", 3, 5, 3, 300, 10),
        ("gelu", 9, 6, 2, 72, 20),
        ("clamped", 19, 3, 2, 40, 70),
        ("silu", 35, 4, 1, 24, 16),
    ],
)
def test_experts_equal_a_plain_loop(
    kernel_device: torch.device,
    routing: Any,
    gate: str,
    tokens: int,
    experts: int,
    top_k: int,
    inner: int,
    columns: int,
) -> None:
    from tritandem.engine.model.experts.interface import Gate
    from tritandem.engine.model.experts.launches import Weights, by_pairs, by_tiles

    generator = torch.Generator().manual_seed(tokens)
    index = routing(tokens, experts, top_k, generator).to(kernel_device, torch.int32).contiguous()
    for dtype in dtypes(kernel_device):

        def random(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            return (torch.randn(*shape, generator=generator) / shape[-1] ** 0.5).to(kernel_device, dtype)

        biased = gate == "clamped"
        weights = Weights(
            random(experts, 2 * columns, inner),
            random(experts, inner, columns),
            random(experts, 2 * columns) if biased else None,
            random(experts, inner) if biased else None,
            Gate(**GATES[gate]),
        )
        x, scores = 4 * random(tokens, inner), torch.rand(tokens, top_k, generator=generator).to(kernel_device)
        want = loop(x, index, scores, weights)
        residual = random(tokens, inner)
        for run in (
            lambda into, x=x, s=scores, w=weights: by_pairs(x, index, s, w, into, False),
            lambda into, x=x, s=scores, w=weights: by_tiles(x, index, s, w, 16, into, False),
        ):
            assert relative_error(run(None), want) < TOLERANCE[dtype]
            into = residual.clone()
            assert run(into) is into
            assert relative_error(into, want + residual.float()) < TOLERANCE[dtype]


@pytest.mark.gpu
@pytest.mark.parametrize(("experts", "top_k"), [(4, 1), (8, 2), (60, 6), (128, 8)])
@pytest.mark.parametrize("sum_to_one", [False, True])
def test_the_routing_is_softmax_and_the_largest(
    kernel_device: torch.device, experts: int, top_k: int, sum_to_one: bool
) -> None:
    from tritandem.engine.model.experts.launches import route

    logits = 3 * torch.randn(7, experts, generator=torch.Generator().manual_seed(experts)).to(kernel_device)
    index, scores = route(logits, top_k, sum_to_one)
    want, wanted = logits.softmax(dim=-1).topk(top_k)
    if sum_to_one:
        want = want / want.sum(dim=-1, keepdim=True)
    assert torch.equal(index.long(), wanted)
    torch.testing.assert_close(scores, want, atol=1e-6, rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # an interpreter's, about NaN
def test_a_row_that_broke_still_names_experts_that_are_there(kernel_device: torch.device) -> None:
    from tritandem.engine.model.experts.launches import route

    logits = torch.full((3, 6), float("nan"), device=kernel_device)
    logits[1], logits[2, 2:] = float("-inf"), 1.0
    index, _ = route(logits, 2, True)
    assert ((index >= 0) & (index < 6)).all()


def test_the_plan_for_a_number_of_tokens_is_bounded() -> None:
    pytest.importorskip("triton")
    from tritandem.engine.model.experts.launches import choose_block_k, choose_tokens_a_tile

    assert [choose_tokens_a_tile(tokens, 8, 128) for tokens in (1, 4, 5, 64, 256, 1024, 1025)] == [
        1, 1, 16, 16, 32, 64, None,
    ]  # fmt: skip
    assert [choose_tokens_a_tile(tokens, 2, 8) for tokens in (1, 2, 64, 257)] == [1, 16, 32, None]
    assert [choose_block_k(inner) for inner in (768, 2048, 2880, 100, 1408)] == [256, 2048, 1024, 256, 512]


_MOE = {name: value for name, value in SHAPE.items() if name != "head_dim"} | {"pad_token_id": None}
CONFIGS = {
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **_MOE, head_dim=32, moe_intermediate_size=48, num_experts=8, num_experts_per_tok=2, norm_topk_prob=True
    ),
    "qwen3_moe with dense layers": lambda: transformers.Qwen3MoeConfig(
        **_MOE, head_dim=32, moe_intermediate_size=48, num_experts=8, num_experts_per_tok=2, mlp_only_layers=[0]
    ),
    "mixtral": lambda: transformers.MixtralConfig(**_MOE, head_dim=32, num_local_experts=4, num_experts_per_tok=2),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **_MOE, head_dim=32, num_local_experts=4, num_experts_per_tok=2, sliding_window=20
    ),
    "qwen2_moe": lambda: transformers.Qwen2MoeConfig(
        **_MOE,
        moe_intermediate_size=48,
        shared_expert_intermediate_size=40,
        num_experts=8,
        num_experts_per_tok=2,
    ),
}
OWN_ROUTER = {"qwen3_moe", "qwen3_moe with dense layers", "mixtral", "gpt_oss"}


@pytest.mark.gpu
@pytest.mark.parametrize("family", CONFIGS)
def test_a_fused_mixture_gives_transformers_logits(kernel_device: torch.device, family: str) -> None:
    from tritandem.engine.model.device_forward import PROBE_BLOCK_TOKENS, DeviceForward
    from tritandem.engine.model.experts.block import RoutedExperts
    from tritandem.engine.model.support import _one_row_batch

    torch.manual_seed(4)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[family](), dtype=torch.float32).to(kernel_device)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):  # zeros would hide a bias that nobody adds
            torch.nn.init.normal_(parameter, std=0.3)
    theirs = copy.deepcopy(model).eval()
    loaded = LoadedModel(model.eval().requires_grad_(False), inspect_model(model), VOCAB, 128)
    forward = DeviceForward(loaded, EngineConfig(), 4, lambda note: None)
    assert forward.fused
    mixtures = [part for layer in forward._fused._layers if isinstance(part := layer.feed_forward, RoutedExperts)]
    assert len(mixtures) == (1 if "dense" in family else 2)
    assert {part.own_router for part in mixtures} == {family in OWN_ROUTER}
    ids = torch.arange(PROBE_BLOCK_TOKENS, device=kernel_device) * 31 % VOCAB
    rows = positions = torch.arange(len(ids), device=kernel_device)
    batch = _one_row_batch(0, len(ids), kernel_device)
    with torch.inference_mode():
        got = forward.prefill(ids, positions, rows, batch_of(batch, len(ids)))
        want = theirs(ids[None]).logits[0]
    assert relative_error(got, want) < 1e-4


def batch_of(batch: Any, count: int) -> Any:
    """The probe's one-row batch, whose block 1 holds `count` tokens instead of the probe's number."""
    import dataclasses

    return dataclasses.replace(batch, slot_mapping=torch.arange(count, 2 * count, device=batch.slot_mapping.device))
