"""Inside Locust: its page and files show token-level figures, and workers' figures add up to one process's."""

from __future__ import annotations

import csv
import json
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

from tritandem_loadtest.config import ARRIVALS
from tritandem_loadtest.locust_run.live import Histogram, LiveFigures
from tritandem_loadtest.metrics import percentile
from tritandem_loadtest.stamps import RequestRecord

Engine = dict[str, str]
LOCUSTFILE = Path(__file__).resolve().parents[2] / "loadtest" / "locustfile.py"
MS = 1_000_000


def record(index: int) -> RequestRecord:
    arrived = [(20 + index % 7) * MS + i * (5 + index % 3) * MS for i in range(4)]
    return RequestRecord(index, 0, 0, arrived[-1], arrived, [1, 2, 1, 1])


def test_histogram_percentiles_are_within_one_per_cent() -> None:
    values = [0.37 * 1.013**i for i in range(800)]
    histogram = Histogram()
    for value in values:
        histogram.add(value)
    for p in (1, 50, 90, 99, 100):
        exact = percentile(values, p)
        assert exact * 0.999 <= histogram.percentile(p) <= exact * 1.011


def test_workers_that_report_twice_add_up_to_one_process_that_saw_all() -> None:
    alone, master, workers = LiveFigures(), LiveFigures(), [LiveFigures(), LiveFigures()]
    for index in range(600):
        alone.take(record(index))
        workers[index % 2].take(record(index))
        if index % 20 == 19:  # a second with 20 records
            for figures in (alone, *workers):
                figures.close_second()
        if index in (50, 211, 400, 599):  # in the middle of a second, and at the end of one
            for worker in workers:
                master.merge(json.loads(json.dumps(worker.drain())))  # bucket numbers travel as text
    assert len(alone.rows) == 30
    assert {row["completed"] for row in master.rows} == {20}
    assert master.table() == alone.table()
    assert (master.outcomes, master.output_tokens, master.rows) == (alone.outcomes, alone.output_tokens, alone.rows)
    assert master.output_tokens == 600 * 5


def test_a_reset_in_the_middle_of_a_test_begins_the_charts_anew() -> None:
    master, worker = LiveFigures(), LiveFigures()
    for _ in range(100):
        worker.close_second()
        master.merge(worker.drain())
    master.clear()
    worker.take(record(0))
    worker.close_second()
    master.merge(worker.drain())
    assert [row["completed"] for row in master.rows] == [1]


def fetch(url: str) -> str:
    with urllib.request.urlopen(url, timeout=5) as answer:
        return str(answer.read().decode())


def wait_for(url: str, wanted: str, patience_s: float = 30.0) -> str:
    give_up_at = time.monotonic() + patience_s
    while time.monotonic() < give_up_at:
        try:
            text = fetch(url)
        except urllib.error.URLError:
            text = ""
        if wanted in text:
            return text
        time.sleep(0.1)
    raise AssertionError(f"{url} did not say {wanted!r}")


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def test_the_form_of_the_page_starts_a_test_and_names_what_is_wrong_in_it(engine: Engine) -> None:
    page = f"http://127.0.0.1:{(port := free_port())}"
    command = [sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), "--web-port", str(port), "--only-summary"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def start(**fields: object) -> None:
        form = {"host": engine["raw_grpc"], "user_count": 20, "spawn_rate": 20, "run_time": "30s", **fields}
        urllib.request.urlopen(page + "/swarm", urllib.parse.urlencode(form).encode(), timeout=5).close()

    try:
        shown = wait_for(page + "/", '"extra_options": ').partition('"extra_options": ')[2]
        fields, _ = json.JSONDecoder().raw_decode(shown)
        assert fields["arrival"]["choices"] == list(ARRIVALS)
        assert {"rps", "workload", "prompt_words", "prompt_pool", "slo", "ignore_eos"} <= set(fields)
        start(output_tokens="many")
        wait_for(page + "/exceptions", "length: given 'many', allowed: N")
        start(output_tokens="3", rps="20")
        seen = json.loads(wait_for(page + "/tokens/data", "COMPLETED"))
        completed, tokens = re.fullmatch(r"COMPLETED (\d+); (\d+) output tokens", seen["facts"]).groups()
        assert int(tokens) == 3 * int(completed)
    finally:
        process.terminate()
        process.wait(30)


def test_a_locust_run_has_token_rows_on_its_page_in_its_files_and_in_its_exit_code(
    engine: Engine, tmp_path: Path
) -> None:
    port = free_port()
    flags = ["-f", str(LOCUSTFILE), "--host", engine["raw_grpc"], "--rps", "20", "--output-tokens", "4"]
    flags += ["--autostart", "--autoquit", "5", "--run-time", "10s", "--web-port", str(port), "--only-summary"]
    flags += ["--html", str(tmp_path / "run.html")]
    flags += ["--csv", str(tmp_path / "run"), "--stamps-dir", str(tmp_path / "stamps"), "--slo", "ttft=1ms"]
    command = [sys.executable, "-m", "locust", *flags]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        page = f"http://127.0.0.1:{port}"
        assert 'id: "token-charts"' in wait_for(page + "/", "token-charts")
        seen: dict[str, Any] = json.loads(wait_for(page + "/tokens/data", "longest pause of a stream"))
        shown_metrics = {row[0] for row in seen["tables"][0]["rows"]}
        assert shown_metrics >= {"time to first token (ms)", "inter-token latency (ms)"}
        shown = json.loads(wait_for(page + "/stats/requests", "extended_stats"))
        assert [table["key"] for table in shown["extended_stats"]] == ["token-latency"]
        first, *seconds = csv.DictReader(wait_for(page + "/tokens/csv", "\n0,").splitlines())
        assert first["second"] == "0"
        assert float(first["ttft_p99"] or seconds[0]["ttft_p99"]) > 0
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait(10)
        process.stderr.close()
    assert process.returncode == 1, said
    assert "SLO missed: ttft" in said
    report = (tmp_path / "run.html").read_text()
    figures = json.loads(report.rpartition("getElementById('token-figures'), ")[2].partition(")</script>")[0])
    assert re.match(r"COMPLETED [1-9]", figures["facts"])
    assert all(len(ys) == len(chart["xs"]) > 0 for chart in figures["charts"] for _, _, ys in chart["lines"])
    with (tmp_path / "run_stats.csv").open() as lines:
        counts = {row["Name"]: int(row["Request Count"]) for row in csv.DictReader(lines)}
    assert counts["Aggregated"] == counts["end to end"] == counts["time to first token"]
    assert counts["inter-chunk latency"] == 3 * counts["end to end"]
    *requests, process_line = (tmp_path / "stamps" / "stamps-0.jsonl").read_text().splitlines()
    lived = json.loads(process_line)
    assert lived["kind"] == "process"
    # Locust's run time includes its own start-up, and its end cuts off what is under way; never more than asked.
    asked = 20 * (lived["end_ns"] - lived["start_ns"]) / 1e9
    assert 0.7 * asked <= len(requests) <= asked + 1
    assert counts["end to end"] <= len(requests)
