"""Claims about reading a GPU through NVML: what is missing on a device, and the real library where there is a GPU."""

from __future__ import annotations

import itertools
import logging
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from tritandem.telemetry import families as f
from tritandem.telemetry.gpu_report import GpuReport, NvmlReader
from tritandem.telemetry.registry import Registry


class NotSupported(Exception):
    pass


class Nvml:
    """As much of pynvml as is used, for a device that has what `supported` names."""

    NVMLError = NotSupported
    NVML_SUCCESS, NVML_GPM_METRICS_GET_VERSION = 0, 1
    NVML_GPM_METRIC_SM_UTIL, NVML_GPM_METRIC_DRAM_BW_UTIL = 2, 10

    def __init__(self, *supported: str) -> None:
        self._supported = supported
        self._numbers = itertools.count()
        self.samples: set[int] = set()

    def _answer(self, name: str, **values: Any) -> Any:
        if name not in self._supported:
            raise NotSupported(name)
        return SimpleNamespace(**values)

    def nvmlDeviceGetUtilizationRates(self, _device: Any) -> Any:  # noqa: N802
        return self._answer("utilisation", gpu=97, memory=12)

    def nvmlDeviceGetPowerUsage(self, _device: Any) -> int:  # noqa: N802
        self._answer("power")
        return 512_500

    def nvmlDeviceGetMemoryInfo(self, _device: Any) -> Any:  # noqa: N802
        return self._answer("memory", used=1 << 30)

    def nvmlGpmQueryDeviceSupport(self, _device: Any) -> Any:  # noqa: N802
        return self._answer("gpm", isSupportedDevice=1)

    def nvmlGpmSampleAlloc(self) -> int:  # noqa: N802
        number = next(self._numbers)
        self.samples.add(number)
        return number

    def nvmlGpmSampleGet(self, _device: Any, sample: int) -> int:  # noqa: N802
        return sample

    def nvmlGpmSampleFree(self, sample: int) -> None:  # noqa: N802
        self.samples.remove(sample)

    def c_nvmlGpmMetricsGet_t(self) -> Any:  # noqa: N802
        return SimpleNamespace(metrics=[SimpleNamespace(metricId=0, nvmlReturn=1, value=0.0) for _ in range(9)])

    def nvmlGpmMetricsGet(self, asked: Any) -> None:  # noqa: N802
        assert asked.sample1 < asked.sample2
        assert {asked.sample1, asked.sample2} == self.samples
        for answer in asked.metrics[: asked.numMetrics]:
            answer.nvmlReturn, answer.value = 0, {2: 81.0, 10: 40.0}[answer.metricId]


def test_a_device_that_tells_everything() -> None:
    nvml = Nvml("utilisation", "power", "memory", "gpm")
    reader = NvmlReader(nvml, "device")
    basic = {f.GPU_UTILISATION: 0.97, f.GPU_POWER: 512.5, f.GPU_MEMORY_USED: float(1 << 30)}
    assert reader.read() == basic  # an activity is a mean between two readings
    for _ in range(3):
        assert reader.read() == {**basic, f.GPU_SM_ACTIVITY: 0.81, f.GPU_DRAM_ACTIVITY: 0.4}
    assert len(nvml.samples) == 1  # the others were given back


def test_what_a_device_does_not_support_is_left_out() -> None:
    reader = NvmlReader(Nvml("power"), "device")
    assert reader.read() == reader.read() == {f.GPU_POWER: 512.5}


def test_without_the_package_nothing_is_published_and_the_log_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    registry = Registry()
    with caplog.at_level(logging.INFO, "tritandem"):
        report = GpuReport(registry, "engine", "GPU-1")
        report()
        report()
    assert registry.changes() == []
    assert [record.message for record in caplog.records] == [
        "nvidia-ml-py is not installed: no GPU metrics but Triton's own"
    ]


@pytest.mark.gpu
def test_a_real_gpu_is_read() -> None:
    pytest.importorskip("pynvml")
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    registry = Registry()
    report = GpuReport(registry, "engine", f"GPU-{torch.cuda.get_device_properties(0).uuid}")
    matrix = torch.randn(4096, 4096, device="cuda")
    found: dict[str, float] = {}
    for _ in range(3):
        for _ in range(200):
            matrix = matrix @ matrix / 64
        torch.cuda.synchronize()
        report()
        found |= {change.name: change.value for change in registry.changes()}
    assert 0 < found["tritandem_gpu_utilization"] <= 1
    assert found["tritandem_gpu_power_usage_watts"] > 10
    assert found["tritandem_gpu_memory_used_bytes"] > matrix.nbytes
    if torch.cuda.get_device_capability(0) >= (9, 0):
        assert 0 < found["tritandem_gpu_sm_activity"] <= 1
