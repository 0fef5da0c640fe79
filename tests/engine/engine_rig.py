"""Tiny random models of several architectures and a core driven by hand, one step at a time."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3NextConfig,
)
from tritandem.config import EngineConfig
from tritandem.contracts.fields import SamplingParams
from tritandem.contracts.requests import EngineRequest
from tritandem.contracts.stream import FinishCode, TokenScores
from tritandem.engine.host.core import EngineCore
from tritandem.engine.host.forcing import Forcing
from tritandem.engine.host.outbox import Outbox
from tritandem.engine.model.loader import LoadedModel
from tritandem.engine.model.support import inspect_model
from tritandem.engine.runners.cpu import CpuRunner
from tritandem.engine.step import Runner

VOCAB = 131
# A wide initialisation: attention must matter, and logits must be far apart.
_DECODER: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_PLAIN = {name: value for name, value in _DECODER.items() if name != "head_dim"}

CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**_DECODER),
    "qwen2": lambda: Qwen2Config(**_PLAIN),
    "qwen3": lambda: Qwen3Config(**_DECODER),
    "mistral": lambda: MistralConfig(**_DECODER, sliding_window=9),
    "phi3": lambda: Phi3Config(**_PLAIN),
    "gemma2": lambda: Gemma2Config(**_DECODER, sliding_window=9, query_pre_attn_scalar=12, attn_logit_softcapping=5.0),
    "gemma3": lambda: Gemma3TextConfig(
        **{**_DECODER, "num_hidden_layers": 3}, sliding_window=9, sliding_window_pattern=3
    ),
    "gpt_oss": lambda: GptOssConfig(**_DECODER, sliding_window=9, num_local_experts=4, num_experts_per_tok=2),
    "qwen3_next": lambda: Qwen3NextConfig(
        **{**_DECODER, "num_hidden_layers": 3}, layer_types=["linear_attention", "full_attention", "linear_attention"],
        linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=12,
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=16,
        mlp_only_layers=[0],
    ),
    "gpt_neox": lambda: GPTNeoXConfig(
        **{k: v for k, v in _PLAIN.items() if k != "num_key_value_heads"}, rotary_pct=0.5
    ),
    "gpt2": lambda: GPT2Config(
        vocab_size=VOCAB, n_embd=48, n_layer=2, n_head=4, n_positions=256, initializer_range=0.3,
        bos_token_id=None, eos_token_id=None, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    ),
}  # fmt: skip


@functools.cache
def reference_model(kind: str) -> PreTrainedModel:
    """transformers' own model, untouched."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return AutoModelForCausalLM.from_config(CONFIGS[kind](), dtype=torch.float32).eval()


@functools.cache
def loaded_model(kind: str) -> LoadedModel:
    """The same weights, ready to be served."""
    model = copy.deepcopy(reference_model(kind))
    layers = inspect_model(model)
    return LoadedModel(model, layers, VOCAB, 256)


def make_runner(kind: str = "llama", **config: Any) -> CpuRunner:
    return CpuRunner(
        loaded_model(kind), EngineConfig(**{"num_blocks": 128, "max_sequences": 8, "block_tokens": 4, **config})
    )


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    finish: FinishCode = FinishCode.RUNNING
    cached_tokens: int = 0
    logprobs: list[float] = field(default_factory=list)
    top_ids: list[list[int]] = field(default_factory=list)
    error: str = ""
    scores: TokenScores | None = None


class Rig:
    """A core, its outbox, and what came out of it."""

    def __init__(self, runner: Runner, prefix_cache: bool = True, forcing: Forcing = Forcing()) -> None:  # noqa: B008
        self.runner = runner
        self.outbox = Outbox()
        self.core = EngineCore(runner, self.outbox, prefix_cache, forcing=forcing)
        self.answers: dict[int, Answer] = {}

    def add(self, *requests: EngineRequest) -> None:
        for request in requests:
            self.core.add(request, accepted_ns=1)

    def step(self) -> None:
        self.core.step()
        self.core.check_integrity()
        self.read()

    def read(self) -> None:
        batch = self.outbox.take(0)
        if batch is None:
            return
        start = 0
        for row, (seq_id, count) in enumerate(zip(batch.seq_ids.tolist(), batch.token_counts.tolist(), strict=True)):
            answer = self.answers.setdefault(seq_id, Answer())
            assert answer.finish == FinishCode.RUNNING, "a row after the last one"
            answer.tokens += batch.tokens[start : start + count].tolist()
            answer.finish = FinishCode(batch.finish[row])
            answer.cached_tokens = int(batch.cached_tokens[row])
            answer.error = batch.errors.get(row, "")
            if row in batch.prompts:
                assert answer.scores is None, "scores came twice"
                assert count == len(answer.tokens), "not beside the first token"
                answer.scores = batch.prompts[row]
            if batch.logprobs is not None:
                answer.logprobs += batch.logprobs[start : start + count].tolist()
            if batch.top_ids is not None:
                answer.top_ids += batch.top_ids[start : start + count].tolist()
            start += count

    def run(self, requests: Sequence[EngineRequest], max_steps: int = 5000) -> dict[int, Answer]:
        """All at once to the end."""
        self.add(*requests)
        for _ in range(max_steps):
            if self.core.idle():
                return self.answers
            self.step()
        raise AssertionError(f"not idle after {max_steps} steps")


def prompts(count: int, seed: int = 0, low: int = 1, high: int = 40) -> list[np.ndarray[Any, np.dtype[np.int32]]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB, rng.integers(low, high), dtype=np.int32) for _ in range(count)]


def request(
    seq_id: int,
    ids: Any,
    stop_ids: tuple[int, ...] = (),
    bad_words: Any = (),
    logit_bias: Any = (),
    allowed_token_ids: Any = (),
    **sampling: Any,
) -> EngineRequest:
    """`logit_bias`: pairs of id and value."""
    params = SamplingParams(**{"max_tokens": 12, **sampling})
    lists = (stop_ids, bad_words, logit_bias, allowed_token_ids)
    return EngineRequest(seq_id, np.asarray(ids, np.int32), params, *lists)


def tokens_of(answers: dict[int, Answer]) -> dict[int, list[int]]:
    return {seq_id: answer.tokens for seq_id, answer in answers.items()}


def generate(kind: str, ids: Any, max_tokens: int, **options: Any) -> list[int]:
    """What transformers itself generates greedily for one prompt."""
    input_ids = torch.as_tensor(np.asarray(ids), dtype=torch.long)[None]
    output = reference_model(kind).generate(
        input_ids, attention_mask=torch.ones_like(input_ids), max_new_tokens=max_tokens, do_sample=False, **options
    )
    return output[0, input_ids.shape[1] :].tolist()


def top2_gap(kind: str, ids: Sequence[int]) -> float:
    """Distance of the two largest logits after `ids`; a token choice within rounding is no error."""
    with torch.no_grad():
        best = reference_model(kind)(torch.tensor([list(ids)])).logits[0, -1].topk(2).values
    return float(best[0] - best[1])
