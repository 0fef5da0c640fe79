"""The tool that asks a Prometheus for the dashboard's panels: what it shows, and when it fails."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import parse_qs, urlsplit

import pytest

from tests.debian_program import debian_program
from tests.docker.deployment_files import DOCKER, dashboard_queries
from tests.fakes.ports import free_ports

EMPTY, BROKEN = "tritandem_preemptions_total", "tritandem_staging_bytes_total"


class Api(BaseHTTPRequestHandler):
    """Prometheus's range queries: two points for every query but for those that name EMPTY or BROKEN."""

    broken = False

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        assert url.path == "/api/v1/query_range"
        fields = {name: values[0] for name, values in parse_qs(url.query).items()}
        assert "$" not in fields["query"], "a variable of Grafana's is left"
        assert float(fields["start"]) < float(fields["end"])
        if BROKEN in fields["query"] and self.broken:
            self.reply(400, {"status": "error", "error": "parse error: unexpected x"})
            return
        end = float(fields["end"])
        labels = {"outcome": "COMPLETED", "engine": "engine", "component": "scheduler"}
        result = [
            {"metric": labels, "values": [[end - 60, "1.5"], [end, "NaN" if "0.99" in fields["query"] else "2.5"]]}
        ]
        self.reply(200, {"status": "success", "data": {"result": [] if EMPTY in fields["query"] else result}})

    def reply(self, status: int, document: object) -> None:
        body = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(Api, "broken", False)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Api)
    thread = Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join()


def check(prometheus: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(DOCKER / "grafana" / "check_panels.py"), "--prometheus", prometheus, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_every_panel_is_listed_with_its_newest_values(api: str) -> None:
    done = check(api)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == len({title for title, _ in dashboard_queries()})
    [requests] = [line for line in lines if "Requests by outcome" in line]
    assert requests.split() == ["Requests", "Requests", "by", "outcome", "1", "series", "COMPLETED", "2.5"]
    [latency] = [line for line in lines if "Time to first token" in line]
    assert latency.endswith("p50 2.5, p99 1.5")  # the newest one that is a number


def test_an_empty_panel_fails_only_when_all_must_show(api: str) -> None:
    assert check(api).returncode == 0
    done = check(api, "--all")
    assert done.returncode == 1
    assert [line.split()[1] for line in done.stdout.splitlines() if "no data" in line] == ["Preemptions"]


def test_a_query_that_fails_is_told_in_prometheus_words(api: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Api, "broken", True)
    done = check(api)
    assert done.returncode == 1
    [line] = [line for line in done.stdout.splitlines() if "ERROR" in line]
    assert line.split()[1] == "Staging"
    assert "parse error" in line


def test_nobody_there_is_an_error_of_every_panel() -> None:
    [port] = free_ports(1)
    done = check(f"http://127.0.0.1:{port}")
    assert done.returncode == 1
    assert all("ERROR" in line for line in done.stdout.splitlines())


def test_a_real_prometheus_understands_every_panel(tmp_path: Path) -> None:
    program = debian_program("prometheus")
    (tmp_path / "prometheus.yaml").write_text("scrape_configs: []\n")
    [port] = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    words = [f"--web.listen-address=127.0.0.1:{port}", "--config.file=prometheus.yaml", "--storage.tsdb.path=data"]
    with subprocess.Popen([program, *words], cwd=tmp_path, stderr=subprocess.DEVNULL) as process:
        try:
            wait_ready(f"{url}/-/ready")
            done = check(url)
        finally:
            process.terminate()
    assert done.returncode == 0, done.stdout
    assert all("no data" in line for line in done.stdout.splitlines())


def wait_ready(url: str, timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            assert time.monotonic() < deadline, f"{url} is not ready"
            time.sleep(0.1)
