"""The command `doctor`: where it looks, what it refuses, its exit codes, and a machine without a server."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from tritandem.cli.doctor import command
from tritandem.cli.doctor import sample as doctor_sample
from tritandem.cli.doctor.machine import MachineSample, judge_machine, read
from tritandem.cli.doctor.sample import metrics_url
from tritandem.cli.doctor.verdict import Severity
from tritandem.cli.main import main
from tritandem.contracts.errors import ConfigError

from tests.fakes.ports import free_ports


@contextmanager
def serving(*answers: str) -> Iterator[str]:
    """host:port of a server that gives one answer after the other on /metrics, and the last one ever after."""
    left = list(answers)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            known = self.path == "/metrics"
            self.send_response(200 if known else 404)
            self.end_headers()
            self.wfile.write(left[0].encode() if known else b"")
            if known and len(left) > 1:
                del left[0]

        def log_message(self, *words: object) -> None:
            del words

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def metrics(steps: int, waiting: int) -> str:
    return (
        f'tritandem_engine_steps_total{{engine="engine"}} {steps}\n'
        f"tritandem_requests_waiting {waiting}\n"
        f"tritandem_requests_running 4\n"
    )


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("box:8002", "http://box:8002/metrics"),
        ("http://box:8002/", "http://box:8002/metrics"),
        ("https://box/tritandem/metrics", "https://box/tritandem/metrics"),
    ],
)
def test_a_url_may_be_short(given: str, url: str) -> None:
    assert metrics_url(given) == url


def test_another_scheme_is_refused() -> None:
    with pytest.raises(ConfigError, match="--url: given 'file:///etc/passwd', allowed: "):
        metrics_url("file:///etc/passwd")


def test_the_exit_code_is_the_severity(capsys: pytest.CaptureFixture[str]) -> None:
    # One look at an empty queue says little.
    with serving(metrics(100, 0), metrics(200, 5)) as address:
        assert main(["doctor", "--url", address, "--seconds", "1"]) == 3
    assert capsys.readouterr().out.startswith("engine-bound: 5 requests wait for the engine on this CPU")
    with serving(metrics(100, 0), metrics(200, 0)) as address:
        assert main(["doctor", "--url", address, "--seconds", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["verdict"], found["exit_code"], found["source"]) == ("unhindered", 0, f"http://{address}/metrics")
    assert found["signals"]["steps_per_s"] == pytest.approx(100, rel=0.5)


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [("nv_cpu_utilization 0.5\n", "without any tritandem_"), ("<html>hello</html>\n", "no metrics")],
)
def test_what_is_no_server_of_ours_is_refused(answer: str, complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(answer) as address:
        assert main(["doctor", "--url", address]) == 2
    assert complaint in capsys.readouterr().err


def test_a_named_server_that_does_not_answer_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    [port] = free_ports(1)
    assert main(["doctor", "--url", f"127.0.0.1:{port}"]) == 2
    assert f"http://127.0.0.1:{port}/metrics: no metrics" in capsys.readouterr().err


@contextmanager
def answering(first: bytes, then: bytes = b"", every_s: float = 0.05) -> Iterator[str]:
    """host:port of something that says `first` to the first connection, and `then` again and again."""
    done = threading.Event()

    def speak() -> None:
        connection, _ = listening.accept()
        with connection, suppress(OSError):
            connection.recv(4096)
            connection.sendall(first)
            while then and not done.wait(every_s):
                connection.sendall(then)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=speak)
        thread.start()
        try:
            yield f"127.0.0.1:{listening.getsockname()[1]}"
        finally:
            done.set()
            thread.join()


HEAD = b"HTTP/1.1 200 OK\r\n\r\n"


@pytest.mark.parametrize(
    ("first", "then", "words"),
    [
        (b"", b"", "it hung up"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", b"", "it does not speak HTTP"),
        (b"\x00\x00\x18\x04\x00" * 9, b"", "it does not speak HTTP"),  # HTTP/2, as a gRPC port does
        (HEAD + b"\xff\xfe", b"", "the answer is not text"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\nnv_x 1\n", b"", "without any tritandem_*"),
        (HEAD, b"# a comment\n", "the answer is too large or too slow"),
        (b"HTTP/1.1 404 Not Found\r\n\r\n", b"", "Not Found"),
    ],
)
def test_whatever_is_no_metrics_port_is_refused_in_one_line(
    first: bytes, then: bytes, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor_sample, "WHOLE_TIMEOUT_S", 0.3)
    with answering(first, then) as address:
        assert main(["doctor", "--url", address]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"tritandem: http://{address}/metrics: ")
    assert words in line


def test_a_port_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor_sample, "TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        assert main(["doctor", "--url", f"127.0.0.1:{listening.getsockname()[1]}"]) == 2
    assert "no metrics (timed out)" in capsys.readouterr().err


@pytest.mark.parametrize("url", ["box:port", "http://", "http://[::1", "box:8002 x", ""])
def test_a_url_that_is_none_is_refused_in_one_line(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--url", url, "--seconds", "1"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("tritandem: ")


def test_a_server_that_published_nothing_in_that_time_gets_no_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    stale = 'tritandem_telemetry_cpu_seconds_total{component="engine",process="engine"} 0.5\n'
    with serving(stale, stale) as address:
        assert main(["doctor", "--url", address, "--seconds", "1"]) == 2
    assert "--seconds: given 1, allowed: more than" in capsys.readouterr().err


@pytest.mark.parametrize("seconds", ["0", "1e9", "nan", "soon"])
def test_a_wrong_length_is_wrong_usage(seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["doctor", "--seconds", seconds])
    assert "allowed: a number from 1 to 3600" in capsys.readouterr().err


def test_without_a_server_the_machine_is_looked_at(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    [port] = free_ports(1)
    monkeypatch.setattr(command, "LOCAL_URL", f"127.0.0.1:{port}")
    code = main(["doctor", "--seconds", "1", "--json"])
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert "looking at this machine instead" in err
    assert (found["source"], found["exit_code"]) == ("this machine", code)
    assert 0 <= found["signals"]["busy_share"] <= 1


def sample(
    at_s: float, idle_s: float, pressure_s: float | None = 0.0, throttled_s: float | None = 0.0
) -> MachineSample:
    return MachineSample(at_s, 4, idle_s, pressure_s, throttled_s)


@pytest.mark.parametrize(
    ("after", "verdict", "severity"),
    [
        (sample(10, 39.5), "idle", Severity.OK),
        (sample(10, 41.0), "idle", Severity.OK),  # ticks are coarse
        (sample(10, 20), "unhindered", Severity.OK),
        (sample(10, 9), "short of cores", Severity.WARNING),  # nine tenths of a core are free
        (sample(10, 4), "short of cores", Severity.WARNING),
        (sample(10, 30, pressure_s=5), "short of cores", Severity.WARNING),
        (sample(10, 30, throttled_s=2), "short of cores", Severity.CRITICAL),
        (sample(10, 4, pressure_s=None, throttled_s=None), "short of cores", Severity.WARNING),
    ],
)
def test_the_verdict_on_a_machine(after: MachineSample, verdict: str, severity: Severity) -> None:
    found = judge_machine(sample(0, 0), after).finding
    assert (found.verdict.value, found.severity) == (verdict, severity)
    assert bool(found.change) == (severity is not Severity.OK)


def test_this_machine_can_be_read() -> None:
    before, after = read(), read()
    assert after.idle_s >= before.idle_s > 0
    assert after.cores >= 1
