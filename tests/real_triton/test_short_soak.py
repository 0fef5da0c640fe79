"""The soak program itself, for a quarter of a minute: every request accounted for, nothing hung, told twice or left."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.real_triton.started import demo_model, free_ports

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.triton


def test_every_request_of_a_short_soak_ends_once_and_alike_for_client_log_and_metrics() -> None:
    model = demo_model()
    if not (model / "config.json").is_file():
        pytest.skip(f"no demo model in {model}")
    words = ["--tiny", "--model", str(model), "--ports", ",".join(str(port) for port in free_ports(3))]
    words += ["--seconds", "12", "--measure-seconds", "3", "--settle-seconds", "0", "--faults", ""]
    words += ["--kill-client-every", "3", "--hostile-every", "1", "--queue", "16"]  # a short queue is soon empty
    command = [sys.executable, "-m", "tests.soak", *words]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=ROOT)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    told = json.loads(ended.stdout.splitlines()[-1])
    wrong = {word: told[word] for word in ("hung", "duplicated", "disagreeing", "lost", "wrong", "harmed")}
    assert not any(wrong.values()), wrong
    assert told["compared"] > 0
    assert told["hostile"]["REFUSED"] > 0
    assert sum(told["outcomes"].values()) == told["sent"] > 40
    assert told["outcomes"]["COMPLETED"] > 0
    assert told["faults"]["kill a client"] > 0
