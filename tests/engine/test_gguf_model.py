"""What a GGUF file says is what is served: every weight, every position, every number of its header, or a refusal."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, LlamaConfig, Phi3Config, PreTrainedModel
from tritandem.config import EngineConfig
from tritandem.contracts.errors import ConfigError
from tritandem.engine.model.loader import check_model, load_model
from tritandem.engine.runners.cpu import CpuRunner

from tests.engine import quantized_folders
from tests.engine.engine_rig import _DECODER, _PLAIN, CONFIGS, Rig, reference_model, request
from tests.engine.tiny_gguf import write_gguf

CPU = EngineConfig(device="cpu", num_blocks=32, block_tokens=8)
PROMPT = np.random.default_rng(3).integers(0, 131, 60)  # longer than the windows
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
SHAPES: dict[str, Callable[[], transformers.PreTrainedConfig]] = {
    **{kind: CONFIGS[kind] for kind in ("llama", "qwen2", "qwen3", "phi3", "gemma2", "gpt2")},
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **{**_DECODER, "num_hidden_layers": 3},
        sliding_window=9,
        sliding_window_pattern=3,
        query_pre_attn_scalar=12,
        rope_parameters={"full_attention": _rope("linear", factor=8.0), "sliding_attention": _rope("default")},
    ),
    "starcoder2": lambda: transformers.Starcoder2Config(**_PLAIN, rope_parameters=_rope("default", rope_theta=100.0)),
    "qwen2_moe": lambda: transformers.Qwen2MoeConfig(**_PLAIN, **MOE, shared_expert_intermediate_size=40),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**_DECODER, **MOE, norm_topk_prob=True),
}


def _rope(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": 1e4, **parameters}


FACTORS = [1.0, 1.7, 2.5, 4.0, 9.0, 32.0]
LLAMA3 = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
EXPLICIT = {"short_factor": FACTORS, "long_factor": FACTORS, "factor": 1.0, "attention_factor": 1.0}
POSITIONS: dict[str, Callable[[], transformers.PreTrainedConfig]] = {
    "linear": lambda: LlamaConfig(**_DECODER, rope_parameters=_rope("linear", factor=4.0)),
    "yarn": lambda: LlamaConfig(
        **_DECODER, rope_parameters=_rope("yarn", factor=4.0, original_max_position_embeddings=64)
    ),
    "llama3": lambda: LlamaConfig(**_DECODER, rope_parameters=_rope("llama3", **LLAMA3)),
    "explicit": lambda: LlamaConfig(
        **_DECODER, rope_parameters=_rope("longrope", original_max_position_embeddings=256, **EXPLICIT)
    ),
    "longrope": lambda: Phi3Config(
        **_PLAIN,
        original_max_position_embeddings=128,
        rope_parameters=_rope("longrope", short_factor=FACTORS, long_factor=[2.0] * 6),
    ),
}


def built(config: transformers.PreTrainedConfig) -> PreTrainedModel:
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def served(path: Path) -> list[int]:
    runner = CpuRunner(load_model(path, CPU, lambda message: None), CPU)
    return Rig(runner).run([request(0, PROMPT, max_tokens=16)])[0].tokens


def generated(model: PreTrainedModel) -> list[int]:
    ids = torch.as_tensor(PROMPT)[None]
    output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False)
    return output[0, len(PROMPT) :].tolist()


@pytest.mark.parametrize("kind", SHAPES)
def test_every_architecture_gives_the_tokens_of_the_model_it_was_made_from(tmp_path: Path, kind: str) -> None:
    model = built(SHAPES[kind]())
    write_gguf(tmp_path / "model.gguf", model)
    check_model(tmp_path / "model.gguf")
    assert served(tmp_path / "model.gguf") == generated(model)


def test_packed_types_are_unpacked_and_their_size_is_said(tmp_path: Path) -> None:
    model = quantized_folders.tiny_model()
    name = "blk.1.ffn_gate.weight"
    weight = model.model.layers[1].mlp.gate_proj.weight.data
    packed = gguf.quants.quantize(weight.numpy(), gguf.GGMLQuantizationType.Q8_0)

    def change(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor(name, packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)

    write_gguf(tmp_path / "model.gguf", model, without=[name], change=change)
    told: list[str] = []
    loaded = load_model(tmp_path / "model.gguf", CPU, told.append).model
    unpacked = loaded.model.layers[1].mlp.gate_proj.weight
    assert 0 < float((unpacked - weight).abs().max()) < 0.01
    assert "1 tensors in Q8_0 unpacked to torch.float32: 0.00 GB, in the file 0.00" in told


@pytest.mark.parametrize("kind", POSITIONS)
def test_positions_turn_as_the_file_says(tmp_path: Path, kind: str) -> None:
    model = built(POSITIONS[kind]())
    write_gguf(tmp_path / "model.gguf", model)
    loaded = load_model(tmp_path / "model.gguf", CPU, lambda message: None).model
    [ours], [theirs] = (
        [buffer for name, buffer in each.named_buffers() if name.endswith("rotary_emb.inv_freq")]
        for each in (loaded, model)
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
    plain = 1e4 ** (-torch.arange(6) / 6)
    assert not torch.allclose(ours, plain, rtol=1e-3), "this case cannot tell"
    assert loaded.model.rotary_emb.attention_scaling == pytest.approx(model.model.rotary_emb.attention_scaling)
    assert served(tmp_path / "model.gguf") == generated(model)


def _key(name: str, value: float | int | str) -> Callable[[gguf.GGUFWriter], None]:
    def change(writer: gguf.GGUFWriter) -> None:
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
        add(name, value)

    return change


def _tensor(name: str) -> Callable[[gguf.GGUFWriter], None]:
    return lambda writer: writer.add_tensor(name, np.ones((4, 80), np.float32))


REFUSED: dict[str, tuple[Callable[[gguf.GGUFWriter], None], str]] = {
    "a mixture of experts": (_key("llama.expert_count", 8), r"llama\.expert_count 8"),
    "experts": (_tensor("blk.0.ffn_up_exps.weight"), r"not used .*\(1\): blk\.0\.ffn_up_exps\.weight"),
    "a bias": (_tensor("blk.1.attn_q.bias"), r"not used .*\(1\): blk\.1\.attn_q\.bias"),
    "a further layer": (_tensor("blk.2.ffn_up.weight"), r"not used .*\(1\): blk\.2\.ffn_up\.weight"),
    "a part": (_key("split.count", 3), "one of 3 parts of a split model"),
    "an adapter": (_key("general.type", "adapter"), "general.type: given 'adapter'"),
    "a scale": (_key("llama.logit_scale", 0.5), r"llama\.logit_scale 0\.5"),
    "a window": (_key("llama.attention.sliding_window", 9), r"llama\.attention\.sliding_window 9"),
    "an unknown key": (_key("llama.attention.novelty", 1), r"llama\.attention\.novelty 1"),
    "values unlike keys": (_key("llama.attention.value_length_mla", 5), r"llama\.attention\.value_length_mla 5"),
    "unknown scaling": (_key("llama.rope.scaling.type", "su"), "rope.scaling.type: given 'su'"),
    "unclear scaling": (
        lambda writer: (
            _key("llama.rope.scaling.type", "yarn")(writer),
            _key("llama.rope.scaling.factor", 4.0)(writer),
            _key("llama.rope.scaling.yarn_attn_factor", 1.5)(writer),
        )[0],
        "rope.scaling.yarn_attn_factor: given 1.5",
    ),
    "local frequencies": (_key("llama.rope.freq_base_swa", 100.0), r"llama\.rope\.freq_base_swa 100"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "reason"), REFUSED.values(), ids=REFUSED.keys())
def test_what_would_be_dropped_is_refused_by_name(
    tmp_path: Path, change: Callable[[gguf.GGUFWriter], None], reason: str
) -> None:
    write_gguf(tmp_path / "model.gguf", reference_model("llama"), change=change)
    for refuse in (lambda path: load_model(path, CPU, lambda message: None), check_model):
        with pytest.raises(ConfigError, match=reason):
            refuse(tmp_path / "model.gguf")


@pytest.mark.parametrize("absent", ["blk.1.ffn_up.weight", "token_embd.weight", "output_norm.weight"])
def test_missing_weights_are_refused_instead_of_invented(tmp_path: Path, absent: str) -> None:
    theirs = {"blk.1.ffn_up.weight": r"model\.layers\.1\.mlp\.up_proj\.weight", "output_norm.weight": r"model\.norm"}
    write_gguf(tmp_path / "model.gguf", reference_model("llama"), without=[absent])
    for refuse in (lambda path: load_model(path, CPU, lambda message: None), check_model):
        with pytest.raises(ConfigError, match=rf"weights are missing \(1\): {theirs.get(absent, absent)}"):
            refuse(tmp_path / "model.gguf")


def test_a_tensor_of_another_shape_is_named(tmp_path: Path) -> None:
    write_gguf(
        tmp_path / "model.gguf", reference_model("llama"), ["blk.1.ffn_up.weight"], _tensor("blk.1.ffn_up.weight")
    )
    with pytest.raises(ConfigError, match=r"another shape .*mlp\.up_proj\.weight \(4, 80\) instead of \(80, 48\)"):
        load_model(tmp_path / "model.gguf", CPU, lambda message: None)


def test_an_architecture_without_a_served_form_is_named(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", reference_model("llama"))
    content = (tmp_path / "model.gguf").read_bytes()
    (tmp_path / "model.gguf").write_bytes(content.replace(b"llama", b"mamba"))
    with pytest.raises(ConfigError, match=r"general.architecture: given 'mamba', allowed: .*llama"):
        load_model(tmp_path / "model.gguf", CPU, lambda message: None)


def test_a_size_that_is_not_said_is_asked_for(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", reference_model("llama"))
    content = (tmp_path / "model.gguf").read_bytes()
    (tmp_path / "model.gguf").write_bytes(content.replace(b"context_length", b"context_width."))
    with pytest.raises(ConfigError, match=r"llama.context_length: the header does not say it"):
        load_model(tmp_path / "model.gguf", CPU, lambda message: None)
