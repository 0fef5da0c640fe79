"""Which of the server's processes have torch in them: it costs seconds at a start, and memory for ever."""

from __future__ import annotations

from pathlib import Path

import pytest
from tritandem.server import TritonServer
from tritandem.server.health import stub_models

pytestmark = pytest.mark.triton


def test_torch_is_loaded_by_the_engine_alone(server: TritonServer) -> None:
    loaded = {
        model: "libtorch" in Path(f"/proc/{pid}/maps").read_text() for pid, model in stub_models(server.pid).items()
    }
    assert loaded == {"engine": True, "engine_calls": False, "scheduler": False, "tokenizer": False}
