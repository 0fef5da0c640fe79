"""Quantized checkpoints give the logits of the model with unpacked weights, and what is not served is named."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config, Qwen3MoeConfig
from tritandem.config import EngineConfig
from tritandem.contracts.errors import ConfigError
from tritandem.engine.model.loader import check_model, load_model
from tritandem.engine.model.quantized.files import quantized_files
from tritandem.engine.model.quantized.kv_scales import use_cache_scales
from tritandem.engine.model.quantized.loading import quantize_model
from tritandem.engine.model.quantized.packing import PackedLinear
from tritandem.engine.model.quantized.weight import quantize_fp8, quantize_int4
from tritandem.engine.runners.cpu import CpuRunner

from tests.engine import quantized_folders as made
from tests.engine.engine_rig import Rig, request

CPU = EngineConfig(device="cpu", num_blocks=32, block_tokens=8)
IDS = torch.arange(23)[None] * 31 % 97
# float32 throughout: what is left is the order of sums and, for four bits, where a product was rounded.
TOLERANCE = 1e-5


def silent(_message: str) -> None:
    pass


def logits(model: PreTrainedModel) -> torch.Tensor:
    model.set_attn_implementation("eager")
    with torch.no_grad():
        return model(input_ids=IDS).logits[0]


def distance(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm())


@pytest.mark.parametrize("kind", made.FORMATS)
def test_a_checkpoint_gives_the_logits_of_its_unpacked_weights(kind: str, tmp_path: Path) -> None:
    stated, store = made.FORMATS[kind]
    reference = made.tiny_model()
    before = logits(reference)
    made.write(tmp_path, reference, stated, store)
    check_model(tmp_path)
    told: list[str] = []
    ours = load_model(tmp_path, CPU, told.append).model
    assert ours.dtype == torch.float32
    assert distance(logits(ours), logits(reference)) < TOLERANCE
    assert distance(logits(ours), before) > 10 * TOLERANCE  # quantizing changed something
    [line] = [line for line in told if " layers in " in line]
    assert "14 of them unpacked to torch.float32: 0.00 GB, in the files 0.00" in line


def test_an_engine_answers_from_a_quantized_checkpoint(tmp_path: Path) -> None:
    reference = made.tiny_model()
    made.write(tmp_path, reference, *made.FORMATS["GPTQ act order"])
    answer = Rig(CpuRunner(load_model(tmp_path, CPU, silent), CPU)).run([request(0, range(9))])[0]
    ids = torch.arange(9)[None]
    wanted = reference.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
    assert answer.tokens == wanted[0, 9:].tolist()


FP8_CACHE = dataclasses.replace(CPU, kv_dtype="fp8_e4m3")
NAMES = {
    "ModelOpt": ("k_proj.k_scale", "v_proj.v_scale"),
    "compressed-tensors": ("k_scale", "v_scale"),
    "older": ("k_proj.output_scale", "v_proj.output_scale"),
    "one for both": ("kv_scale",),
}


def with_large_keys() -> PreTrainedModel:
    """Keys and values of thousands, which an FP8 cache without scales cuts; the same answers."""
    model = made.tiny_model()
    for layer in model.model.layers:
        for name, factor in (("k_proj", 2000.0), ("q_proj", 1 / 2000), ("v_proj", 4000.0), ("o_proj", 1 / 4000)):
            getattr(layer.self_attn, name).weight.data *= factor
    return model


@pytest.mark.parametrize("names", NAMES)
def test_calibrated_scales_of_keys_and_values_keep_them_inside_an_fp8_cache(names: str, tmp_path: Path) -> None:
    reference = with_large_keys()
    scales = {
        f"model.layers.{i}.self_attn.{name}": torch.tensor([[30.0], [100.0]]) for i in range(2) for name in NAMES[names]
    }
    made.write(tmp_path, reference, *made.FORMATS["ModelOpt FP8"], **scales)
    check_model(tmp_path)
    told: list[str] = []
    loaded = load_model(tmp_path, FP8_CACHE, told.append)
    assert "calibrated scales of the KV cache of 2 layers are part of its weights, as powers of two" in told
    answer = Rig(CpuRunner(loaded, FP8_CACHE)).run([request(0, range(9), max_tokens=8)])[0]
    assert distance(logits(loaded.model), logits(reference)) < TOLERANCE, "what is not cached is what it was"
    before = made.tiny_model().model.layers[0].self_attn.k_proj.weight.data.abs().max() * 2000
    after = loaded.model.model.layers[0].self_attn.k_proj.weight.abs().max()
    assert float(before / after) == pytest.approx(128, rel=0.05)
    prompt = list(range(9))
    with torch.no_grad():
        full = reference(torch.tensor([prompt + answer.tokens])).logits[0, len(prompt) - 1 : -1]
    behind = full.amax(1) - full.gather(1, torch.tensor(answer.tokens)[:, None])[:, 0]
    assert float((behind / full.std(1)).max()) < 0.4, "FP8's digits may turn a choice, not more"


def test_scales_of_a_cache_that_are_not_used_are_told(tmp_path: Path) -> None:
    reference = with_large_keys()
    scales = {
        f"model.layers.{i}.self_attn.{name}": torch.tensor(9.0) for i in range(2) for name in ("k_scale", "v_scale")
    }
    stated, store = made.FORMATS["compressed-tensors FP8 dynamic"]
    for config, cache, said in (
        (CPU, None, "are not used: the KV cache is torch.float32; engine.kv_dtype fp8_e4m3 uses them"),
        (FP8_CACHE, {"num_bits": 8, "type": "int"}, "are not used: they are for 8-bit int"),
    ):
        folder = tmp_path / str(cache)
        folder.mkdir()
        made.write(folder, with_large_keys(), {**stated, "kv_cache_scheme": cache}, store, **scales)
        told: list[str] = []
        load_model(folder, config, told.append)
        assert any(line.endswith(said) for line in told), told
    del scales["model.layers.1.self_attn.v_scale"]
    made.write(folder, reference, stated, store, **scales)
    with pytest.raises(ConfigError, match="self_attn has a scale of k alone"):
        load_model(folder, FP8_CACHE, silent)


@torch.no_grad()
def test_scales_go_into_the_norms_of_keys_and_into_packed_weights() -> None:
    config = Qwen3Config(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=128, initializer_range=0.3, attention_bias=True,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    quantize_model(model, "int4", "lm_head", torch.device("cpu"), silent, packed=True)
    before = logits(model)
    names = [f"model.layers.{i}.self_attn" for i in range(2)]
    packed = model.get_submodule(f"{names[0]}.v_proj")
    assert isinstance(packed, PackedLinear)
    values = packed(torch.ones(1, 64))
    assert use_cache_scales(model, dict.fromkeys(names, (0.07, 5.0))) is None
    assert torch.equal(packed(torch.ones(1, 64)) * 8.0, values)
    assert model.get_parameter(f"{names[0]}.k_norm.weight").unique().tolist() == [8.0]
    assert distance(logits(model), before) < TOLERANCE
    assert use_cache_scales(model, {"model.layers.7": (1.0, 1.0)}) == "model.layers.7 is no part of this model"


def test_calibrated_scales_of_inputs_are_read(tmp_path: Path) -> None:
    made.write(tmp_path, made.tiny_model(), *made.FORMATS["compressed-tensors FP8 static"])
    files = quantized_files(tmp_path, None)
    assert files is not None
    assert [files.read(layer).input_scale for layer in files.layers.values()] == pytest.approx([0.25] * 14)


def test_modelopt_may_state_it_in_a_file_of_its_own(tmp_path: Path) -> None:
    reference = made.tiny_model()
    made.write(tmp_path, reference, {}, made.fp8_tensor)
    stated = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(stated))
    assert distance(logits(load_model(tmp_path, CPU, silent).model), logits(reference)) < TOLERANCE


def test_experts_that_the_model_merges_are_unpacked_too(tmp_path: Path) -> None:
    config = Qwen3MoeConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, moe_intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_experts=4, num_experts_per_tok=2,
        max_position_embeddings=128, initializer_range=0.3, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(3)
        reference = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    reference.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    experts = [name for name in tensors if ".experts." in name and name.endswith("_proj.weight")]
    assert len(experts) == 2 * 4 * 3
    dense = dict(tensors)
    for name in experts:
        parts, dense[name] = made.fp8_channel(tensors.pop(name))
        tensors |= {f"{name.removesuffix('weight')}{part}": tensor for part, tensor in parts.items()}
    (tmp_path / "dense").mkdir()
    config.save_pretrained(tmp_path / "dense")
    save_file(dense, tmp_path / "dense" / "model.safetensors")
    save_file(tensors, tmp_path / "model.safetensors")
    state(tmp_path, made.FORMATS["compressed-tensors FP8 dynamic"][0])
    ours, theirs = (load_model(folder, CPU, silent).model for folder in (tmp_path, tmp_path / "dense"))
    assert distance(logits(ours), logits(theirs)) < TOLERANCE


def state(folder: Path, stated: dict[str, Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": stated}))


@pytest.mark.parametrize(
    ("stated", "reason"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quantized by 'bitsandbytes', which is not served"),
        ({"bits": 4}, "quantized by 'an unnamed method'"),
        ({**made.GPTQ, "bits": 8}, r"gptq \(8 bits\)"),
        ({**made.GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format marlin"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version gemv"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, r"modelopt \(NVFP4\)"),
        (made.compressed(made.eight("channel") | {"type": "int"}), "8-bit int weights"),
        (made.compressed(made.four(16) | {"type": "float"}), "4-bit float weights"),
        (made.compressed(made.four(32), made.eight("token")), "activations of 8-bit float"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size: given"),
    ],
)
def test_a_kind_that_is_not_served_is_named(stated: dict[str, Any], reason: str, tmp_path: Path) -> None:
    made.write(tmp_path, made.tiny_model(), stated, made.fp8_channel)
    for refuse in (check_model, lambda path: load_model(path, CPU, silent)):
        with pytest.raises(ConfigError, match=reason) as raised:
            refuse(tmp_path)
        assert str(tmp_path) in str(raised.value)


DOWN = "model.layers.1.mlp.down_proj"


@pytest.mark.parametrize(
    ("kind", "changes", "reason"),
    [
        ("FP8 by tensor", {"weight_scale": None}, "has no weight_scale"),
        ("FP8 by tensor", {"input_scale": torch.ones(160)}, "input_scale has 160 values; one for all"),
        ("FP8 by tensor", {"input_scale": torch.tensor(0.0)}, "its input_scale is 0.0"),
        ("FP8 by tensor", {"weight": torch.zeros(64, 160, dtype=torch.float8_e5m2)}, "F8_E5M2 are not served"),
        ("FP8 by tensor", {"weight": torch.zeros(64, 160, dtype=torch.int8)}, "weights of type I8 are not served"),
        ("fine-grained FP8", {"weight_scale_inv": torch.ones(2, 3)}, r"scales \(2, 3\).*expected \(2, 4\)"),
        ("compressed-tensors INT4 g32", {"weight_shape": torch.tensor([64, 159])}, r"weight_shape is \(64, 159\)"),
        ("compressed-tensors INT4 g32", {"weight_scale": torch.ones(64, 3)}, "160 inputs cannot be cut into 3 groups"),
        ("compressed-tensors INT4 g32", {"weight_packed": torch.zeros(64, 80, dtype=torch.uint8)}, "type U8"),
        ("GPTQ", {"qweight": torch.zeros(40, 64, dtype=torch.int32)}, "not four bits a weight: 160 inputs"),
        ("GPTQ", {"g_idx": torch.full((160,), 9, dtype=torch.int32)}, "g_idx names group 9 of 5"),
        ("AWQ", {"qzeros": torch.zeros(5, 9, dtype=torch.int32)}, r"zero points \(5, 9\): expected \(5, 8\)"),
        ("AWQ", {"scales": None}, "has no scales"),
    ],
)
def test_a_layer_that_is_not_served_is_named(
    kind: str, changes: dict[str, torch.Tensor | None], reason: str, tmp_path: Path
) -> None:
    made.write(tmp_path, made.tiny_model(), *made.FORMATS[kind])
    tensors = load_file(tmp_path / "model.safetensors")
    for part, tensor in changes.items():
        del tensors[f"{DOWN}.{part}"]
        if tensor is not None:
            tensors[f"{DOWN}.{part}"] = tensor
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=f"{DOWN}.*{reason}"):
        load_model(tmp_path, CPU, silent)


def test_weights_that_are_missing_or_left_over_are_named(tmp_path: Path) -> None:
    made.write(tmp_path, made.tiny_model(), *made.FORMATS["AWQ"])
    tensors = load_file(tmp_path / "model.safetensors")
    for part in ("qweight", "qzeros", "scales"):
        tensors[f"model.layers.7.mlp.down_proj.{part}"] = tensors.pop(f"{DOWN}.{part}")
    save_file(tensors, tmp_path / "model.safetensors")
    for refuse in (check_model, lambda path: load_model(path, CPU, silent)):
        with pytest.raises(ConfigError, match=rf"missing \(1\): {DOWN}\.weight"):
            refuse(tmp_path)


# -- quantized at load -----------------------------------------------------------------------------------


def test_whole_weights_are_quantized_at_load_but_for_layers_that_are_kept(tmp_path: Path) -> None:
    reference = made.tiny_model()
    reference.save_pretrained(tmp_path)
    told: list[str] = []
    config = EngineConfig(device="cpu", quantization="fp8", unquantized_layers="lm_head, *.1.mlp.*")
    ours = load_model(tmp_path, config, told.append).model
    for name, module in reference.named_modules():
        if type(module) is torch.nn.Linear:
            weight = ours.get_submodule(name).weight
            kept = name == "lm_head" or ".1.mlp." in name
            assert torch.equal(weight, module.weight) == kept, name
            assert kept or torch.equal(weight, made.fp8_rows(module.weight.data)), name
    assert any(line.startswith("11 layers quantized to FP8") for line in told)


def test_four_bits_at_load_take_the_largest_group_that_divides_the_inputs(tmp_path: Path) -> None:
    reference = made.tiny_model()
    reference.save_pretrained(tmp_path)
    ours = load_model(tmp_path, EngineConfig(device="cpu", quantization="int4"), silent).model
    for name, group in (("q_proj", 64), ("o_proj", 32)):  # 64 and 96 inputs
        weight = reference.get_submodule(f"model.layers.0.self_attn.{name}").weight.data
        want = quantize_int4(weight, group).dense(torch.float32)
        assert torch.equal(ours.get_submodule(f"model.layers.0.self_attn.{name}").weight, want)


@pytest.mark.parametrize(
    ("kept", "tied", "reason"),
    [
        (
            "lm_head, *.mlpp.*",
            False,
            r"unquantized_layers: '\*.mlpp.\*' is no layer of this model; it has model.layers.0",
        ),
        ("*", False, "leaves nothing to quantize"),
        ("", True, "lm_head shares its weights with the embedding"),
    ],
)
def test_what_cannot_be_quantized_is_refused_by_layer(kept: str, tied: bool, reason: str, tmp_path: Path) -> None:
    model = made.tiny_model()
    model.config.tie_word_embeddings = tied
    model.tie_weights()
    model.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=reason):
        load_model(tmp_path, EngineConfig(device="cpu", quantization="fp8", unquantized_layers=kept), silent)


def test_weights_that_are_not_finite_are_refused_by_layer(tmp_path: Path) -> None:
    model = made.tiny_model()
    model.get_submodule(DOWN).weight.data[3, 5] = float("nan")
    model.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=f"{DOWN} has weights that are not finite"):
        load_model(tmp_path, EngineConfig(device="cpu", quantization="fp8"), silent)


def test_what_is_quantized_already_is_not_quantized_again(tmp_path: Path) -> None:
    made.write(tmp_path, made.tiny_model(), *made.FORMATS["AWQ"])
    with pytest.raises(
        ConfigError, match=r"engine\.quantization: given fp8, allowed: none; .* quantized already, by awq"
    ):
        load_model(tmp_path, EngineConfig(device="cpu", quantization="fp8"), silent)


@pytest.mark.parametrize("block", [None, (16, 24), (40, 56)])
def test_fp8_is_within_half_a_step_of_three_bits(block: tuple[int, int] | None) -> None:
    weight = torch.randn(40, 56, generator=torch.Generator().manual_seed(1))
    weight[7] = 0
    quantized = quantize_fp8(weight, block)
    dense = quantized.dense(torch.float32)
    smallest = quantized.scales.max() * 2.0**-9  # below the normal range steps are of equal size
    assert ((dense - weight).abs() <= weight.abs() / 16 + smallest).all()
    assert not dense[7].any()


@pytest.mark.parametrize("symmetric", [True, False])
def test_four_bits_are_within_half_a_step(symmetric: bool) -> None:
    weight = torch.randn(24, 64, generator=torch.Generator().manual_seed(2))
    quantized = quantize_int4(weight, 32, symmetric)
    step = quantized.scales.repeat_interleave(32, dim=1)
    assert ((quantized.dense(torch.float32) - weight).abs() <= 0.5001 * step).all()
