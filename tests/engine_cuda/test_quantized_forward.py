"""Models with packed weights run on the fused decoder, or unpacked where it cannot run them."""

from __future__ import annotations

import copy
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel
from tritandem.config import EngineConfig
from tritandem.engine.attention import registry as attention
from tritandem.engine.model.loader import LoadedModel, load_model
from tritandem.engine.model.packed import ATTENTION_NAME, KvCache
from tritandem.engine.model.quantized.files import quantized_files
from tritandem.engine.model.quantized.loading import load_quantized, quantize_model
from tritandem.engine.model.quantized.packing import PackedLinear
from tritandem.engine.model.support import inspect_model

pytest.importorskip("triton")
from tritandem.engine.model.device_forward import DeviceForward

from tests.added.loop_attention import LoopAttention
from tests.engine import quantized_folders as made
from tests.engine.engine_rig import Rig, request
from tests.test_to_change import greedily

PROMPT = np.arange(9, dtype=np.int32)
BLOCKS = ({"quant_method": "fp8", "weight_block_size": [32, 32]}, made.fp8_block(32, 32))


def generate(model: PreTrainedModel) -> list[int]:
    ids = torch.from_numpy(PROMPT).long()[None].to(model.device)
    output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
    return output[0, len(PROMPT) :].tolist()


def packed_layers(model: PreTrainedModel) -> int:
    return sum(isinstance(module, PackedLinear) for module in model.modules())


def forward_of(model: PreTrainedModel, told: list[str], monkeypatch: pytest.MonkeyPatch) -> DeviceForward:
    """It compares its fused decoder with the modules' own products, over a prefill and a decode step."""
    model.eval().requires_grad_(False)
    registered = {"loop": lambda shapes, max_rows, device: LoopAttention()}
    monkeypatch.setattr(attention, "BACKENDS", MappingProxyType({"cuda": registered}))
    return DeviceForward(LoadedModel(model, inspect_model(model), 97, 128), EngineConfig(), 1, told.append)


# How many of 14 layers our kernels have tiles for: codes come in pairs of spans of 32, and 96 and 160 inputs do not.
@pytest.mark.parametrize(
    ("kind", "packed"),
    [
        ("compressed-tensors FP8 dynamic", 14),
        ("blocks", 14),
        ("GPTQ act order", 10),
    ],
)
def test_packed_checkpoints_run_on_the_fused_decoder(
    kind: str, packed: int, kernel_device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernel_device.type == "cuda":
        pytest.skip("the loop attention computes on a CPU; the test of a whole engine is below")
    reference = made.tiny_model()
    made.write(tmp_path, reference, *(BLOCKS if kind == "blocks" else made.FORMATS[kind]))
    files = quantized_files(tmp_path, None)
    assert files is not None
    told: list[str] = []
    model = load_quantized(
        files, copy.deepcopy(reference.config), torch.float32, kernel_device, told.append, True, ATTENTION_NAME
    )
    assert packed_layers(model) == packed
    assert (f"{14 - packed} of them unpacked to torch.float32" in told[0]) == (packed < 14)
    ids = torch.arange(23)[None] * 31 % 97
    for either in (model, reference):
        either.set_attn_implementation("eager")
    with torch.no_grad():
        ours, theirs = model(input_ids=ids).logits, reference(input_ids=ids).logits
    assert float((ours - theirs).norm() / theirs.norm()) < 1e-5
    model.set_attn_implementation(ATTENTION_NAME)
    assert forward_of(model, told, monkeypatch).fused


def test_what_runs_on_transformers_code_is_unpacked(
    kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernel_device.type == "cuda":
        pytest.skip("the loop attention computes on a CPU")
    model = made.tiny_model()
    told: list[str] = []
    reference = copy.deepcopy(model)
    quantize_model(reference, "fp8", "lm_head", kernel_device, told.append, packed=False)
    quantize_model(model, "fp8", "lm_head, *.0.self_attn.q_proj", kernel_device, told.append, packed=True)
    weight = reference.get_submodule("model.layers.0.self_attn.q_proj").weight
    weight.data = model.get_submodule("model.layers.0.self_attn.q_proj").weight.data.clone()
    assert packed_layers(model) == 13
    model.set_attn_implementation(ATTENTION_NAME)
    forward = forward_of(model, told, monkeypatch)
    assert not forward.fused  # one of three projections side by side is whole
    assert packed_layers(model) == 0
    assert any(line.startswith("13 layers unpacked to torch.float32") for line in told)
    forward.use(KvCache.allocate(inspect_model(model), 9, 4, torch.float32, model.device))
    assert greedily(forward, PROMPT, 12) == generate(reference)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["fp8", "int4", "blocks", *made.FORMATS])
def test_an_engine_on_cuda_answers_from_packed_weights(
    cuda_device: torch.device, kind: str, dtype: str, tmp_path: Path
) -> None:
    """Captured steps. In float32 the tokens of the unpacked model; in bfloat16 a chosen one may lie a little behind."""
    from tritandem.engine.runners.cuda import CudaRunner

    reference = made.tiny_model()
    online = kind in ("fp8", "int4")
    if online:
        reference.save_pretrained(tmp_path)
        # Where it will be served, in its type: the largest value of a group lies between two codes, by the last digit.
        reference.to(getattr(torch, dtype))
        quantize_model(reference, kind, "lm_head", cuda_device, lambda note: None, packed=False)
        reference.float().cpu()
    else:
        made.write(tmp_path, reference, *(BLOCKS if kind == "blocks" else made.FORMATS[kind]))
    quantization = kind if online else "none"
    config = EngineConfig(device="cuda", dtype=dtype, num_blocks=64, max_sequences=48, quantization=quantization)
    loaded = load_model(tmp_path, config, lambda note: None)
    runner = CudaRunner(loaded, config, lambda note: None)
    assert runner.device.forward.fused
    rng = np.random.default_rng(3)
    texts = [rng.integers(0, 97, int(rng.integers(1, 60)), dtype=np.int32) for _ in range(48)]
    try:
        answers = Rig(runner).run([request(i, ids, max_tokens=8) for i, ids in enumerate(texts)])
    finally:
        runner.close()
    for i, ids in enumerate(texts):
        tokens = answers[i].tokens
        with torch.no_grad():
            logits = reference(torch.tensor([*ids.tolist(), *tokens])[None]).logits[0, len(ids) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        behind = float(((logits.amax(dim=1) - chosen) / logits.std(dim=1)).max())
        assert behind < (1e-4 if dtype == "float32" else 1.0), f"sequence {i}: {tokens}"
