"""The kernels around the model do what the plain sampler and slot rows do; the fused decoder is the model."""

from __future__ import annotations

import copy
import dataclasses

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen2Config, Qwen3Config
from tritandem.config import EngineConfig
from tritandem.contracts.fields import SamplingParams
from tritandem.engine.model.loader import LoadedModel
from tritandem.engine.model.support import inspect_model
from tritandem.engine.rows.state import SlotState
from tritandem.engine.sampling.sampler import sample
from tritandem.engine.step import SamplingFeatures, SlotInit

from tests.engine_cuda.cuda_reference import assert_same_rows, relative_error
from tests.engine_cuda.tiny_shape import SHAPE, VOCAB

SLOTS = 5
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SHAPE),
    "qwen2": Qwen2Config(**{**SHAPE, "num_key_value_heads": 1}),
    "qwen3": Qwen3Config(**SHAPE),
}


def inits() -> list[SlotInit]:
    def one(slot: int, sampling: SamplingParams, stop_ids: tuple[int, ...], outputs: int) -> SlotInit:
        prompt = np.arange(3 + slot, dtype=np.int32)
        bad_words = ((4,), (5, 6)) if slot == 2 else ()
        return SlotInit(slot, prompt, sampling, stop_ids, bad_words, np.arange(outputs, dtype=np.int32))

    return [
        one(0, SamplingParams(max_tokens=1), (), 0),
        one(2, SamplingParams(max_tokens=40, min_tokens=30, top_k=7, seed=2**40 + 1), (11, 12), 3),
        one(3, SamplingParams(max_tokens=40, temperature=0.5, top_p=0.25, min_p=0.125), (13,), 9),
        one(4, SamplingParams(max_tokens=900, presence_penalty=0.5), tuple(range(16)), 0),
    ]


@pytest.mark.gpu
def test_greedy_kernels_equal_sampler_and_advance(kernel_device: torch.device) -> None:
    from tritandem.engine.runners.decode_step import WORDS_PER_ROW, DecodeStep, Report

    generator = torch.Generator().manual_seed(5)
    states = [SlotState.empty(SLOTS, 8, VOCAB, kernel_device) for _ in range(2)]
    for state in states:
        for init in inits():
            state.init_row(dataclasses.replace(init, sampling=SamplingParams(max_tokens=3, min_tokens=2)), 128)
        state.finished[4] = True
    rows = torch.tensor([2, 0, 4, 3, SLOTS], device=kernel_device)
    ring = torch.zeros((4, SLOTS * WORDS_PER_ROW), dtype=torch.int32, device=kernel_device)
    report = Report(ring, *torch.zeros((3, 1), dtype=torch.int64, device=kernel_device))
    logits = iter([torch.randn(5, VOCAB, generator=generator) for _ in range(4)])
    latest: list[torch.Tensor] = []

    def forward(ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, lens: torch.Tensor) -> torch.Tensor:
        idle = states[0].idle(rows)
        assert torch.equal(lens == 0, idle)
        assert torch.equal(ids, states[0].last_token[rows].long())
        assert torch.equal(positions, states[0].length[rows].long())
        latest.append(next(logits).to(kernel_device))
        latest[-1][0, 11] = 50.0  # a stop id that min_tokens forbids at first
        latest[-1][3, 7] = float("nan") if len(latest) == 3 else 1.0
        return latest[-1]

    step = DecodeStep(states[0], forward, report, SLOTS + 1)
    step.rows[: len(rows)] = rows
    for number in range(1, 5):
        step.enqueue(5, SamplingFeatures())
        plain = states[1]
        sampled = sample(latest[-1], rows, plain, SamplingFeatures())
        plain.store_one(rows)
        tokens, finish = plain.advance(rows, sampled.tokens, sampled.broken, penalised=False)
        assert int(report.record) == number
        record = ring[number % 4]
        assert torch.equal(record[5:10], finish.to(torch.int32))
        kept = ~sampled.broken  # the token of broken logits means nothing
        assert torch.equal(record[:5][kept], tokens[kept])
        for state in states:
            state.last_token[rows[~kept]] = 0
            state.recent[rows[~kept]] = 0
        assert_same_rows(states[0], plain)


@pytest.mark.gpu
@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_fused_decoder_equals_the_models_own_code(kernel_device: torch.device, name: str) -> None:
    from tritandem.engine.model.device_forward import DeviceForward

    torch.manual_seed(1)
    config = copy.deepcopy(CONFIGS[name])
    for dtype in (torch.float32, torch.bfloat16) if kernel_device.type == "cuda" else (torch.float32,):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).to(kernel_device).eval()
        loaded = LoadedModel(model, inspect_model(model), VOCAB, 128)
        notes: list[str] = []
        forward = DeviceForward(loaded, EngineConfig(), SLOTS, notes.append)  # compares both twins itself
        assert forward.fused, notes


@pytest.mark.gpu
def test_an_unrecognised_model_runs_on_its_own_code(kernel_device: torch.device) -> None:
    from tritandem.engine.model.device_forward import DeviceForward

    model = AutoModelForCausalLM.from_config(CONFIGS["llama"]).to(kernel_device).eval()
    loaded = LoadedModel(model, inspect_model(model), VOCAB, 128)
    model.model.layers[0].mlp.act_fn = torch.nn.GELU()
    assert not DeviceForward(loaded, EngineConfig(), SLOTS, lambda note: None).fused


def test_relative_error_does_not_forgive_nan() -> None:
    assert not relative_error(torch.tensor([float("nan")]), torch.ones(1)) < 1.0
