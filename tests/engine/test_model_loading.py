"""Models load from a folder, a GGUF file or a configuration alone; what cannot be served is refused with the reason."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tritandem.config import EngineConfig
from tritandem.contracts.errors import ConfigError
from tritandem.engine.model.loader import check_model, fix_rotary_context, load_model, resolve_device, resolve_dtype
from tritandem.engine.model.support import UnsupportedModel
from tritandem.engine.runners.cpu import CpuRunner
from tritandem.engine.service import build_engine

from tests.engine.engine_rig import CONFIGS, VOCAB, generate, reference_model, request

CPU = EngineConfig(device="cpu", num_blocks=32, block_tokens=8)
SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


def silent(_message: str) -> None:
    pass


@pytest.fixture(scope="module")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    reference_model("llama").save_pretrained(folder)
    return folder


def test_a_folder_gives_the_tokens_of_transformers(llama_folder: Path) -> None:
    progress: list[str] = []
    service = build_engine(llama_folder, CPU, progress.append)
    try:
        assert service.submit([request(0, range(9))]) == [None]
        tokens: list[int] = []
        while service.live():
            batch = service.next_batch(20.0)
            assert batch is not None
            tokens += batch.tokens.tolist()
    finally:
        service.close()
    assert tokens == generate("llama", range(9), 12)
    assert any("loading weights" in message for message in progress)


@pytest.mark.parametrize(("kind", "told"), [("auto", []), ("fp8_e4m3", ["keys and values are kept as fp8_e4m3"])])
def test_a_cpu_says_what_an_eight_bit_cache_does_there(llama_folder: Path, kind: str, told: list[str]) -> None:
    progress: list[str] = []
    build_engine(llama_folder, dataclasses.replace(CPU, kv_dtype=kind), progress.append).close()
    assert [message.partition(":")[0] for message in progress if "keys and values" in message] == told


def test_random_weights_come_from_the_configuration_and_the_seed(tmp_path: Path) -> None:
    CONFIGS["llama"]().save_pretrained(tmp_path)
    first, again, other = (
        load_model(tmp_path, EngineConfig(device="cpu", random_weights=True, random_weights_seed=seed), silent).model
        for seed in (1, 1, 2)
    )
    assert torch.equal(first.lm_head.weight, again.lm_head.weight)
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)
    assert first.dtype == torch.float32


UNSUPPORTED: dict[str, tuple[Callable[[], transformers.PreTrainedConfig], str]] = {
    "alibi": (lambda: transformers.BloomConfig(vocab_size=97, hidden_size=32, n_layer=2, n_head=4), "0 of 2 layers"),
    "no attention interface": (
        lambda: transformers.FalconConfig(vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=4),
        "attention interface",
    ),
    "state space": (
        lambda: transformers.MambaConfig(vocab_size=97, hidden_size=32, num_hidden_layers=2, state_size=4),
        "linear_attention",
    ),
    "chunked attention": (
        lambda: transformers.Llama4TextConfig(**SMALL, head_dim=8, intermediate_size_mlp=48, num_local_experts=2),
        "chunked_attention",
    ),
    "encoder-decoder": (lambda: transformers.T5Config(), "encoder-decoder"),
    "dropped keywords": (lambda: transformers.StableLmConfig(**SMALL), "keyword arguments"),
}  # fmt: skip


@pytest.mark.parametrize(("config", "reason"), UNSUPPORTED.values(), ids=UNSUPPORTED.keys())
def test_what_cannot_be_served_is_refused_with_the_reason(
    tmp_path: Path, config: Callable[[], transformers.PreTrainedConfig], reason: str
) -> None:
    config().save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=reason):
        load_model(tmp_path, EngineConfig(device="cpu", random_weights=True), silent)


@pytest.mark.parametrize("rope", ["dynamic", "longrope"])
def test_rotary_embeddings_that_follow_the_batch_are_held_and_the_context_ends_there(rope: str) -> None:
    parameters: dict[str, Any] = {"rope_type": rope, "rope_theta": 1e4}
    if rope == "longrope":
        parameters |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "factor": 4.0}
        parameters["original_max_position_embeddings"] = 32
        config = transformers.Phi3Config(**SMALL, rope_parameters=parameters, original_max_position_embeddings=32)
    else:
        config = transformers.LlamaConfig(**SMALL, rope_parameters={**parameters, "factor": 2.0})
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    rotary = model.model.rotary_emb
    before = rotary.inv_freq.clone()
    assert fix_rotary_context(model) == (32 if rope == "longrope" else 128)
    rotary(torch.zeros(1, 1, 8), torch.tensor([[500]]))
    assert torch.equal(rotary.inv_freq, before)


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("missing.gguf", "No such file"),
        ("/missing/folder", "no such model folder"),
        (".", "no config.json"),
    ],
)
def test_a_missing_model_is_named(tmp_path: Path, path: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        load_model(tmp_path if path == "." else Path(path), CPU, silent)


def test_broken_weights_are_named(tmp_path: Path) -> None:
    CONFIGS["llama"]().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(ConfigError, match=r"model\.safetensors: not a whole safetensors file"):
        load_model(tmp_path, CPU, silent)


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_an_end_token_beyond_the_vocabulary_is_refused_before_loading(
    llama_folder: Path, tmp_path: Path, file: str
) -> None:
    shutil.copytree(llama_folder, tmp_path, dirs_exist_ok=True)
    values = json.loads((tmp_path / file).read_text())
    (tmp_path / file).write_text(json.dumps({**values, "eos_token_id": [1, VOCAB]}))
    with pytest.raises(ConfigError, match=rf"{file}: eos_token_id: given {VOCAB}, allowed: .* 0\.\.{VOCAB - 1}"):
        load_model(tmp_path, CPU, silent)


def test_missing_weights_are_refused_instead_of_invented(tmp_path: Path) -> None:
    weights = dict(reference_model("llama").state_dict())
    del weights["model.layers.1.mlp.up_proj.weight"]
    reference_model("llama").save_pretrained(tmp_path, state_dict=weights)
    _refused(tmp_path, r"weights are missing \(1\): model\.layers\.1\.mlp\.up_proj\.weight")


def _refused(folder: Path, reason: str) -> None:
    """When it is loaded, and when its files are looked at."""
    for refuse in (lambda path: load_model(path, CPU, silent), check_model):
        with pytest.raises(ConfigError, match=reason):
            refuse(folder)


def _with_config(folder: Path, **changes: Any) -> None:
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | changes))


def _with_weight(folder: Path, name: str) -> None:
    weights = load_file(folder / "model.safetensors")
    save_file({**weights, name: torch.zeros(3)}, folder / "model.safetensors", metadata={"format": "pt"})


UNUSED: dict[str, tuple[Callable[[Path], None], str]] = {
    "a layer": (lambda folder: _with_config(folder, num_hidden_layers=1), r"\(9\): model\.layers\.1\."),
    "biases": (
        lambda folder: _with_weight(folder, "model.layers.0.self_attn.q_proj.bias"),
        r"\(1\): model\.layers\.0\.self_attn\.q_proj\.bias",
    ),
    "a value head": (lambda folder: _with_weight(folder, "v_head.weight"), r"\(1\): v_head\.weight"),
}


@pytest.mark.parametrize(("change", "named"), UNUSED.values(), ids=UNUSED.keys())
def test_weights_that_the_configuration_has_no_use_for_are_refused(
    tmp_path: Path, change: Callable[[Path], None], named: str
) -> None:
    reference_model("llama").save_pretrained(tmp_path)
    change(tmp_path)
    _refused(tmp_path, rf"weights are not used by the model .* {named}")


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.rotary_emb.inv_freq", "lm_head.weight"])
def test_what_follows_from_the_configuration_may_stand_in_the_file(tmp_path: Path, name: str) -> None:
    """Frequencies, as older files have them, and a head that is the embedding once more."""
    config = CONFIGS["llama"]()
    config.tie_word_embeddings = True
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    further = {"lm_head.weight": weights["model.embed_tokens.weight"].clone()}.get(name, torch.zeros(6))
    save_file({**weights, name: further}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded = load_model(tmp_path, CPU, silent).model
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)
    check_model(tmp_path)


def test_layers_that_the_architecture_ignores_by_declaration_are_no_reason_to_refuse(tmp_path: Path) -> None:
    """Layer 92 predicts a second token; nobody asks it."""
    config = transformers.Glm4MoeConfig(
        **SMALL,
        head_dim=8,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        n_group=1,
        topk_group=1,
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    _with_weight(tmp_path, "model.layers.92.eh_proj.weight")
    assert load_model(tmp_path, CPU, silent).layers
    check_model(tmp_path)


def test_weights_of_another_shape_are_named(tmp_path: Path) -> None:
    reference_model("llama").save_pretrained(tmp_path)
    _with_config(tmp_path, intermediate_size=64)
    _refused(tmp_path, r"another shape .*down_proj\.weight \(48, 80\) instead of \(48, 64\)")


def test_devices_and_dtypes_are_checked() -> None:
    assert resolve_device("cpu").type == "cpu"
    assert resolve_dtype("auto", torch.device("cpu")) == torch.float32
    assert resolve_dtype("auto", torch.device("cuda")) == torch.bfloat16
    assert resolve_dtype("float16", torch.device("cpu")) == torch.float16
    for name in ("tpu", "meta", "cuda:99"):
        with pytest.raises(ConfigError, match=r"engine\.device"):
            resolve_device(name)
    with pytest.raises(ConfigError, match=r"engine\.dtype"):
        resolve_dtype("int3", torch.device("cpu"))


def test_the_context_is_bounded_by_the_kv_memory(llama_folder: Path) -> None:
    loaded = load_model(llama_folder, CPU, silent)
    spec = CpuRunner(loaded, EngineConfig(device="cpu", cpu_kv_bytes=40_000, max_sequences=3)).spec
    assert spec.num_blocks == 40_000 // (16 * 2 * 2 * 2 * 12 * 4)
    assert spec.max_context_tokens == (spec.num_blocks - 1) * 16 < 256
    assert spec.vocab_size == VOCAB
    assert CpuRunner(loaded, CPU).spec.max_context_tokens == 31 * 8


def test_packed_experts_are_unpacked_while_they_are_loaded(tmp_path: Path) -> None:
    """MXFP4: two values of 4 bits (sign, two of exponent, one of mantissa) a byte, low half first; 32 share a scale."""
    config = transformers.GptOssConfig(**SMALL, head_dim=8, num_local_experts=2, num_experts_per_tok=1)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    generator, want = torch.Generator().manual_seed(0), {}
    magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    for name in [name for name in weights if name.endswith("experts.gate_up_proj")]:
        experts, inner, columns = weights.pop(name).shape
        shape = (experts, columns, inner // 32, 16)
        packed = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
        scales = torch.randint(120, 126, shape[:3], generator=generator, dtype=torch.uint8)
        weights |= {f"{name}_blocks": packed, f"{name}_scales": scales}
        codes = torch.stack((packed % 16, packed // 16), dim=-1).flatten(3).long()
        values = magnitudes[codes % 8] * (1 - 2 * (codes // 8)) * torch.exp2(scales.float() - 127)[..., None]
        want[name] = values.flatten(2).transpose(1, 2)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    stated = json.loads((tmp_path / "config.json").read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}
    (tmp_path / "config.json").write_text(json.dumps(stated))
    check_model(tmp_path)
    told: list[str] = []
    loaded = load_model(tmp_path, CPU, told.append).model.state_dict()
    assert "experts in MXFP4 are unpacked to torch.float32: 0.00 GB, in the files 0.00" in told
    assert len(want) == config.num_hidden_layers
    for name, values in want.items():
        assert torch.equal(loaded[name], values)
