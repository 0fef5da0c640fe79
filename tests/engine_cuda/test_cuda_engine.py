"""The engine on CUDA gives transformers' tokens, needs no host in a steady step, and loses nothing."""

from __future__ import annotations

import copy
import dataclasses
import functools
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
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
    MixtralConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)
from tritandem.config import EngineConfig
from tritandem.contracts.stream import FinishCode
from tritandem.engine.model.loader import LoadedModel
from tritandem.engine.model.support import inspect_model
from tritandem.engine.runners.cpu import CpuRunner
from tritandem.engine.step import PrefillChunk, SlotInit, StepPlan

from tests.engine.engine_rig import Rig, prompts, request, tokens_of

pytestmark = pytest.mark.gpu

VOCAB, CONTEXT = 131, 256
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_ALL_HEADS = {name: value for name, value in _SHAPE.items() if name != "num_key_value_heads"}
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**_SHAPE),
    "qwen2": Qwen2Config(**_SHAPE),
    "qwen3": Qwen3Config(**_SHAPE, head_dim=32),
    "mistral": MistralConfig(**_SHAPE, head_dim=16, sliding_window=9),
    "phi3": Phi3Config(**_SHAPE),
    "gpt_oss": GptOssConfig(**_SHAPE, head_dim=16, sliding_window=9, num_local_experts=4, num_experts_per_tok=2),
    "mixtral": MixtralConfig(**_SHAPE, num_local_experts=4, num_experts_per_tok=2),
    "qwen3_moe": Qwen3MoeConfig(
        **_SHAPE, head_dim=32, moe_intermediate_size=48, num_experts=8, num_experts_per_tok=2, norm_topk_prob=True
    ),
    "gemma2": Gemma2Config(
        **_SHAPE, head_dim=32, sliding_window=9, query_pre_attn_scalar=12, attn_logit_softcapping=5.0
    ),
    "gemma3": Gemma3TextConfig(
        **{**_SHAPE, "num_hidden_layers": 3}, head_dim=16, sliding_window=9, sliding_window_pattern=3
    ),
    "gpt_neox": GPTNeoXConfig(**_ALL_HEADS, rotary_pct=0.5),
    "gpt2": GPT2Config(
        vocab_size=VOCAB, n_embd=64, n_layer=2, n_head=4, n_positions=CONTEXT, initializer_range=0.3,
        bos_token_id=None, eos_token_id=None, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    ),
}  # fmt: skip


@functools.cache
def reference_model(kind: str) -> PreTrainedModel:
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[kind]), dtype=torch.float32).eval()


def loaded(kind: str, device: str, dtype: torch.dtype = torch.float32) -> LoadedModel:
    model = copy.deepcopy(reference_model(kind)).to(device, dtype)
    return LoadedModel(model, inspect_model(model), VOCAB, CONTEXT)


def cuda_runner(kind: str = "llama", dtype: torch.dtype = torch.float32, **config: Any) -> Any:
    from tritandem.engine.runners.cuda import CudaRunner

    settings = {"num_blocks": 128, "max_sequences": 8, "prefill_tokens_per_step": 48, **config}
    return CudaRunner(loaded(kind, "cuda", dtype), EngineConfig(**settings), lambda note: None)


def answers(runner: Any, requests: Sequence[Any]) -> dict[int, Any]:
    rig = Rig(runner)
    try:
        return rig.run(requests)
    finally:
        runner.close()


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma2"])
@pytest.mark.parametrize("attention", ["auto", "dense"])
def test_tokens_over_an_fp8_cache_are_those_of_the_cpu_engine_over_one(
    cuda_device: torch.device, kind: str, attention: str
) -> None:
    """Rounding to FP8 flips where two devices differ in a last bit: almost all tokens agree until one does."""
    settings = {"num_blocks": 128, "max_sequences": 8, "prefill_tokens_per_step": 48, "kv_dtype": "fp8_e4m3"}
    texts = [request(i, ids, max_tokens=8) for i, ids in enumerate(prompts(10, seed=3, high=60))]
    runner = cuda_runner(kind, kv_dtype="fp8_e4m3", attention=attention)
    got = tokens_of(answers(runner, texts))
    want = tokens_of(answers(CpuRunner(loaded(kind, "cpu"), EngineConfig(**settings)), texts))
    assert sum(got[i][0] == want[i][0] for i in range(10)) >= 9
    assert sum(got[i] == want[i] for i in range(10)) >= 7


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_over_an_fp8_cache_the_fused_decoder_runs_in_graphs_and_neither_cuts_nor_hits_change_a_token(
    cuda_device: torch.device, dtype: torch.dtype
) -> None:
    runner = cuda_runner(dtype=dtype, kv_dtype="fp8_e4m3")
    assert runner.device.forward.fused
    assert runner.device.captures.captured() > 0
    shared = prompts(1, seed=5, low=40, high=41)[0].tolist()
    texts = [request(i, [*shared, *ids], max_tokens=8) for i, ids in enumerate(prompts(6, seed=6, high=20))]
    first, again = answers(runner, texts), answers(cuda_runner(dtype=dtype, kv_dtype="fp8_e4m3"), texts[::-1])
    agree = sum(first[i].tokens == again[i].tokens for i in range(6))
    assert agree == 6 if dtype == torch.float32 else agree >= 4


@pytest.mark.parametrize("kind", sorted(CONFIGS))
def test_float32_greedy_tokens_equal_generate(cuda_device: torch.device, kind: str) -> None:
    texts = prompts(10, seed=3, high=60)
    runner = cuda_runner(kind)
    captured = runner.device.captures.captured()
    got = tokens_of(answers(runner, [request(i, ids, max_tokens=20) for i, ids in enumerate(texts)]))
    assert captured > 0
    model = reference_model(kind)
    for i, ids in enumerate(texts):
        # One pass over prompt and answer: what `generate` would choose after each token of the same text.
        text = torch.tensor([*ids.tolist(), *got[i]])[None]
        with torch.no_grad():
            logits = model(text).logits[0, len(ids) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(got[i])[:, None])[:, 0]
        assert len(got[i]) == 20
        assert float((logits.amax(dim=1) - chosen).max()) < 1e-3, f"sequence {i}: {got[i]}"


FEATURES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.8, "seed": 11},
    "filtered": {"temperature": 1.2, "top_k": 20, "top_p": 0.8, "min_p": 0.02, "seed": 5},
    "penalised": {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2},
    "bounded": {"min_tokens": 6, "stop_ids": tuple(range(0, 60, 4)), "bad_words": ((3,), (9, 10))},
    "logprobs": {"logprobs": 4},
    "biased": {"logit_bias": tuple((i, -100.0 if i % 3 else 2.5) for i in range(90)), "logprobs": 2},
    "allowed": {
        "allowed_token_ids": tuple(range(0, 60, 3)),
        "logit_bias": ((9, 3.5), (6, -1.5)),
        "bad_words": ((3,), (9, 12)),
        "min_tokens": 6,
        "stop_ids": (0, 6),
        "repetition_penalty": 1.3,
    },
}


@pytest.mark.parametrize("name", sorted(FEATURES))
def test_graph_and_eager_steps_give_equal_tokens(cuda_device: torch.device, name: str) -> None:
    options = FEATURES[name]
    requests = [request(i, ids, **options) for i, ids in enumerate(prompts(7, seed=5))]
    runner = cuda_runner()
    Rig(runner).run(requests)  # what it asks for is captured in the idle moment behind it
    while runner.prepare():
        pass
    replayed = answers(runner, requests)
    eager = answers(cuda_runner(cuda_graphs=False), requests)
    assert tokens_of(replayed) == tokens_of(eager)
    assert [replayed[i].top_ids for i in replayed] == [eager[i].top_ids for i in eager]


@pytest.mark.parametrize("name", ["greedy", "penalised", "bounded", "logprobs", "biased", "allowed"])
def test_cuda_equals_the_cpu_runner(cuda_device: torch.device, name: str) -> None:
    requests = [request(i, ids, **FEATURES[name]) for i, ids in enumerate(prompts(9, seed=6))]
    device = answers(cuda_runner(), requests)
    host = answers(CpuRunner(loaded("llama", "cpu"), EngineConfig(num_blocks=128, max_sequences=8)), requests)
    assert tokens_of(device) == tokens_of(host)
    for i in host:
        assert device[i].finish == host[i].finish
        assert device[i].logprobs == pytest.approx(host[i].logprobs, abs=1e-3, nan_ok=True)
        assert device[i].top_ids == host[i].top_ids


def test_a_seeded_request_gives_the_same_tokens_alone_and_in_a_batch(cuda_device: torch.device) -> None:
    ids, options = prompts(1, seed=9)[0], {"temperature": 1.0, "seed": 123, "max_tokens": 16}
    alone = answers(cuda_runner(), [request(0, ids, **options)])[0].tokens
    crowd = [request(i, p, temperature=0.7, seed=i) for i, p in enumerate(prompts(6, seed=10), 1)]
    assert answers(cuda_runner(), [*crowd, request(0, ids, **options)])[0].tokens == alone


def test_preempted_sequences_continue_with_identical_tokens(cuda_device: torch.device) -> None:
    requests = [request(i, ids, max_tokens=60) for i, ids in enumerate(prompts(8, seed=2, low=20))]
    roomy = tokens_of(answers(cuda_runner(), requests))
    runner = cuda_runner(num_blocks=16)
    rig = Rig(runner)
    tight = tokens_of(rig.run(requests))
    assert rig.core.load().preemptions > 0
    assert tight == roomy
    runner.close()


def filled(runner: Any, rows: int, prompt_tokens: int = 20) -> list[int]:
    """`rows` slots with a prompt each and blocks for the whole context; returns the slots."""
    blocks = -(-CONTEXT // runner.spec.block_tokens)
    sampling = request(0, [1], max_tokens=200).sampling
    ids = np.arange(prompt_tokens, dtype=np.int32)
    for slot in range(rows):
        updates = np.array([(slot, i, 1 + slot * blocks + i) for i in range(blocks)], np.int32)
        init = SlotInit(slot, ids + slot, sampling, (), (), np.zeros(0, np.int32))
        chunk = PrefillChunk(slot, 0, ids + slot, last=True)
        runner.launch(StepPlan(slot, inits=[init], block_updates=updates, prefill=[chunk]))
        assert runner.collect(wait=True).finish.tolist() == [FinishCode.RUNNING]
    return list(range(rows))


def test_64_steady_steps_neither_synchronise_nor_copy_to_the_device(cuda_device: torch.device) -> None:
    from torch.profiler import ProfilerActivity, profile

    runner = cuda_runner(max_sequences=4)
    slots = filled(runner, 4)
    step_ids = iter(range(100, 1000))

    def launch() -> None:
        runner.launch(StepPlan(next(step_ids), decode_slots=slots))

    launch()  # brings the rows to the device
    runner.collect(wait=True)
    transfers = dict(runner.device.staging.counters.transfers)
    tokens = []
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(64):
                launch()
                while runner.pending() > 8:  # asks, never waits
                    result = runner.collect(wait=False)
                    tokens += [] if result is None else [result.tokens.tolist()]
        finally:
            torch.cuda.set_sync_debug_mode("default")
    while runner.pending():
        tokens.append(runner.collect(wait=True).tokens.tolist())
    names = {event.name for event in profiled.events()}
    forbidden = [n for n in names if "Synchronize" in n or "HtoD" in n or n.startswith("cudaMemcpy")]
    assert set(forbidden) <= {"cudaDeviceSynchronize"}  # the profiler's own, when it ends
    assert any("GraphLaunch" in name for name in names)
    assert len(tokens) == 64
    assert all(token >= 0 for row in tokens for token in row)
    pinned = {
        route: count for route, count in runner.device.staging.counters.transfers.items() if route.value == "pinned"
    }
    assert pinned == {route: count for route, count in transfers.items() if route.value == "pinned"}
    runner.close()


def test_bfloat16_logits_stay_within_two_percent_of_float32(cuda_device: torch.device) -> None:
    """Through the fused prefill and decode, over a model with a usual initialisation."""
    config = LlamaConfig(**{**_SHAPE, "initializer_range": 0.05, "hidden_size": 256, "num_hidden_layers": 4})
    torch.manual_seed(2)
    truth = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    ids = torch.from_numpy(prompts(1, seed=8, low=50, high=51)[0].astype(np.int64))
    with torch.no_grad():
        want = truth(ids[None]).logits[0, -1]
    from tritandem.engine.runners.cuda import CudaRunner

    model = truth.to("cuda", torch.bfloat16)
    ready = LoadedModel(model, inspect_model(model), VOCAB, CONTEXT)
    runner = CudaRunner(ready, EngineConfig(num_blocks=64, max_sequences=4, cuda_graphs=False), lambda note: None)
    seen: list[torch.Tensor] = []
    decode = runner.device.forward.decode
    runner.device.forward.decode = lambda *args: seen.append(decode(*args)) or seen[-1]
    init = SlotInit(0, ids[:-1].numpy().astype(np.int32), request(0, [1]).sampling, (), (), np.zeros(0, np.int32))
    updates = np.array([(0, i, 1 + i) for i in range(8)], np.int32)
    chunk = PrefillChunk(0, 0, init.prompt_ids, last=True)
    runner.launch(StepPlan(0, inits=[init], block_updates=updates, prefill=[chunk]))
    runner.collect(wait=True)
    with torch.inference_mode():
        runner.device.state.last_token[0] = ids[-1]  # the token whose logits are known
    torch.cuda.synchronize()
    runner.launch(StepPlan(1, decode_slots=[0]))
    runner.collect(wait=True)
    got = seen[-1][0].float().cpu()
    assert float((got - want).norm() / want.norm()) < 2e-2
    runner.close()


def test_out_of_memory_costs_only_the_sequences_of_that_step(
    cuda_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = cuda_runner()
    rig = Rig(runner)
    rig.add(request(1, prompts(1)[0], max_tokens=30))
    for _ in range(4):
        rig.step()
    run = runner.device.mixed.run

    def exhausted(*_: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(runner.device.mixed, "run", exhausted)
    rig.add(request(2, prompts(1, seed=4)[0], max_tokens=5))
    for _ in range(6):
        rig.step()
    monkeypatch.setattr(runner.device.mixed, "run", run)
    rig.run([request(3, prompts(1, seed=5)[0], max_tokens=5)])
    assert rig.answers[2].finish == FinishCode.ERROR
    assert "memory" in rig.answers[2].error
    assert rig.answers[3].finish == FinishCode.LENGTH
    assert rig.answers[1].finish == FinishCode.LENGTH
    assert len(rig.answers[1].tokens) == 30
    runner.close()


def test_a_first_token_chosen_before_its_step_failed_counts_once(
    cuda_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = request(1, prompts(1)[0], max_tokens=30)
    second = request(2, prompts(1, seed=4)[0], max_tokens=12, temperature=1.0, seed=5, frequency_penalty=1.0)
    want = tokens_of(answers(cuda_runner(cuda_graphs=False), [first, second]))
    runner = cuda_runner(cuda_graphs=False)  # prompts then go ahead of the decode rows, in launches of their own
    rig = Rig(runner)
    rig.add(first)
    for _ in range(4):
        rig.step()
    run, failures = runner.device.graphs.run, []

    def exhausted_once(*arguments: Any) -> None:
        if not failures:
            failures.append(arguments)
            raise torch.OutOfMemoryError("CUDA out of memory")
        run(*arguments)

    rig.add(second)
    monkeypatch.setattr(runner.device.graphs, "run", exhausted_once)
    rig.run([])
    assert failures
    assert tokens_of(rig.answers) == want
    assert {answer.finish for answer in rig.answers.values()} == {FinishCode.LENGTH}
    runner.close()


def test_a_result_that_never_comes_is_not_waited_for_again(
    cuda_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tritandem.engine.runners import cuda as module

    runner = cuda_runner()
    rig = Rig(runner)
    rig.add(request(1, prompts(1)[0], max_tokens=30))
    rig.core.step()
    passed, failures = module._passed, []

    def broken_once(event: Any) -> bool:
        if not failures:
            failures.append(event)
            raise RuntimeError("CUDA error: an illegal memory access")
        return passed(event)

    monkeypatch.setattr(module, "_passed", broken_once)
    rig.run([])
    assert rig.answers[1].finish == FinishCode.ERROR
    assert runner.pending() == 0
    assert rig.run([request(2, prompts(1, seed=4)[0], max_tokens=5)])[2].finish == FinishCode.LENGTH
    runner.close()


@pytest.mark.parametrize("attention", ["auto", "dense"])
def test_a_prefix_whose_prefill_broke_once_is_computed_anew(cuda_device: torch.device, attention: str) -> None:
    prompt = prompts(1, seed=2, low=50, high=51)[0]
    want = answers(cuda_runner(attention=attention), [request(0, prompt)])[0].tokens
    runner = cuda_runner(attention=attention)
    rig = Rig(runner)
    weight = runner.device.forward._packed.model.get_input_embeddings().weight.data
    sound = weight.clone()
    weight.fill_(float("nan"))
    torch.cuda.synchronize()  # the runner has a stream of its own
    assert rig.run([request(0, prompt)])[0].finish == FinishCode.ERROR
    weight.copy_(sound)
    torch.cuda.synchronize()
    for seq_id in (1, 2):
        answer = rig.run([request(seq_id, prompt)])[seq_id]
        assert (answer.finish, answer.tokens) == (FinishCode.LENGTH, want)
    runner.close()


def test_1000_random_admissions_and_cancellations_leave_every_block_free(cuda_device: torch.device) -> None:
    rng = random.Random(13)
    runner = cuda_runner(num_blocks=24)
    rig = Rig(runner)
    free = rig.core.load().free_blocks
    for seq_id in range(1000):
        ids = np.array([rng.randrange(VOCAB) for _ in range(rng.randrange(1, 80))], np.int32)
        rig.add(request(seq_id, ids, max_tokens=rng.randrange(1, 90)))
        for _ in range(rng.randrange(0, 6)):
            rig.step()
        if rng.random() < 0.2:
            rig.core.cancel(rng.sample(rig.core.live_ids(), k=1) if rig.core.live_ids() else [])
        if len(rig.core.live_ids()) > 24:
            rig.core.cancel(rig.core.live_ids()[::2])
    for _ in range(20000):
        if rig.core.idle():
            break
        rig.step()
    assert rig.core.idle()
    assert rig.core.load().free_blocks == free
    assert rig.core.load().preemptions > 0
    assert len(rig.answers) == 1000
    runner.close()


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt2"])
def test_prompts_are_scored_as_on_the_cpu(kind: str, cuda_device: torch.device) -> None:
    """In chunks beside rows that decode, eagerly; whoever is not scored gets the same tokens."""
    batch = prompts(6, seed=11, low=20, high=60)
    asked = [request(i, ids, **({"prompt_logprobs": 3} if i % 2 else {})) for i, ids in enumerate(batch)]
    device = answers(cuda_runner(kind, prefill_tokens_per_step=24), asked)
    host = answers(CpuRunner(loaded(kind, "cpu"), EngineConfig(num_blocks=128, max_sequences=8)), asked)
    assert tokens_of(device) == tokens_of(host)
    for i in range(6):
        ours, theirs = device[i].scores, host[i].scores
        assert (ours is None) == (theirs is None) == (i % 2 == 0)
        if ours is not None:
            np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=5e-3)
            np.testing.assert_allclose(ours.top_logprobs, theirs.top_logprobs, atol=5e-3)


@pytest.mark.parametrize("kind", ["llama", "mistral", "gpt2"])
@pytest.mark.parametrize("prefix_cache", [False, True])
def test_sequences_of_one_prompt_share_it_and_answer_as_each_would_alone(
    kind: str, prefix_cache: bool, cuda_device: torch.device
) -> None:
    """The last block of the prompt is copied on the device, between steps that are launched ahead."""
    draws = [{}, {"temperature": 0.9, "seed": 5}, {"temperature": 1.1, "seed": 6, "top_k": 20}, {"logprobs": 2}]
    family = [
        dataclasses.replace(request(10 * number + i, ids, max_tokens=20, **asked), family=1 + number)
        for number, ids in enumerate(prompts(4, seed=12, low=3, high=60))
        for i, asked in enumerate(draws)
    ]
    rig = Rig(cuda_runner(kind), prefix_cache)
    together = rig.run(family)
    rig.runner.close()
    assert sum(answer.cached_tokens > 0 for answer in together.values()) >= 12
    host = Rig(CpuRunner(loaded(kind, "cpu"), EngineConfig(num_blocks=128, max_sequences=8)))
    alone = host.run([dataclasses.replace(one, family=0) for one in family])
    assert tokens_of(together) == tokens_of(alone)
