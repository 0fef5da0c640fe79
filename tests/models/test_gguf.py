"""A GGUF file becomes the same model as a Hugging Face folder: every value, every token, every end."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter, quants
from tritandem.host import Refusal
from tritandem.models.fetch import fetch_gguf
from tritandem.models.gguf import convert, end_token_ids

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS = 64, 96, 4, 2
END, TURN_END = 1, 2
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


def byte_characters() -> list[str]:
    """The 256 characters that byte-level vocabularies write bytes as."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    shifted = iter(range(256, 512))
    return [chr(byte) if byte in plain else chr(next(shifted)) for byte in range(256)]


def write_gguf(path: Path, without: str = "") -> dict[str, np.ndarray]:
    """A one-layer Llama with 4-bit matrices, less one; returns the exact float32 values they unpack to."""
    rng = np.random.default_rng(0)
    tokens = ["<unk>", "<|end|>", "<|turn_end|>", *byte_characters(), "12", "ab"]
    writer = GGUFWriter(str(path), "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(1)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * (len(tokens) - 3))
    writer.add_token_merges(["1 2", "a b"])
    writer.add_bos_token_id(END)
    writer.add_eos_token_id(END)
    writer.add_eot_token_id(TURN_END)
    writer.add_chat_template(TEMPLATE)
    kv_width = HIDDEN // HEADS * KV_HEADS
    shapes = {
        "token_embd.weight": (len(tokens), HIDDEN),
        "blk.0.attn_q.weight": (HIDDEN, HIDDEN),
        "blk.0.attn_k.weight": (kv_width, HIDDEN),
        "blk.0.attn_v.weight": (kv_width, HIDDEN),
        "blk.0.attn_output.weight": (HIDDEN, HIDDEN),
        "blk.0.ffn_gate.weight": (INTERMEDIATE, HIDDEN),
        "blk.0.ffn_up.weight": (INTERMEDIATE, HIDDEN),
        "blk.0.ffn_down.weight": (HIDDEN, INTERMEDIATE),
    }
    exact = {}
    shapes.pop(without, None)
    for name, shape in shapes.items():
        packed = quants.quantize(rng.standard_normal(shape).astype(np.float32), GGMLQuantizationType.Q4_1)
        writer.add_tensor(name, packed, raw_dtype=GGMLQuantizationType.Q4_1)
        exact[name] = quants.dequantize(packed, GGMLQuantizationType.Q4_1)
    for name in ("blk.0.attn_norm.weight", "blk.0.ffn_norm.weight", "output_norm.weight"):
        writer.add_tensor(name, np.ones(HIDDEN, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return exact


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    folder = tmp_path_factory.mktemp("gguf")
    exact = write_gguf(folder / "tiny.gguf")
    out = folder / "out"
    out.mkdir()
    convert(folder / "tiny.gguf", out)
    return out, exact


def test_every_unpacked_value_is_kept(converted) -> None:
    from safetensors.numpy import load_file

    out, exact = converted
    weights = load_file(out / "model.safetensors")
    assert all(tensor.dtype == np.float32 for tensor in weights.values())
    assert "lm_head.weight" not in weights
    pairs = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.layers.0.self_attn.v_proj.weight": "blk.0.attn_v.weight",
        "model.layers.0.mlp.down_proj.weight": "blk.0.ffn_down.weight",
    }
    for ours, theirs in pairs.items():
        np.testing.assert_array_equal(weights[ours], exact[theirs])


def test_the_folder_loads_as_a_model(converted) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(converted[0])
    assert str(model.dtype) == "torch.float32"
    assert model.generation_config.eos_token_id == [END, TURN_END]


def test_every_end_token_is_kept(converted) -> None:
    for name in ("config.json", "generation_config.json"):
        assert json.loads((converted[0] / name).read_text())["eos_token_id"] == [END, TURN_END]


def test_the_tokenizer_splits_digits_as_the_file_says(converted) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(converted[0])
    assert tokenizer.tokenize("12ab") == ["1", "2", "ab"]
    assert tokenizer.decode(tokenizer.encode("grüße 12 😀")) == "grüße 12 😀"
    assert tokenizer.encode("<|turn_end|>") == [TURN_END]
    assert tokenizer.model_max_length == 128


def test_the_chat_template_is_kept(converted) -> None:
    assert (converted[0] / "chat_template.jinja").read_text() == TEMPLATE


def test_one_end_token_stays_a_number() -> None:
    assert end_token_ids((2,)) == 2


def test_a_file_without_an_end_token_is_refused() -> None:
    with pytest.raises(ValueError, match="names no end token"):
        end_token_ids(())


def test_a_file_without_all_its_weights_is_refused_and_leaves_nothing_in_the_cache(tmp_path: Path) -> None:
    write_gguf(tmp_path / "holed.gguf", without="blk.0.ffn_up.weight")
    reason = (
        r"holed\.gguf could not be converted \(.*weights are missing \(1\): model\.layers\.0\.mlp\.up_proj\.weight\)"
    )
    with pytest.raises(Refusal, match=reason):
        fetch_gguf(tmp_path / "holed.gguf", lambda text: None, tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("holed*"))
