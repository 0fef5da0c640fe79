"""Which processes can import torch: asked of fresh interpreters, because the answer holds for a process's life."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
from importlib.util import find_spec
from pathlib import Path
from tritandem.triton_io.plugs.torchless import keep_torch_out
keep_torch_out(Path(sys.argv[1]))
from transformers.utils import is_torch_available
print(find_spec("torch") is not None, is_torch_available())
"""
IMPORTING = """
import importlib, sys
from tests.fakes import triton_python_backend_utils
sys.modules["triton_python_backend_utils"] = triton_python_backend_utils
importlib.import_module("tritandem.triton_io.plugs." + sys.argv[1])
print(*{"torch", "transformers", "triton"} & set(sys.modules))
"""


def seen_after(model: Path) -> str:
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(model)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "PyTorch" not in done.stderr, "an operator would take it for a fault"
    return done.stdout.strip()


def test_a_folder_is_read_without_torch(tmp_path: Path) -> None:
    assert seen_after(tmp_path) == "False False"


def test_a_gguf_file_is_read_with_torch(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.touch()
    assert seen_after(file) == "True True"


@pytest.mark.parametrize("plug", ["engine", "engine_calls", "scheduler_start", "tokenizer"])
def test_importing_a_plug_brings_neither_torch_nor_transformers(plug: str) -> None:
    done = subprocess.run([sys.executable, "-c", IMPORTING, plug], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.split()) == (0, []), done.stderr
