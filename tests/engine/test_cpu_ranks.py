"""Two and more ranks on the CPU give what one gives: every kind of step, every sampling feature."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Olmo2Config, PreTrainedConfig, Qwen2Config, Qwen3Config
from tritandem.config import EngineConfig
from tritandem.contracts.errors import ConfigError
from tritandem.engine.model.loader import load_model, load_weights
from tritandem.engine.parallel.registry import make_ranks
from tritandem.engine.runners.cpu import CpuRunner
from tritandem.engine.runners.cpu_ranks import CpuRanks
from tritandem.engine.runners.ranks import build_ranks
from tritandem.engine.step import Runner

from tests.engine.engine_rig import CONFIGS, Answer, Rig, make_runner, prompts, reference_model, request, tokens_of
from tests.engine.structured_rig import mixture, structure_of, table_walker
from tests.engine.tiny_gguf import write_gguf

SHAPE: dict[str, Any] = {
    "vocab_size": 132,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
MODELS: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**SHAPE, tie_word_embeddings=False),
    "tied": lambda: LlamaConfig(**SHAPE, tie_word_embeddings=True),
    "biased": lambda: LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True),
    "few_kv_heads": lambda: Qwen3Config(**{**SHAPE, "num_key_value_heads": 1}),
    "uneven_vocabulary": lambda: Qwen2Config(**{**SHAPE, "vocab_size": 131, "hidden_size": 128}),
    "gemma2": CONFIGS["gemma2"],
}


@functools.cache
def folder(kind: str) -> Path:
    """Of a tiny model; for all tests of this process."""
    with torch.random.fork_rng():
        torch.manual_seed(11)
        model = AutoModelForCausalLM.from_config(MODELS[kind](), dtype=torch.float32)
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(parameter)
    path = Path(tempfile.mkdtemp(prefix=kind))
    atexit.register(shutil.rmtree, path)
    model.save_pretrained(path)
    return path


def make_ranks_runner(kind: str, count: int, **config: Any) -> CpuRanks:
    engine = EngineConfig(**{"num_blocks": 128, "max_sequences": 8, "block_tokens": 4, **config})
    made = build_ranks(folder(kind), engine, [torch.device("cpu")] * count, lambda _: None)
    assert isinstance(made, CpuRanks)
    return made


@functools.cache
def runner(kind: str, count: int, **config: Any) -> Runner:
    settings = {"num_blocks": 128, "max_sequences": 8, "block_tokens": 4, "rank_patience_s": 120.0, **config}
    if count > 1:
        return make_ranks_runner(kind, count, **settings)
    engine = EngineConfig(device="cpu", **settings)
    return CpuRunner(load_model(folder(kind), engine, lambda _: None), engine)


def run(kind: str, count: int, requests: Sequence[Any], prefix_cache: bool = True, **config: Any) -> dict[int, Answer]:
    rig = Rig(runner(kind, count, **config), prefix_cache)
    answers = rig.run(requests)
    assert not any(answer.error for answer in answers.values())
    return answers


@pytest.mark.parametrize(("kind", "count"), [(kind, 2) for kind in MODELS] + [("llama", 4), ("few_kv_heads", 4)])
def test_greedy_tokens_of_ranks_are_those_of_one(kind: str, count: int) -> None:
    batch = [request(i, ids) for i, ids in enumerate(prompts(6, seed=3))]
    one = run(kind, 1, batch, prefill_tokens_per_step=24)
    assert tokens_of(run(kind, count, batch, prefill_tokens_per_step=24)) == tokens_of(one)


# Every sampling feature at least once, and several together.
FEATURES: dict[str, dict[str, Any]] = {
    "drawn": {"temperature": 0.9, "seed": 5},
    "filtered": {"temperature": 1.1, "seed": 6, "top_k": 12, "top_p": 0.8, "min_p": 0.02},
    "penalised": {"repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.3, "temperature": 0.7},
    "min_tokens": {"min_tokens": 6, "stop_ids": (3, 17, 40, 77)},
    "logprobs": {"logprobs": 4, "temperature": 0.8, "seed": 2},
    "prompt_logprobs": {"prompt_logprobs": 3},
    "bad_words": {"bad_words": tuple((token,) for token in range(0, 132, 9)), "temperature": 1.0},
    "logit_bias": {"logit_bias": tuple((token, 4.0) for token in range(40, 60))},
    "allowed_token_ids": {"allowed_token_ids": tuple(range(0, 132, 5)), "temperature": 1.0},
}


@pytest.mark.parametrize("feature", FEATURES)
def test_every_sampling_feature_chooses_as_on_one(feature: str) -> None:
    options = FEATURES[feature]
    batch = [request(i, ids, **(options if i % 3 else {})) for i, ids in enumerate(prompts(7, seed=8))]
    one, two = run("llama", 1, batch), run("llama", 2, batch)
    assert tokens_of(two) == tokens_of(one)
    for i, answer in one.items():
        assert two[i].finish == answer.finish
        assert two[i].logprobs == pytest.approx(answer.logprobs, abs=1e-3, nan_ok=True)
        assert two[i].top_ids == answer.top_ids
        if answer.scores is not None:
            other = two[i].scores
            assert other is not None
            assert other.logprobs == pytest.approx(answer.scores.logprobs, abs=1e-3)
            assert other.top_logprobs == pytest.approx(answer.scores.top_logprobs, abs=1e-3)


@pytest.mark.parametrize("structure", [structure_of, table_walker])
def test_masks_and_tables_of_structures_hold_on_every_rank(structure: Any) -> None:
    answers = []
    for count in (1, 2):
        rig = Rig(runner("llama", count))
        for one in mixture(9):
            rig.core.add(one, 1, structure(one))
        answers.append(tokens_of(rig.run(())))
    assert answers[0] == answers[1]


def test_preemption_and_prefix_hits_on_ranks_change_no_token() -> None:
    shared = prompts(1, seed=5, low=30, high=31)[0].tolist()
    batch = [request(i, [*shared, *ids], max_tokens=24) for i, ids in enumerate(prompts(6, seed=6, low=1, high=9))]
    one = tokens_of(run("llama", 1, batch, prefix_cache=False))
    rig = Rig(runner("llama", 2, num_blocks=26))
    rig.run(batch[:1])
    answers = rig.run(batch[1:])
    assert tokens_of(answers) == one
    assert rig.core.load().preemptions > 0
    assert any(answer.cached_tokens for answer in answers.values())


def weights_of(kind: str, count: int, **config: Any) -> list[dict[str, torch.Tensor]]:
    settings = EngineConfig(device="cpu", **config)
    ranks = make_ranks([torch.device("cpu")] * count)
    parts = [load_weights(folder(kind), settings, rank.device, lambda _: None, rank)[0] for rank in ranks]
    return [part.state_dict() for part in parts]


@pytest.mark.parametrize("kind", ["llama", "tied", "biased"])
def test_random_weights_are_the_same_model_however_many_ranks_hold_it(kind: str) -> None:
    [whole] = weights_of(kind, 1, random_weights=True, random_weights_seed=4)
    parts = weights_of(kind, 2, random_weights=True, random_weights_seed=4)
    assert float(whole["model.layers.0.mlp.up_proj.weight"].std()) > 0.1
    for name, weight in whole.items():
        held = [part[name] for part in parts if name in part]
        dim = next((d for d in range(weight.dim()) if held[0].shape[d] != weight.shape[d]), None)
        assert torch.equal(held[0] if dim is None else torch.cat(held, dim), weight), name


def test_ranks_hold_no_more_than_their_part() -> None:
    whole, parts = weights_of("llama", 1)[0], weights_of("llama", 4)
    name = "model.layers.1.mlp.down_proj.weight"
    assert [tuple(part[name].shape) for part in parts] == [(64, 24)] * 4
    cut = sum(weight.numel() for name, weight in whole.items() if "proj" in name or "lm_head" in name)
    kept = sum(weight.numel() for name, weight in whole.items()) - cut
    assert all(sum(weight.numel() for weight in part.values()) == kept + cut // 4 for part in parts)


@pytest.mark.parametrize(
    ("changes", "count", "said"),
    [
        ({}, 3, "num_attention_heads is 8, allowed: a multiple of 3"),
        ({"intermediate_size": 90}, 4, "intermediate_size is 90, allowed: a multiple of 4"),
        ({"num_attention_heads": 16, "num_key_value_heads": 6}, 4, "num_key_value_heads is 6, allowed: a multiple or"),
    ],
)
def test_what_does_not_divide_is_refused_by_name(
    changes: dict[str, int], count: int, said: str, tmp_path: Path
) -> None:
    LlamaConfig(**{**SHAPE, **changes}).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=said):
        build_ranks(tmp_path, EngineConfig(random_weights=True), [torch.device("cpu")] * count, lambda _: None)


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_a_gguf_file_is_cut_as_a_folder_is(kind: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", reference_model(kind))
    config = EngineConfig(num_blocks=128, max_sequences=8, block_tokens=4, rank_patience_s=120.0)
    made = build_ranks(tmp_path / "model.gguf", config, [torch.device("cpu")] * 2, lambda _: None)
    batch = [request(i, ids) for i, ids in enumerate(prompts(4, seed=3))]
    assert tokens_of(Rig(made).run(batch)) == tokens_of(Rig(make_runner(kind)).run(batch))


def test_norms_over_all_heads_at_once_are_refused(tmp_path: Path) -> None:
    shape = {name: value for name, value in SHAPE.items() if name != "head_dim"}
    Olmo2Config(**shape, tie_word_embeddings=False).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"layers\.0\.self_attn\.q_norm cannot be cut over ranks"):
        build_ranks(tmp_path, EngineConfig(random_weights=True), [torch.device("cpu")] * 2, lambda _: None)


@pytest.mark.parametrize("kind", ["phi3", "gpt_neox", "gpt_oss", "gpt2", "qwen3_next"])
def test_a_model_whose_layers_are_not_cut_is_refused_and_none_of_it_served(kind: str, tmp_path: Path) -> None:
    CONFIGS[kind]().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"cut over ranks|not cut|over 2 ranks"):
        build_ranks(tmp_path, EngineConfig(random_weights=True), [torch.device("cpu")] * 2, lambda _: None)


def test_quantized_weights_over_several_ranks_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"engine\.quantization over several ranks: given int4, allowed: none"):
        build_ranks(folder("llama"), EngineConfig(quantization="int4"), [torch.device("cpu")] * 2, lambda _: None)


def test_weights_that_are_missing_are_named_as_on_one(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(folder("llama") / "model.safetensors")
    del weights["model.layers.1.self_attn.k_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    LlamaConfig(**SHAPE, tie_word_embeddings=False).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"missing .1.: model\.layers\.1\.self_attn\.k_proj"):
        build_ranks(tmp_path, EngineConfig(), [torch.device("cpu")] * 2, lambda _: None)
