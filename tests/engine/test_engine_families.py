"""Every kind of family gets transformers' tokens: alone, and in a batch with chunks, evictions and prefix hits."""

from __future__ import annotations

import copy
from functools import cache

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from tritandem.config import EngineConfig
from tritandem.engine.model.loader import LoadedModel
from tritandem.engine.model.support import inspect_model
from tritandem.engine.runners.cpu import CpuRunner

from tests.engine.engine_rig import Rig, request
from tools.pages.families import tiny_config

TOKENS = 16
FAMILIES = (
    "dots1",
    "ernie4_5_moe",
    "flex_olmo",
    "glm4_moe",
    "gpt_oss",
    "granitemoe",
    "granitemoe_swa",
    "hunyuan_v1_moe",
    "minimax_m2",
    "mixtral",
    "olmo_hybrid",
    "olmoe",
    "phimoe",
    "qwen2_moe",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_moe",
    "qwen3_next",
)


@cache
def models(family: str) -> tuple[PreTrainedModel, LoadedModel]:
    """transformers' own, and the same weights ready to be served."""
    config = tiny_config(family)
    config.num_hidden_layers, config.initializer_range = 2, 0.3
    config.eos_token_id = config.pad_token_id = None
    if getattr(config, "layer_types", None):
        config.layer_types = list(dict.fromkeys(config.layer_types)) * 2  # one of each kind first
        config.layer_types = config.layer_types[:2]
    with torch.random.fork_rng():
        torch.manual_seed(11)
        theirs = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    ours = copy.deepcopy(theirs)
    return theirs, LoadedModel(ours, inspect_model(ours), config.vocab_size, 128)


def generated(family: str, ids: np.ndarray) -> tuple[list[int], float]:
    """Greedy tokens, and the smallest distance between the two best logits on the way."""
    prompt = torch.from_numpy(ids).long()[None]
    answer = models(family)[0].generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=TOKENS,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best = torch.stack(answer.logits)[:, 0].topk(2).values
    return answer.sequences[0, len(ids) :].tolist(), float((best[:, 0] - best[:, 1]).min())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_gets_transformers_tokens_whoever_else_is_there(family: str) -> None:
    loaded = models(family)[1]
    rng = np.random.default_rng(5)
    prompts = [rng.integers(3, loaded.vocab_size, size, dtype=np.int32) for size in (9, 5, 7, 20)]
    prompts.append(np.concatenate((prompts[3][:16], prompts[1])))  # hits what the fourth left behind
    wanted = [generated(family, ids) for ids in prompts]
    assert min(gap for _, gap in wanted) > 1e-4  # no token hangs on rounding
    crowd = EngineConfig(num_blocks=16, max_sequences=4, block_tokens=4, prefill_tokens_per_step=16)
    rig = Rig(CpuRunner(loaded, crowd))
    answers = rig.run([request(i, ids, max_tokens=TOKENS) for i, ids in enumerate(prompts)])
    assert [answers[i].tokens for i in range(len(prompts))] == [tokens for tokens, _ in wanted]
    windowed = rig.core.spec.window_tokens is not None  # gives blocks back while it decodes, and has room
    assert windowed or rig.core.load().preemptions > 0
    again = rig.run([request(9, prompts[3], max_tokens=TOKENS)])[9]
    assert (again.tokens, again.cached_tokens >= 4) == (wanted[3][0], not rig.core.spec.stateful)
