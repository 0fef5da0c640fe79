"""What the meter of an engine on CUDA holds: gaps by the device's own clock, launches, staged bytes, which GPU."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator

import pytest
import torch
from tritandem.config import EngineConfig
from tritandem.engine.host.core import EngineCore
from tritandem.engine.host.outbox import Outbox
from tritandem.engine.model.loader import LoadedModel
from tritandem.engine.model.support import inspect_model
from tritandem.telemetry.step_meter import StepMeter

from tests.engine.engine_rig import VOCAB, prompts, reference_model, request

pytestmark = pytest.mark.gpu

STALL_S = 0.05


@pytest.fixture
def meter() -> StepMeter:
    return StepMeter("engine")


@pytest.fixture
def core(cuda_device: torch.device, meter: StepMeter) -> Iterator[EngineCore]:
    from tritandem.engine.runners.cuda import CudaRunner

    model = copy.deepcopy(reference_model("llama")).to(cuda_device)
    loaded = LoadedModel(model, inspect_model(model), VOCAB, 256)
    config = EngineConfig(num_blocks=128, max_sequences=8, prefill_tokens_per_step=48)
    made = EngineCore(CudaRunner(loaded, config, lambda note: None, meter), Outbox(), meter=meter)
    yield made
    made.runner.close()


def run_to_the_end(core: EngineCore) -> None:
    while not core.idle():
        core.step()


def test_a_host_that_stalls_is_a_gap_of_the_device(core: EngineCore, meter: StepMeter) -> None:
    core.add(request(0, prompts(1, seed=1)[0], max_tokens=60), accepted_ns=1)
    for _ in range(10):
        core.step()
    torch.cuda.synchronize()
    _, before_s = meter.idle_gap.totals()
    time.sleep(STALL_S)  # the stall itself
    run_to_the_end(core)
    assert meter.idle_gap.totals()[1] - before_s >= 0.9 * STALL_S


def test_the_time_between_two_requests_is_no_gap(core: EngineCore, meter: StepMeter) -> None:
    for seq_id in (0, 1, 2):  # graphs are captured during the first
        _, before_s = meter.idle_gap.totals()
        core.add(request(seq_id, prompts(1, seed=1)[0], max_tokens=4), accepted_ns=1)
        run_to_the_end(core)
        torch.cuda.synchronize()
        time.sleep(4 * STALL_S)
    assert meter.idle_gap.totals()[1] - before_s < 2 * STALL_S


def test_launches_bytes_and_the_gpu_are_told(core: EngineCore, meter: StepMeter) -> None:
    core.add(request(0, prompts(1, seed=1)[0], max_tokens=8), accepted_ns=1)
    run_to_the_end(core)
    decode_step, _, decode_launch, prefill_launch, *_ = meter.histograms()
    assert sum(prefill_launch.totals()[0]) >= 1
    assert sum(decode_launch.totals()[0]) >= sum(decode_step.totals()[0]) >= 7
    assert meter.staged_bytes()["pinned"] > 0
    assert meter.gpu_uuid.startswith("GPU-")
