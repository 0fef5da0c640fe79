"""One model cut over three CPU ranks answers as one that is whole, behind the same server."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tritandem.machine.device import DeviceGroup
from tritandem_client import Client

from tests.real_triton.started import start_server
from tests.real_triton.test_several_engines import served_by

pytestmark = pytest.mark.triton

PROMPTS = ("The capital of France is", "One, two, three,", "def add(a, b):")


def test_whole_and_cut_engines_give_the_same_answers(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("[engine]\nrank_patience_s = 60.0\n")  # whoever else is busy here
    groups = tuple(map(DeviceGroup.parse, ("cpu", "cpu+cpu+cpu")))  # the demo model has nine heads
    with start_server(devices=groups, engine_config=tmp_path / "config.toml") as server:

        def ask(number: int) -> tuple[str, str]:
            prompt = PROMPTS[number % len(PROMPTS)]
            with Client(server.grpc_url, timeout_s=120) as client:
                return prompt, client.generate(prompt, max_tokens=12).text

        with ThreadPoolExecutor(6) as pool:
            answers = set(pool.map(ask, range(18)))
        assert Counter(prompt for prompt, _ in answers) == dict.fromkeys(PROMPTS, 1)
        assert set(served_by(server)) == {"engine", "engine_2"}
