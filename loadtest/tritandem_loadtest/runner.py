"""Starts the load-generating processes of a run, waits for them and reads their stamps.

Runs in the caller's process without gevent: each generator is its own Python process. Knows nothing about protocols.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from .config import LoadTestError, RunConfig
from .metrics import summarise
from .report import Report
from .stamps import ProcessRecord, RequestRecord, read_lines

Progress = Callable[[float, dict[str, int]], None]  # (seconds since the start, counts over all processes)
_START_DELAY_NS = 300_000_000


def run(config: RunConfig, progress: Progress | None = None) -> Report:
    """Run a load test and block until it has ended. Files go to `config.out_dir` when it is set.

    Raises LoadTestError when a generator cannot start or breaks. An invalid run is reported, not raised.
    """
    with tempfile.TemporaryDirectory(prefix="tritandem-loadtest-") as scratch:
        directory = Path(config.out_dir or scratch)
        directory.mkdir(parents=True, exist_ok=True)
        files = [directory / f"stamps-{shard}.jsonl" for shard in range(config.processes)]
        public = replace(config, headers={})
        if config.out_dir:  # first: what a run that is interrupted has measured can be reported, too
            (directory / "config.json").write_text(public.to_json(), encoding="utf-8")
        _run_processes(config, files, progress or (lambda at_s, counts: None))
        report = read_report(public, files)
        if config.out_dir:
            report.write(directory)
    return report


def read_report(config: RunConfig, files: list[Path]) -> Report:
    """The report of a run from its stamp files. Raises LoadTestError when a process left none, or an unfinished one."""
    lines = [record for path in files for record in read_lines(path)]
    requests = sorted((r for r in lines if isinstance(r, RequestRecord)), key=lambda r: r.intended_ns)
    processes = [r for r in lines if isinstance(r, ProcessRecord)]
    if not files or len(processes) < len(files):
        raise LoadTestError("a load generator ended without writing its record")
    return Report(config, summarise(config, requests, processes), requests, processes)


def _run_processes(config: RunConfig, files: list[Path], progress: Progress) -> None:
    generators: list[subprocess.Popen[str]] = []
    try:
        for shard, path in enumerate(files):
            command = [sys.executable, "-m", "tritandem_loadtest.locust_run.drive"]
            generators.append(
                subprocess.Popen(
                    [*command, str(shard), str(len(files)), str(path)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            _tell(generators[-1], config.to_json())
        for generator in generators:
            _expect_ready(generator)
        start_ns = time.monotonic_ns() + _START_DELAY_NS
        for generator in generators:
            _tell(generator, str(start_ns))
        _follow(generators, start_ns, progress)
    finally:
        for generator in generators:
            if generator.poll() is None:
                generator.terminate()
            generator.wait(timeout=10)
            for pipe in (generator.stdin, generator.stdout):
                if pipe is not None:
                    pipe.close()


def _tell(generator: subprocess.Popen[str], line: str) -> None:
    assert generator.stdin is not None
    generator.stdin.write(line + "\n")
    generator.stdin.flush()


def _hear(generator: subprocess.Popen[str]) -> dict[str, Any] | None:
    """The next thing the generator says; None when it has nothing more to say."""
    assert generator.stdout is not None
    line = generator.stdout.readline()
    return json.loads(line) if line else None


def _expect_ready(generator: subprocess.Popen[str]) -> None:
    said = _hear(generator)
    if said is None:
        raise LoadTestError(f"the load generator ended with code {generator.wait()} before it was ready")
    if "error" in said:
        raise LoadTestError(str(said["error"]))


def _follow(generators: list[subprocess.Popen[str]], start_ns: int, progress: Progress) -> None:
    """Each generator speaks once a second until it ends: reading them in turn keeps every pipe empty."""
    counts: list[dict[str, int]] = [{} for _ in generators]
    speaking, shown = set(range(len(generators))), None
    while speaking:
        for i in sorted(speaking):
            said = _hear(generators[i])
            if said is None:
                speaking.discard(i)
            elif "error" in said:
                raise LoadTestError(str(said["error"]))
            else:
                counts[i] = said
        if any(counts):
            total = {key: sum(c.get(key, 0) for c in counts) for key in ("sent", "done", "failed", "tokens")}
            at_s = max(0.0, (time.monotonic_ns() - start_ns) / 1e9)
            if (round(at_s), total) != shown:  # the last word often says the same again
                shown = round(at_s), total
                progress(at_s, total)
    for generator in generators:
        if generator.wait() not in (0, 3):
            raise LoadTestError(f"a load generator broke (exit code {generator.returncode})")
