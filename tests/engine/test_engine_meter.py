"""What the engine's core tells its meter: one note a launch and decode step, and gaps only while somebody waits."""

from __future__ import annotations

import numpy as np
import pytest
from tritandem.config import EngineConfig
from tritandem.contracts.fields import SamplingParams
from tritandem.contracts.requests import EngineRequest
from tritandem.engine.host.core import EngineCore
from tritandem.engine.host.outbox import Outbox
from tritandem.engine.runners.cpu import CpuRunner
from tritandem.telemetry.duration_counts import DurationCounts
from tritandem.telemetry.step_meter import StepMeter

from tests.engine.engine_rig import loaded_model


@pytest.fixture
def meter() -> StepMeter:
    return StepMeter("engine")


@pytest.fixture
def core(meter: StepMeter) -> EngineCore:
    config = EngineConfig(num_blocks=32, max_sequences=4, block_tokens=4)
    return EngineCore(CpuRunner(loaded_model("llama"), config, meter), Outbox(), meter=meter)


def request(seq_id: int, max_tokens: int) -> EngineRequest:
    return EngineRequest(seq_id, np.arange(3, 9, dtype=np.int32), SamplingParams(max_tokens=max_tokens))


def noted(histogram: DurationCounts) -> int:
    return sum(histogram.totals()[0])


def test_a_step_is_noted_once_and_a_gap_between_two(core: EngineCore, meter: StepMeter) -> None:
    core.add(request(1, max_tokens=4), accepted_ns=1)
    while not core.idle():
        core.step()
    decode_step, idle_gap, decode_launch, prefill_launch, *_ = meter.histograms()
    assert (noted(prefill_launch), noted(decode_launch)) == (1, 3)
    assert (noted(decode_step), noted(idle_gap)) == (3, 3)
    assert decode_step.totals()[1] > 0


@pytest.mark.parametrize("how", ["finished", "cancelled", "failed"])
def test_the_time_without_any_sequence_is_no_gap(core: EngineCore, meter: StepMeter, how: str) -> None:
    for seq_id in (1, 2):
        core.add(request(seq_id, max_tokens=2), accepted_ns=1)
        core.step()
        if how == "finished":
            core.step()
        elif how == "cancelled":
            core.cancel([seq_id])
        else:
            core.fail_all("broken")
        assert core.idle()
        assert not meter.busy
    assert noted(meter.idle_gap) == (2 if how == "finished" else 0)


def test_without_a_meter_nothing_is_noted() -> None:
    config = EngineConfig(num_blocks=32, max_sequences=4, block_tokens=4)
    core = EngineCore(CpuRunner(loaded_model("llama"), config), Outbox())
    core.add(request(1, max_tokens=2), accepted_ns=1)
    while not core.idle():
        core.step()
    assert core.load().steps == 2
