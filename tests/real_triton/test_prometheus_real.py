"""A real Prometheus, set up as in compose, beside a server under load: what it scrapes fills the dashboard."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tritandem.server import TritonServer

from tests.debian_program import debian_program
from tests.real_triton.raw_client import RawClient, number, text
from tests.real_triton.started import free_ports

pytestmark = pytest.mark.triton

DOCKER = Path(__file__).resolve().parents[2] / "docker"


@contextmanager
def prometheus(server: TritonServer, folder: Path) -> Iterator[str]:
    """Its URL. As compose runs it, but for the target and the pace."""
    program = debian_program("prometheus")
    for source in (DOCKER / "prometheus").glob("*.yaml"):
        words = source.read_text().replace("server:8002", server.options.url(server.options.metrics_port))
        (folder / source.name).write_text(words.replace("_interval: 5s", "_interval: 1s"))
    [port] = free_ports(1)
    flags = [f"--web.listen-address=127.0.0.1:{port}", "--config.file=prometheus.yaml", "--storage.tsdb.path=data"]
    with (folder / "log").open("wb") as log, subprocess.Popen([program, *flags], cwd=folder, stderr=log) as process:
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


@contextmanager
def load(server: TritonServer) -> Iterator[None]:
    """One answer after the other, streamed, each of a few tokens; one in eight has a structure of its own."""
    stop = threading.Event()
    client = RawClient(server.grpc_url)
    wanted = {"max_tokens": number(8, np.int32), "stream": number(True, np.bool_)}

    def ask() -> None:
        for turn in itertools.count():
            if stop.is_set():
                return
            asked = {"text_input": text(f"{turn}. The capital of France is"), **wanted}
            if turn % 8 == 0:
                schema = json.dumps({"type": "object", "properties": {f"of_{turn}": {"type": "string"}}})
                asked |= {"guided_decoding_guide_type": text("json_schema"), "guided_decoding_guide": text(schema)}
            client.answer("ensemble", asked)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def answer(url: str) -> Any:
    """What Prometheus's API says, None while it does not."""
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return json.load(response)["data"]
    except (urllib.error.URLError, OSError):
        return None


def test_every_panel_that_can_shows_the_server_and_every_rule_is_evaluated(
    server: TritonServer, tmp_path: Path
) -> None:
    with prometheus(server, tmp_path) as url, load(server):
        words = [
            sys.executable,
            str(DOCKER / "grafana/check_panels.py"),
            "--prometheus",
            url,
            "--minutes",
            "2",
            "--all",
        ]
        end_s = time.monotonic() + 240
        while (shown := subprocess.run(words, capture_output=True, text=True, timeout=60)).returncode:
            assert time.monotonic() < end_s, shown.stdout + (tmp_path / "log").read_text()
            time.sleep(1)
        groups = answer(f"{url}/api/v1/rules")["groups"]
        rules = [rule for group in groups for rule in group["rules"]]
        assert [rule["name"] for rule in rules if rule["health"] != "ok"] == []
        assert sum(rule["type"] == "alerting" for rule in rules) >= 12
        targets = answer(f"{url}/api/v1/targets")["activeTargets"]
        [target] = (target for target in targets if target["labels"]["job"] == "tritandem")
        assert (target["health"], target["lastError"]) == ("up", "")
