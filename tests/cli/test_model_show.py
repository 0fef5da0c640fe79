"""`model show` says what the files say and whether they can be served, and reads no weight for it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from gguf import GGUFWriter
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3NextConfig
from tritandem.cli.main import main
from tritandem.cli.model_fit import fit, weight_bytes
from tritandem.cli.model_show import summary
from tritandem.engine.model.states.cache import state_bytes

from tests.engine import quantized_folders

SMALL = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
}


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = main(["model", "show", *arguments])
    return code, capsys.readouterr().out


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    AutoModelForCausalLM.from_config(LlamaConfig(**SMALL)).save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 7], "temperature": 0.6}')
    return tmp_path


def test_a_folder(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = shown(capsys, str(folder))
    said = {line[:21].strip(): line[22:] for line in out.splitlines()}
    assert code == 0
    assert said["architecture"].startswith("llama, layers 2, hidden size 32, attention heads 4, key value heads 2")
    assert said["context"] == "128 tokens"
    assert said["end ids"] == "2, 7"
    assert said["rope"] == "rope_type linear, rope_theta 10000.0, factor 4.0"
    assert said["KV cache"].endswith("in fp8_e4m3 (engine.kv_dtype)")
    assert said["head"] == "the embedding once more"
    assert said["its own sampling"] == "temperature 0.6"
    assert said["chat template"] == "none: chats are refused"
    assert said["can be served"].startswith("yes")
    assert said["on a GPU"].startswith("fused kernels in CUDA Graphs; seen of a tiny random model")
    assert "tools" not in said


def test_what_fits_and_what_the_chat_template_serves(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "chat_template.jinja").write_text("{% if tools %}{{ tools }}<tool_call>{% endif %}{{ messages }}</think>")
    code, out = shown(capsys, str(folder), "--gpu-gb", "0.1")
    said = {line[:21].strip(): line[22:] for line in out.splitlines()}
    assert (code, said["tools"]) == (0, "called as hermes")
    assert said["thoughts"] == "think"
    # Two layers with keys and values of 2 heads of 8, in bfloat16; as much of a tenth of a GB as the cache gets.
    assert "KV cache 128 bytes a token; a GPU of 0.1 GB holds at most " in said["memory"]
    _, out = shown(capsys, str(folder), "--gpu-gb", "0.1", "--json")
    facts = json.loads(out)
    weights = 2 * facts["parameters"]
    assert facts["kv_bytes_per_token"] == 2 * 2 * 2 * 8 * 2
    assert facts["fits"]["kv_tokens"] == int((1e8 - weights) * 0.9 / 128)
    assert facts["fits"]["sequences"] == {"128": facts["fits"]["kv_tokens"] // 128}, "its context is shorter than 2,048"


def test_what_does_not_fit_is_said_so(folder: Path) -> None:
    facts = summary(folder)
    assert fit(facts, 1000) == {"gpu_bytes": 1000, "weight_bytes": 2 * facts["parameters"], "kv_tokens": 0,
                                "sequences": {128: 0}}  # fmt: skip
    assert fit({**facts, "layers": None}, 10**9) is None
    assert fit({**facts, "quantization": "gptq", "weight_bytes": 7}, 10**9)["weight_bytes"] == 7


def test_of_a_hybrid_states_are_told_and_take_their_part_of_the_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = Qwen3NextConfig(
        **SMALL | {"num_hidden_layers": 4}, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8,
        linear_value_head_dim=12, mlp_only_layers=[0, 1, 2, 3], head_dim=8,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    each = state_bytes(model)
    out = shown(capsys, str(tmp_path))[1]
    assert f"of 3 layers, {each:,} bytes a sequence; no prefix cache" in out
    assert "KV cache 64 bytes a token;" in out, "of one layer of four"
    facts = json.loads(shown(capsys, str(tmp_path), "--gpu-gb", "0.1", "--json")[1])
    left = (1e8 - facts["fits"]["weight_bytes"]) * 0.9
    assert facts["fits"]["sequences"] == {"128": int(left / (128 * 64 + each))}
    stated = json.loads((tmp_path / "config.json").read_text())
    assert stated["layer_types"].count("linear_attention") == 3
    del stated["layer_types"]
    (tmp_path / "config.json").write_text(json.dumps(stated | {"full_attention_interval": 4}))
    assert json.loads(shown(capsys, str(tmp_path), "--json")[1])["state_bytes"] == each


def test_memory_is_counted_as_the_flags_ask(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SMALL))
    linear = [m.weight for name, m in model.named_modules() if isinstance(m, torch.nn.Linear) and name != "lm_head"]
    rows, values = sum(len(weight) for weight in linear), sum(weight.numel() for weight in linear)
    other = 2 * (sum(weight.numel() for weight in model.parameters()) - values)
    for flags, of_weights, kv in (
        ((), other + 2 * values, 128),
        (("--quantization", "fp8"), other + values + 4 * rows, 128),
        (("--quantization", "int4", "--kv-dtype", "fp8_e4m3"), other + values // 2 + values // 128 * 4, 64),
    ):
        facts = json.loads(shown(capsys, str(folder), "--json", *flags)[1])
        assert (facts["fits"]["weight_bytes"], facts["kv_bytes_per_token"]) == (of_weights, kv), flags
        assert facts["fits"]["kv_tokens"] == int((80e9 - of_weights) * 0.9 / kv)


def test_experts_are_counted_as_they_are_unpacked(tmp_path: Path) -> None:
    config = {"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = {
        "model.layers.0.mlp.experts.down_proj_blocks": torch.zeros(4, 64, 2, 16, dtype=torch.uint8),
        "model.layers.0.mlp.experts.down_proj_scales": torch.zeros(4, 64, 2, dtype=torch.uint8),
        "model.norm.weight": torch.zeros(64, dtype=torch.bfloat16),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    facts = summary(tmp_path)
    assert facts["parameters"] == 4 * 64 * 64 + 64
    assert weight_bytes(facts) == 2 * facts["parameters"]
    layers = {f"model.layers.0.mlp.experts.{i}.up_proj.{part}": tensor for i in range(2) for part, tensor in (
        ("weight", torch.zeros(32, 64).to(torch.float8_e4m3fn)), ("weight_scale", torch.ones(32, 1)))}  # fmt: skip
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "qwen3_moe", "quantization_config": quantized_folders.FORMATS[
            "compressed-tensors FP8 dynamic"][0]}))  # fmt: skip
    save_file({**layers, "model.norm.weight": tensors["model.norm.weight"]}, tmp_path / "model.safetensors")
    assert weight_bytes(summary(tmp_path)) == 2 * (2 * 32 * 64 + 64)


def test_what_is_quantized_already_cannot_be_quantized_as_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quantized_folders.write(tmp_path, quantized_folders.tiny_model(), *quantized_folders.FORMATS["AWQ"])
    code, out = shown(capsys, str(tmp_path), "--quantization", "fp8")
    assert code == 1
    assert "no: engine.quantization: given fp8, allowed: none" in out.splitlines()[-1]


def test_what_is_quantized_and_how_large_it_is_unpacked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = quantized_folders.tiny_model()
    values = sum(weight.numel() for weight in model.parameters())
    quantized_folders.write(tmp_path, model, *quantized_folders.FORMATS["AWQ"])
    code, out = shown(capsys, str(tmp_path))
    assert code == 0
    assert f"\nweights               {values:,} values in " in out
    unpacked = 2 * (values - 2 * 97 * 64 - 5 * 64) / 1e6
    said = f"awq: 14 layers in INT4, groups of 32; {unpacked:.1f} MB of them in bfloat16"
    assert f"\nquantization          {said}, where they are unpacked\n" in out


def test_a_quantization_that_is_not_served_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stated = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    quantized_folders.write(tmp_path, quantized_folders.tiny_model(), stated, quantized_folders.fp8_channel)
    code, out = shown(capsys, str(tmp_path))
    assert code == 1
    assert "\nquantization          bitsandbytes\n" in out
    assert "quantized by 'bitsandbytes', which is not served; served: compressed-tensors" in out


def test_as_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = shown(capsys, str(folder), "--json")
    facts = json.loads(out)
    assert code == 0
    assert (facts["served"], facts["reason"], facts["end_ids"], facts["vocabulary_rows"]) == (True, None, [2, 7], 97)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SMALL))
    assert facts["parameters"] == sum(weight.numel() for weight in model.parameters())


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_hidden_layers": 3}, "weights are missing (9): model.layers.2."),
        ({"num_hidden_layers": 1}, "weights are not used by the model that the configuration describes (9)"),
        ({"eos_token_id": 97}, "config.json: eos_token_id: given 97"),
        ({"model_type": "mamba"}, "mamba"),
    ],
)
def test_why_it_cannot_be_served(
    folder: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, object], reason: str
) -> None:
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | changes))
    code, out = shown(capsys, str(folder))
    assert code == 1
    assert out.splitlines()[-1].startswith("can be served         no: ")
    assert reason in out.splitlines()[-1]


def test_weights_of_any_size_are_only_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """More of them than a machine holds, in a file that takes no room."""
    config = LlamaConfig(hidden_size=32768, intermediate_size=131072, num_attention_heads=256, num_hidden_layers=48)
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        weights = AutoModelForCausalLM.from_config(config).state_dict()
    entries, end = {}, 0
    for name, weight in weights.items():
        entries[name] = {"dtype": "F32", "shape": list(weight.shape), "data_offsets": [end, end + 4 * weight.numel()]}
        end += 4 * weight.numel()
    header = json.dumps(entries).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + end)
    code, out = shown(capsys, str(tmp_path))
    assert code == 0
    assert end > 1 << 41
    assert f"{end // 4:,} values in {end / 1e6:,.1f} MB" in out


def test_a_gguf_file_without_its_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    writer = GGUFWriter(tmp_path / "part.gguf", "llama")
    writer.add_context_length(4096)
    writer.add_block_count(1)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(48)
    writer.add_head_count(4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{{ messages }}")
    writer.add_tensor("token_embd.weight", torch.zeros(97, 32).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    code, out = shown(capsys, str(tmp_path / "part.gguf"))
    assert code == 1
    assert "context               4096 tokens" in out
    assert "chat template         14 characters" in out
    assert "weights are missing (10): model.layers.0." in out.splitlines()[-1]


@pytest.mark.parametrize(
    ("spec", "complaint"),
    [("absent", "model 'absent' is neither a folder nor a .gguf file"), ("smollm2", "smollm2 is not in the cache")],
)
def test_a_model_that_is_not_there_is_named(
    spec: str, complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert main(["model", "show", spec]) == 2
    assert complaint in capsys.readouterr().err
