"""The command line and the API around it: exit codes, the JSON line last, files, and no gevent in the caller."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tritandem_loadtest import LoadTestError, RunConfig, run
from tritandem_loadtest.cli import EXIT_INTERRUPTED, EXIT_INVALID, EXIT_OK, EXIT_SLO_MISSED, EXIT_USAGE, main

from tests.fakes.triton_grpc import FakeTritonGrpc
from tests.fakes.triton_protocol import Outputs, Received

Engine = dict[str, str]
# What is late on a busy host is not the subject here: exit code 3 must not hide the others.
PATIENT = ["--late-after-ms", "10000", "--quiet"]
SHORT = ["--rps", "20", "--duration", "0.5", "--output-tokens", "3", *PATIENT]


def test_a_missed_slo_is_exit_code_1_and_the_report_is_on_disk(
    engine: Engine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    arguments = ["--url", engine["raw_grpc"], *SHORT, "--slo", "ttft=1ms,itl=10s", "--out", str(out)]
    assert main(arguments) == EXIT_SLO_MISSED
    *_, last = capsys.readouterr().out.splitlines()
    summary = json.loads(last)
    assert summary["slo"]["ttft"]["met"] is False
    assert summary["slo"]["itl"]["met"] is True
    assert summary["completed"] == 10
    page = (out / "report.html").read_text()
    assert "SLO missed: time to first token" in page
    assert re.findall(r"(?:src|href)=|http://", page) == []  # self-contained
    shown = json.loads(page.partition("getElementById('token-figures'), ")[2].partition(")</script>")[0])
    assert shown["title"] == f"Load test of {engine['raw_grpc']}"
    [latency] = shown["tables"]
    assert latency["rows"][0][:2] == ["time to first token", "10"]
    charts = {chart["title"].partition(" by when")[0]: chart for chart in shown["charts"]}
    assert charts["Time to first token"]["limit"] == 1.0
    [[_, _, due], _, [_, _, completed]] = charts["Requests per second"]["lines"]
    assert sum(due) == sum(completed) == 10
    assert {"Output tokens per second", "Requests in flight"} <= set(charts)
    assert sum(title.endswith("per cent of samples at or below") for title in charts) == 4
    # The same report again from the raw stamps alone.
    assert main(["report", str(out)]) == EXIT_SLO_MISSED
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == summary


@pytest.mark.parametrize("words", [["--url"], ["sweep", "--rps", "1,2", "--slo", "ttft=1s", "--url"]])
def test_where_nobody_listens_no_run_begins(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words, "127.0.0.1:1"]) == EXIT_USAGE
    out, err = capsys.readouterr()
    assert out == ""
    assert "nothing answers at 127.0.0.1:1" in err
    assert "Connection refused" in err


def test_a_server_that_is_gone_fails_every_request() -> None:
    report = run(RunConfig(url="127.0.0.1:1", rps=20, duration_s=0.5, late_after_ms=10_000))
    assert report.summary["failures"] == {"UNREACHABLE": 10}
    assert "Connection refused" in report.table()


def test_a_closed_loop_does_not_hammer_where_nobody_answers() -> None:
    report = run(RunConfig(url="127.0.0.1:1", arrival="closed", users=2, duration_s=1))
    assert 2 <= report.summary["failures"]["UNREACHABLE"] <= 2 * (1 / 0.1 + 1)


def test_progress_starts_at_nought_and_says_nothing_twice(engine: Engine) -> None:
    shown: list[tuple[int, dict[str, int]]] = []
    run(RunConfig(url=engine["raw_grpc"], rps=20, duration_s=0.5), lambda at_s, total: shown.append((at_s, total)))
    assert all(at_s >= 0 for at_s, _ in shown)
    assert len({str((round(at_s), total)) for at_s, total in shown}) == len(shown)
    assert shown[-1][1]["done"] == 10


def started(url: str, *flags: str) -> subprocess.Popen[str]:
    """A minute's run in a process group of its own, which has sent something."""
    # A shell that runs the tests in the background has them ignore SIGINT, and so would what they start.
    heed = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    call = f"{heed}; import sys; from tritandem_loadtest.cli import main; sys.exit(main(sys.argv[1:]))"
    words = ["--url", url, "--rps", "20", "--duration", "60", "--output-tokens", "3", *flags]
    running = subprocess.Popen(
        [sys.executable, "-c", call, *words], stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert running.stderr is not None
    while "sent 1" not in (line := running.stderr.readline()):
        assert line, "the run ended by itself"
    return running


def test_ctrl_c_ends_a_run_without_a_traceback_and_keeps_what_was_measured(engine: Engine, tmp_path: Path) -> None:
    out = tmp_path / "out"
    running = started(engine["raw_grpc"], "--out", str(out))
    os.killpg(running.pid, signal.SIGINT)  # as a terminal does: generators get it as well
    _, rest = running.communicate(timeout=30)
    assert running.returncode == EXIT_INTERRUPTED
    assert rest.splitlines()[-1] == f"loadtest: interrupted; what was measured: tritandem-loadtest report {out}"
    assert "Traceback" not in rest
    assert main(["report", str(out)]) in (EXIT_OK, EXIT_INVALID)
    assert (out / "report.html").is_file()


def test_generators_whose_parent_is_killed_end_quietly(engine: Engine) -> None:
    running = started(engine["raw_grpc"])
    running.kill()
    _, rest = running.communicate(timeout=30)  # to the end: the generator holds the pipe as well
    assert "Traceback" not in rest


def test_a_sweep_stops_after_the_first_rate_that_misses(
    engine: Engine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ["--url", engine["raw_grpc"], "--duration", "0.5", "--output-tokens", "2", *PATIENT]
    common += ["--out", str(tmp_path)]
    assert main(["sweep", *common, "--rps", "10,20,40", "--slo", "ttft=1ms"]) == EXIT_SLO_MISSED
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["best_rps"] is None
    assert [row["rps"] for row in result["rates"]] == [10.0]
    assert result["rates"][0]["pause_ms_p99"] >= 0  # 0 where a busy host reads both responses at once
    page = (tmp_path / "sweep.html").read_text()
    shown = json.loads(page.partition("getElementById('token-figures'), ")[2].partition(")</script>")[0])
    assert [row[0] for row in shown["tables"][0]["rows"]] == ["10"]
    assert [(chart["xs"], chart["hollow"]) for chart in shown["charts"]] == [([10.0], [True])] * 4


@pytest.mark.parametrize("grpc_client", ["h2", "grpcio"])
def test_headers_go_out_with_every_request_and_into_no_file(
    grpc_client: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def model(received: Received) -> Iterator[Outputs]:
        yield {"text_output": ("BYTES", ["a"]), "num_output_tokens": ("UINT32", [1])}

    with FakeTritonGrpc(model) as server:
        words = ["--url", server.url, "--grpc-client", grpc_client, "--header", "Authorization: Bearer s3cret", *SHORT]
        assert main([*words, "--out", str(tmp_path)]) == EXIT_OK
        keys = [request.headers.get("authorization") for request in server.visitors.requests]
    assert keys == ["Bearer s3cret"] * 10
    assert "s3cret" not in "".join(capsys.readouterr())
    assert [path for path in tmp_path.iterdir() if b"s3cret" in path.read_bytes()] == []


def test_a_setting_that_the_dialect_cannot_send_is_an_error_not_a_result(engine: Engine) -> None:
    with pytest.raises(LoadTestError, match="top_q"):
        run(RunConfig(url=engine["raw_grpc"], sampling={"top_q": 1}, duration_s=0.5))


@pytest.mark.parametrize(
    "flags", [["--rps", "-1"], ["--arrival", "trace"], ["--workload", "jsonl"], ["--slo-percentile", "101"]]
)
def test_bad_values_are_named_before_anything_starts(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(flags) == EXIT_USAGE
    assert capsys.readouterr().err.startswith("loadtest: ")


def test_importing_and_configuring_leaves_gevent_alone() -> None:
    code = (
        "import sys, tritandem_loadtest as t; t.RunConfig(); "
        "print([m for m in ('gevent', 'locust', 'grpc', 'tritandem_client') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
