"""Which families of transformers are served: tiny random models of each go through the load that a server does.

`python -m tools.pages.families` writes the tables of docs/supported-models.md and what `tritandem model show` says of
families, with NAMES behind it prints those. Needs the package `triton` (CUDA builds of torch bring it), whose
interpreter runs the kernels; minutes on two cores.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from tritandem.config import EngineConfig
from tritandem.contracts.errors import ConfigError
from tritandem.engine.model.loader import load_model
from tritandem.engine.model.support import check_config
from tritandem.model_facts.families import FILE, Finding

from .generated import DOCS, filled, table

LAYERS = 6  # enough for one of each kind where kinds alternate
MOST_PARAMETERS = 50_000_000
MOST_REASON_CHARS = 160
SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embedding_size", "word_embed_proj_dim"), 64),
    **dict.fromkeys(
        ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers"), LAYERS
    ),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("intermediate_size", "decoder_ffn_dim", "ffn_dim", "moe_intermediate_size"), 64),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("n_group", "topk_group"), 1),
    **dict.fromkeys(("head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 16),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "hidden_size_per_layer_input"), 16),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 128),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 131),
    **dict.fromkeys(("sliding_window", "window_size"), 16),  # shorter than the probe
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 4),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 16),
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "is_decoder": True,
    "rotary_dim": 8,
}
_ROPE = {"rope_type": "default", "rope_theta": 1e4}
# What a family needs beside these to be consistent, or to be like the models that were published.
EXTRA: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8},
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "gemma3n_text": {
        "num_hidden_layers": 10,
        "num_kv_shared_layers": 5,
        "intermediate_size": [64] * 10,
        "activation_sparsity_pattern": [0.0] * 10,
    },
    "gpt_neo": {"attention_types": [[["global", "local"], LAYERS // 2]]},
    "lfm2": {"layer_types": ["conv", "full_attention"] * (LAYERS // 2)},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * (LAYERS // 2)},
    "reformer": {"axial_pos_embds_dim": (32, 32), "axial_pos_shape": (8, 16)},
}


def tiny_config(family: str) -> PreTrainedConfig:
    """A configuration of the family's own kind, small in all its parts."""
    return _shrunk(CONFIG_MAPPING[family], EXTRA.get(family, {}))


def _shrunk(kind: type[PreTrainedConfig], extra: dict[str, Any]) -> PreTrainedConfig:
    base = kind()
    known = {*base.to_dict(), *kind.attribute_map}
    values = {name: value for name, value in SIZES.items() if name in known} | extra
    for name in kind.sub_configs:
        if isinstance(part := getattr(base, name, None), PreTrainedConfig):
            values[name] = _shrunk(type(part), extra.get(name, {})).to_dict()
    return kind(**values)


def probe(family: str, fused: bool = False) -> Finding:
    """What a server's load says of a tiny model on the CPU. With `fused` also whether the fused kernels take it, for
    which the environment must say TRITON_INTERPRET=1."""
    try:
        config = CONFIG_MAPPING[family]()
        check_config(config)
        check_config(config.get_text_config())
        config = tiny_config(family)
        with torch.device("meta"):
            parameters = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
        if parameters > MOST_PARAMETERS:
            return Finding(family, "unbuilt", f"{parameters:,} parameters where every known size is small")
    except ConfigError as error:
        return Finding(family, "refused", _words(error))
    except Exception as error:
        return Finding(family, "unbuilt", _words(error))
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        try:
            loaded = load_model(Path(folder), EngineConfig(device="cpu", random_weights=True), lambda message: None)
        except ConfigError as error:
            return Finding(family, "refused", _words(error))
    windows = {layer.sliding_window is not None for layer in loaded.layers}
    kinds = [word for is_window, word in ((False, "full"), (True, "sliding")) if is_window in windows]
    attention = " and ".join(kinds + ["gated delta rule"] * (loaded.state_bytes > 0))
    if not fused:
        return Finding(family, "served", "", attention)
    from tritandem.engine.model import device_forward

    notes = _Notes()
    device_forward.log.addHandler(notes)
    device_forward.log.setLevel(logging.INFO)
    try:
        forward = device_forward.DeviceForward(loaded, EngineConfig(), 4, lambda message: None)
    except Exception as error:
        return Finding(family, "refused", f"on a GPU, unless `engine.compile = false`: {_words(error)}")
    finally:
        device_forward.log.removeHandler(notes)
    experts = _short(forward.experts or "")
    if forward.fused:
        return Finding(family, "fused", "", attention, experts)
    reason = notes.reason if forward.capturable else "its heads are larger than 256: dense attention, no CUDA Graphs"
    return Finding(family, "served", reason, attention, experts)


class _Notes(logging.Handler):
    """Keeps why the model was not fused."""

    reason = ""

    def emit(self, record: logging.LogRecord) -> None:
        if record.args:
            self.reason = str(record.args[0])


def _words(error: Exception) -> str:
    """One line of it, without the name of the family in front."""
    text = " ".join(str(error).split())
    text = text.partition(": ")[2] if isinstance(error, ConfigError) else f"{type(error).__name__}: {text}"
    return _short(text)


def _short(text: str) -> str:
    return text if len(text) <= MOST_REASON_CHARS else f"{text[:MOST_REASON_CHARS]}..."


def tables(findings: Iterable[Finding], release: str = transformers.__version__) -> dict[str, str]:
    """The blocks of the page."""
    rows: dict[str, list[Finding]] = {"fused": [], "served": [], "refused": [], "unbuilt": []}
    for finding in findings:
        rows[finding.verdict].append(finding)

    def family(finding: Finding) -> tuple[str, str]:
        return f"`{finding.family}`", f"`{MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[finding.family]}`"

    return {
        "families": f"Of transformers {release}: {len(rows['fused'])} families run on fused kernels, "
        f"{len(rows['served'])} on transformers' own code, {len(rows['refused'])} are refused, "
        f"{len(rows['unbuilt'])} could not be tried.",
        "fused-families": table(
            ("family", "class", "attention", "experts"),
            [(*family(found), found.attention, found.experts) for found in rows["fused"]],
        ),
        "served-families": table(
            ("family", "class", "attention", "experts", "not fused, because"),
            [(*family(found), found.attention, found.experts, found.reason) for found in rows["served"]],
        ),
        "refused-families": table(
            ("family", "class", "refused, because"), [(*family(found), found.reason) for found in rows["refused"]]
        ),
        "untried-families": table(
            ("family", "class", "not built, because"), [(*family(found), found.reason) for found in rows["unbuilt"]]
        ),
    }


def _start_worker() -> None:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()


def _probe_fused(family: str) -> Finding:
    return probe(family, fused=True)


def main(names: list[str]) -> None:
    os.environ["TRITON_INTERPRET"] = "1"  # processes that are born with it compile no kernel
    with ProcessPoolExecutor(mp_context=get_context("spawn"), initializer=_start_worker) as pool:
        findings = []
        for finding in pool.map(_probe_fused, names or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)):
            print(finding, flush=True)
            findings.append(finding)
    if not names:
        stated = {"transformers": transformers.__version__, "families": [asdict(found) for found in findings]}
        FILE.write_text(json.dumps(stated, indent=1) + "\n")
        page = DOCS / "supported-models.md"
        page.write_text(filled(page.read_text(), tables(findings)))


if __name__ == "__main__":
    main(sys.argv[1:])
