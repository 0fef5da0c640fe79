"""The words of a step arrive whole, whichever way they take, and the benchmark says how long that took."""

from __future__ import annotations

import json

import pytest
from tritandem_bench.handoff import KINDS, WAYS, main, step_words


def test_a_steady_step_carries_nothing_and_prefill_the_most() -> None:
    sizes = [sum(map(len, step_words(kind, 64))) for kind in KINDS]
    assert sizes[0] == 0
    assert 0 < sizes[1] < sizes[2]


def test_every_way_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--rows", "2", "--steps", "5", "--gap-us", "10"])
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["step"] for row in document["found"]] == list(KINDS)
    assert all(row[way]["p99_us"] >= row[way]["p50_us"] > 0 for row in document["found"] for way in WAYS)
