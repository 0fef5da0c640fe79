"""The kernels of structured answers do what the plain sampler does with the host's masks, and wait for them so long."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from tritandem.contracts.fields import SamplingParams
from tritandem.contracts.stream import FinishCode
from tritandem.engine.rows.state import SlotState
from tritandem.engine.sampling.sampler import sample
from tritandem.engine.step import (
    FREE,
    GREEDY,
    MASKED,
    STRUCTURED,
    TABLED,
    TABLES,
    SamplingFeatures,
    SlotInit,
    mask_words,
)

from tests.engine_cuda.cuda_reference import assert_same_rows

pytestmark = pytest.mark.gpu

SLOTS, VOCAB = 6, 5000  # more words of a mask than one program writes
ROWS = [2, 1, 5, 3, SLOTS]
KINDS = (MASKED, FREE, MASKED, MASKED, FREE, MASKED)


def state_on(device: torch.device, masks: np.ndarray[Any, Any], sampling: SamplingParams) -> SlotState:
    """Slot 3 has finished; its mask means nothing."""
    given = torch.from_numpy(masks.copy())
    state = SlotState.empty(SLOTS, 8, VOCAB, device, given.pin_memory() if device.type == "cuda" else given)
    prompt, nothing = np.arange(4, dtype=np.int32), np.zeros(0, np.int32)
    for slot, kind in enumerate(KINDS):
        state.init_row(SlotInit(slot, prompt, sampling, (7,), (), nothing, structure=kind), 128)
    state.finished[3] = 1
    return state


def some_masks(seed: int) -> np.ndarray[Any, Any]:
    rng = np.random.default_rng(seed)
    bits = rng.random((SLOTS + 1, 32 * mask_words(VOCAB))) < rng.choice((0.001, 0.5, 0.999), (SLOTS + 1, 1))
    bits[:, VOCAB:] = True  # whatever the host writes there
    bits[:, 11] = True
    return np.packbits(bits, axis=1, bitorder="little").view(np.int32)


def step_on(state: SlotState) -> Any:
    from tritandem.engine.runners.decode_step import WORDS_PER_ROW, DecodeStep, Report

    device = state.words.device
    pinned = {"pin_memory": device.type == "cuda"}
    ring = torch.zeros((4, SLOTS * WORDS_PER_ROW), dtype=torch.int32, **pinned)
    ready, waits = torch.zeros(1, dtype=torch.int64, **pinned), torch.zeros(4, dtype=torch.int64, **pinned)
    report = Report(ring, torch.ones(1, dtype=torch.int64, device=device), ready, waits)

    def no_forward(*_: torch.Tensor) -> torch.Tensor:
        raise AssertionError("the test brings the logits")

    return DecodeStep(state, no_forward, report, SLOTS + 1), report


FEATURES: dict[str, tuple[SamplingParams, SamplingFeatures]] = {
    "greedy": (SamplingParams(), GREEDY),
    "drawn": (SamplingParams(temperature=1.0, top_k=9, seed=5), SamplingFeatures(frozenset({"sampled", "filtered"}))),
    "penalised": (SamplingParams(repetition_penalty=1.5, min_tokens=2), SamplingFeatures(frozenset({"penalised"}))),
    "logprobs": (SamplingParams(logprobs=3), SamplingFeatures(frozenset(), 3)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", sorted(FEATURES))
def test_masked_choices_equal_the_plain_sampler_s(kernel_device: torch.device, name: str, dtype: torch.dtype) -> None:
    sampling, plain = FEATURES[name]
    masks = some_masks(3)
    state, twin = state_on(kernel_device, masks, sampling), state_on(torch.device("cpu"), masks, sampling)
    rows = torch.tensor(ROWS, device=kernel_device)
    logits = torch.randn((5, VOCAB), generator=torch.Generator().manual_seed(2)).to(dtype)
    logits[0, 1] = float("nan")  # where slot 2's mask has no bit, nobody sees it
    masks_of_2 = twin.masks[2, 0]
    twin.masks[2, 0] = state.masks[2, 0] = masks_of_2 & ~2
    asked = SamplingFeatures(plain.asked | {STRUCTURED}, plain.top_logprobs)
    step, report = step_on(state)
    report.masks_ready.fill_(1)

    step.choose(logits.clone().to(kernel_device), rows, asked, decoding=3)
    if kernel_device.type == "cuda":
        torch.cuda.synchronize()

    sampled = sample(logits.float(), rows.cpu(), twin, asked)
    twin.store_one(rows[:3].cpu())
    tokens, finish = twin.advance(rows.cpu(), sampled.tokens, sampled.broken, plain.penalised)
    record = report.ring[1]
    assert record[:5].tolist() == tokens.tolist()
    assert record[5:10].tolist() == finish.tolist()
    assert (finish != int(FinishCode.ERROR)).all()
    assert_same_rows(state, twin)
    if sampled.top_ids is not None:
        assert record[15:30].view(5, 3)[[0, 1, 2]].tolist() == sampled.top_ids[[0, 1, 2]].tolist()


def some_table(*states: SlotState) -> None:
    """Table 5: three states, in each of which other tokens are allowed; token 11 always."""
    rng = np.random.default_rng(9)
    classes = rng.integers(0, 40, 32 * mask_words(VOCAB), np.uint8)
    classes[11] = 3
    moves = np.where(rng.random((256, 256)) < 0.3, rng.integers(0, 3, (256, 256)), 255).astype(np.uint8)
    moves[:, 3] = [1, 2, 0] * 85 + [0]
    words = torch.from_numpy(np.concatenate((classes, moves.reshape(-1))).view(np.int32))
    for state in states:
        state.write_table(5, words.to(state.words.device))
        state.structure[[5, 0, 3]] = TABLES + 5
        state.structure_state[5], state.structure_state[0] = 1, 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", sorted(FEATURES))
def test_tables_are_followed_as_on_the_host(kernel_device: torch.device, name: str, dtype: torch.dtype) -> None:
    """Beside rows with masks and rows without; over several steps, in which rows end."""
    sampling, plain = FEATURES[name]
    sampling = dataclasses.replace(sampling, max_tokens=4)
    masks = some_masks(3)
    state, twin = state_on(kernel_device, masks, sampling), state_on(torch.device("cpu"), masks, sampling)
    some_table(state, twin)
    rows = torch.tensor([2, 1, 5, 3, 0, SLOTS], device=kernel_device)
    asked = SamplingFeatures(plain.asked | {STRUCTURED, TABLED}, plain.top_logprobs)
    step, report = step_on(state)
    report.masks_ready.fill_(1)
    for seed in range(5):
        logits = torch.randn((6, VOCAB), generator=torch.Generator().manual_seed(seed)).to(dtype)
        step.choose(logits.clone().to(kernel_device), rows, asked, decoding=6)
        if kernel_device.type == "cuda":
            torch.cuda.synchronize()
        sampled = sample(logits.float(), rows.cpu(), twin, asked)
        twin.store_one(rows.cpu())
        tokens, finish = twin.advance(rows.cpu(), sampled.tokens, sampled.broken, plain.penalised)
        twin.follow_tables(rows.cpu())
        assert report.ring[1, :6].tolist() == tokens.tolist()
        assert report.ring[1, 6:12].tolist() == finish.tolist()
        assert_same_rows(state, twin)


def test_masks_that_never_come_cost_the_rows_that_need_them(
    kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tritandem.engine.runners import decode_step

    monkeypatch.setattr(decode_step, "_MOST_POLLS", 3)
    state = state_on(kernel_device, some_masks(4), SamplingParams())
    step, report = step_on(state)
    rows = torch.tensor(ROWS, device=kernel_device)
    logits = torch.randn((5, VOCAB), generator=torch.Generator().manual_seed(2)).to(kernel_device)
    free = int(logits[1].argmax())
    features = SamplingFeatures(frozenset({STRUCTURED}))
    rehearsed = logits.clone()
    step.choose(rehearsed, torch.full_like(rows, SLOTS), features, decoding=5, rehearsal=True)
    assert torch.equal(rehearsed, logits)  # it waits for nothing and changes nothing
    step.choose(logits, rows, features, decoding=5)
    if kernel_device.type == "cuda":
        torch.cuda.synchronize()
    error = int(FinishCode.ERROR)
    assert report.ring[1, 5:10].tolist() == [error, 0, error, 0, 0]
    assert report.ring[1, 1].item() == free
