"""Where these tests run: on CUDA, or (kernels only) on the CPU under Triton's interpreter (TRITON_INTERPRET=1)."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

# Read when CUDA starts. Streams of ranks that share a device and a queue to it would wait for each other.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")


@pytest.fixture(scope="session")
def kernel_device() -> torch.device:
    """A device on which Triton-language kernels execute; skips where there is none."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("the triton package is not installed (CPU build of torch)")
    if torch.cuda.is_available():
        return torch.device("cuda")
    if os.environ.get("TRITON_INTERPRET") == "1":
        return torch.device("cpu")
    pytest.skip("no CUDA device; TRITON_INTERPRET=1 runs the kernels on the CPU")


@pytest.fixture(scope="session")
def cuda_device() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return torch.device("cuda")
