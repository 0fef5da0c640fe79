"""What NVML tells about one GPU, into a registry: utilisation, power, memory, and how busy its multiprocessors are.

Triton itself publishes `nv_gpu_*` where it was built with DCGM; this is for where it was not, and for the activity
of the multiprocessors (Hopper and newer), which it lacks everywhere. Needs the optional package nvidia-ml-py. Runs on a
publisher's thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from .families import GPU_DRAM_ACTIVITY, GPU_MEMORY_USED, GPU_POWER, GPU_SM_ACTIVITY, GPU_UTILISATION, Family
from .registry import Registry

log = logging.getLogger(__name__)


class GpuReport:
    """Call it once a period. Reads nothing, and says so once in the log, where NVML or the GPU is not there."""

    def __init__(self, registry: Registry, engine: str, gpu_uuid: str) -> None:
        """`gpu_uuid` as nvidia-smi writes it, "GPU-..."."""
        self._registry, self._labels = registry, {"engine": engine, "gpu_uuid": gpu_uuid}
        self._read = _reader(gpu_uuid)

    def __call__(self) -> None:
        for family, value in self._read().items():
            self._registry.set(family, value, **self._labels)


def _reader(gpu_uuid: str) -> Callable[[], Mapping[Family, float]]:
    try:
        import pynvml
    except ImportError:
        log.info("nvidia-ml-py is not installed: no GPU metrics but Triton's own")
        return dict
    try:
        pynvml.nvmlInit()
        return NvmlReader(pynvml, pynvml.nvmlDeviceGetHandleByUUID(gpu_uuid)).read
    except pynvml.NVMLError as error:
        log.warning("NVML cannot read %s: %s", gpu_uuid, error)
        return dict


class NvmlReader:
    """`nvml` is the module pynvml. What a device does not support is left out of every reading."""

    def __init__(self, nvml: Any, device: Any) -> None:
        self._nvml, self._device = nvml, device
        self._previous_sample: Any = None
        self._sampled = bool(self._asked(lambda: nvml.nvmlGpmQueryDeviceSupport(device).isSupportedDevice))

    def read(self) -> dict[Family, float]:
        """Ratios are 0 to 1. The activities are means over the time since the last reading, and miss in the first."""
        nvml, device = self._nvml, self._device
        found = {
            GPU_UTILISATION: self._asked(lambda: nvml.nvmlDeviceGetUtilizationRates(device).gpu / 100),
            GPU_POWER: self._asked(lambda: nvml.nvmlDeviceGetPowerUsage(device) / 1e3),
            GPU_MEMORY_USED: self._asked(lambda: float(nvml.nvmlDeviceGetMemoryInfo(device).used)),
        }
        if self._sampled:
            found |= self._asked(self._activities) or {}
        return {family: value for family, value in found.items() if value is not None}

    def _activities(self) -> dict[Family, float]:
        nvml = self._nvml
        sample = nvml.nvmlGpmSampleGet(self._device, nvml.nvmlGpmSampleAlloc())
        previous, self._previous_sample = self._previous_sample, sample
        if previous is None:
            return {}
        wanted = {GPU_SM_ACTIVITY: nvml.NVML_GPM_METRIC_SM_UTIL, GPU_DRAM_ACTIVITY: nvml.NVML_GPM_METRIC_DRAM_BW_UTIL}
        asked = nvml.c_nvmlGpmMetricsGet_t()
        asked.version, asked.numMetrics = nvml.NVML_GPM_METRICS_GET_VERSION, len(wanted)
        asked.sample1, asked.sample2 = previous, sample
        for place, metric in enumerate(wanted.values()):
            asked.metrics[place].metricId = metric
        try:
            nvml.nvmlGpmMetricsGet(asked)
        finally:
            nvml.nvmlGpmSampleFree(previous)
        answers = zip(wanted, asked.metrics, strict=False)
        return {family: answer.value / 100 for family, answer in answers if answer.nvmlReturn == nvml.NVML_SUCCESS}

    def _asked(self, ask: Callable[[], Any]) -> Any:
        try:
            return ask()
        except self._nvml.NVMLError:
            return None
