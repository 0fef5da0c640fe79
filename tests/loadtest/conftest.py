"""Starts timed engines in processes of their own and ends them with the test."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.fakes.timed_engine import Plan

ROOT = Path(__file__).resolve().parents[2]
EngineUrls = dict[str, str]


@pytest.fixture(scope="session")
def start_engine() -> Iterator[Callable[[Plan], EngineUrls]]:
    """`start_engine(plan)["grpc"]` is the address of a new engine that follows the plan."""
    processes: list[subprocess.Popen[str]] = []

    def start(plan: Plan) -> EngineUrls:
        command = [sys.executable, "-m", "tests.fakes.timed_engine", json.dumps(asdict(plan))]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        processes.append(process)
        assert process.stdout is not None
        urls: EngineUrls = json.loads(process.stdout.readline())
        return urls

    yield start
    for process in processes:
        process.terminate()
        process.wait(timeout=10)
        if process.stdout is not None:
            process.stdout.close()


@pytest.fixture(scope="session")
def engine(start_engine: Callable[[Plan], EngineUrls]) -> EngineUrls:
    """An engine with spread-out times, shared by tests that do not disturb it."""
    return start_engine(Plan())
