"""The benchmark over cores: a running server moves with all its threads, and each load is drawn."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from tritandem_bench.core_sweep import draw
from tritandem_bench.pinned_server import PinnedServer

SERVER = """
import http.server, subprocess, sys, threading
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
for _ in range(3):
    threading.Thread(target=threading.Event().wait, args=(60,), daemon=True).start()
print(server.server_address[1], flush=True)
server.serve_forever()
"""


def affinities(pid: int) -> set[frozenset[int]]:
    tasks = [int(task.name) for task in Path(f"/proc/{pid}/task").iterdir()]
    return {frozenset(os.sched_getaffinity(task)) for task in tasks}


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_a_running_server_moves_with_all_its_threads_and_children(tmp_path: Path) -> None:
    first, second = sorted(os.sched_getaffinity(0))[:2]
    log, script = tmp_path / "log", tmp_path / "server.py"
    script.write_text(SERVER)

    class Started(PinnedServer):
        def _wait_ready(self) -> None:  # the port is known once the server has said it
            while not log.read_text().strip():
                assert self._process.poll() is None
            self._ready_url = f"http://127.0.0.1:{log.read_text().split()[0]}/"
            super()._wait_ready()

    with Started(f"{sys.executable} {script}", [first], "", log, 30.0) as server:
        processes = server.tree()
        assert len(processes) == 2
        assert {cores for process in processes for cores in affinities(process.pid)} == {frozenset([first])}
        server.move_to([second])
        assert len(list(Path(f"/proc/{processes[0].pid}/task").iterdir())) >= 4
        assert {cores for process in processes for cores in affinities(process.pid)} == {frozenset([second])}
        server.move_to([first, second])
        assert {cores for process in processes for cores in affinities(process.pid)} == {frozenset([first, second])}
    for process in processes[1:]:  # the child of a server that was told to stop is the server's own to end
        if process.is_running():
            process.kill()
    psutil.wait_procs(processes, timeout=10)


def test_a_page_has_a_chart_for_each_load_and_figure(tmp_path: Path) -> None:
    def row(server: str, cores: int, failed: int) -> dict[str, Any]:
        figures = {"output_tokens_per_s": 100.0 * cores, "ttft_ms_p50": 5000.0 / cores**4, "ttft_ms_p99": 9000.0}
        measured = {"gpu_percent": None, "cpu_cores_waited": 0.5, "failed": failed, "valid": True}
        return {"server": server, "cores": cores, **figures, **measured}

    rows = [row("ours", 1, 0), row("ours", 4, 0), row("theirs", 4, 2)]
    page = draw([{"load": "slow", "rows": rows}, {"load": "fast", "rows": rows}], tmp_path / "x.html").read_text()
    shown = json.loads(page.partition("getElementById('token-figures'), ")[2].partition(")</script>")[0])
    charts = {chart["title"]: chart for chart in shown["charts"]}
    assert len(charts) == 2 * 5
    tokens = charts["slow: output tokens/s"]
    assert tokens["xs"] == [1, 4]
    assert [line[2:] for line in tokens["lines"]] == [[[100, 400], [False, False]], [[None, 400], [False, True]]]
    assert not tokens["log"]
    assert charts["fast: time to first token p50, ms"]["log"]
