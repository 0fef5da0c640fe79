"""Claims about the soak's judgement: it notices everything that could be wrong with one request, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tritandem_client.results import TokenLogprob

from tests.soak.faults import Fault, read_fault
from tests.soak.ledger import (
    CLOSED,
    ENDED,
    OBEYED,
    REFUSED,
    TIMEOUT,
    UNREACHABLE,
    Ledger,
    audit,
    hostile_faults,
    table,
)
from tests.soak.memory import Memory, growth
from tests.soak.server_words import gauge, outcome_counts, request_lines
from tests.soak.solo import Solo, tokens_before_tie

OUTAGE = [(10.0, 20.0)]


def line(outcome: str, output_tokens: int = 0, request_id: str = "r") -> dict[str, Any]:
    return {"event": "request", "id": request_id, "outcome": outcome, "output_tokens": output_tokens}


CASES = {
    "agreed": ("COMPLETED", 4, 0, 1.0, [line("COMPLETED", 4)], ""),
    "another word": ("COMPLETED", 4, 0, 1.0, [line("FAILED", 4)], "disagreeing"),
    "another number of tokens": ("COMPLETED", 4, 0, 1.0, [line("COMPLETED", 5)], "disagreeing"),
    "fewer tokens than ordered": ("COMPLETED", 4, 5, 1.0, [line("COMPLETED", 4)], "disagreeing"),
    "more tokens than ordered": ("COMPLETED", 6, 5, 1.0, [line("COMPLETED", 6)], "duplicated"),
    "stopped before its order was complete": ("STOPPED", 4, 5, 1.0, [line("STOPPED", 4)], ""),
    "two lines": ("COMPLETED", 4, 0, 1.0, [line("COMPLETED", 4)] * 2, "duplicated"),
    "no line": ("COMPLETED", 4, 0, 1.0, [], "lost"),
    "no line while the server was replaced": ("FAILED", 0, 0, 15.0, [], ""),
    "failed though the server was well": ("FAILED", 0, 0, 1.0, [line("FAILED")], "harmed"),
    "never ended": ("", 0, 0, 1.0, [line("COMPLETED", 4)], "hung"),
    "out of patience": (TIMEOUT, 0, 0, 1.0, [], "hung"),
    "left, and the server says what became of it": (CLOSED, 0, 0, 1.0, [line("CANCELLED")], ""),
    "left before anybody knew": (CLOSED, 0, 0, 1.0, [], ""),
    "unreachable while the server was replaced": (UNREACHABLE, 0, 0, 15.0, [], ""),
    "unreachable though the server was well": (UNREACHABLE, 0, 0, 1.0, [], "lost"),
    "not even readable": (REFUSED, 0, 0, 1.0, [], ""),
    "not readable, but ended by a model": (REFUSED, 0, 0, 1.0, [line("COMPLETED")], "disagreeing"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_wrong_is_called_by_its_name(case: str) -> None:
    outcome, tokens, ordered, ended_s, lines, wrong = CASES[case]
    ledger = Ledger()
    entry = ledger.open("r", "reads", ended_s - 0.5, ordered)
    if outcome:
        ledger.close(entry, outcome, ended_s, tokens)
    found = audit(ledger.entries.values(), lines, OUTAGE)
    counts = {name: getattr(found, name) for name in ("hung", "duplicated", "disagreeing", "lost", "wrong", "harmed")}
    assert {name for name, count in counts.items() if count} == ({wrong} if wrong else set())
    assert found.clean == (not wrong)
    assert sum(found.outcomes.values()) == found.sent == 1


def test_a_second_end_and_a_stranger_are_noticed() -> None:
    ledger = Ledger()
    entry = ledger.open("r", "reads", 0.0)
    ledger.close(entry, "COMPLETED", 1.0)
    ledger.close(entry, "COMPLETED", 1.1)
    found = audit(
        ledger.entries.values(),
        [line("COMPLETED"), line("COMPLETED", request_id="soak-9"), line("FAILED", request_id="hostile-1")],
        [],
    )
    assert (found.duplicated, found.lost) == (1, 1)


def test_a_text_that_differs_from_the_one_alone_is_noticed() -> None:
    ledger = Ledger()
    entry = ledger.open("r", "reads", 0.0)
    entry.wrong = True
    ledger.close(entry, "COMPLETED", 1.0, 4)
    found = audit(ledger.entries.values(), [line("COMPLETED", 4)], [])
    assert (found.wrong, found.clean) == (1, False)


@pytest.mark.parametrize(
    ("given", "agrees"),
    [
        ("Paris, the", True),
        ("Paris, the city", True),
        ("Par", True),
        ("Par\ufffd", True),
        ("Lyon", False),
        ("Paris; ", False),
    ],
)
def test_an_answer_is_its_solo_text_as_far_as_both_go(given: str, agrees: bool) -> None:
    solo = Solo()
    solo.answers["q"] = "Paris, the"
    assert solo.agrees("q", given) is agrees


def test_a_solo_text_is_known_up_to_the_first_choice_that_a_batch_may_turn() -> None:
    clear, close = ((5, -0.1), (6, -3.0)), ((5, -0.7), (6, -0.7004))
    tokens = [TokenLogprob(5, top[0][1], top=top) for top in (clear, clear, close, clear)]
    assert tokens_before_tie(tokens) == 2
    assert tokens_before_tie(tokens[:2]) == 2


@pytest.mark.parametrize(
    ("outcome", "ended_s", "wrong"),
    [
        (REFUSED, 1.0, 0),
        (ENDED, 1.0, 0),
        (OBEYED, 1.0, 1),
        (OBEYED, 15.0, 1),
        (TIMEOUT, 1.0, 1),
        (TIMEOUT, 15.0, 0),
        ("", 0.0, 1),
    ],
)
def test_hostile_requests_must_end_and_must_not_be_obeyed(outcome: str, ended_s: float, wrong: int) -> None:
    ledger = Ledger()
    entry = ledger.open("hostile-1.0", "forged calls", max(0.0, ended_s - 0.5))
    if outcome:
        ledger.close(entry, outcome, ended_s)
    assert len(hostile_faults(ledger.entries.values(), OUTAGE)) == wrong


def test_the_table_has_a_row_a_kind_and_a_column_a_word() -> None:
    ledger = Ledger()
    for number, (kind, outcome) in enumerate(
        [("reads, grpc scheduler", "COMPLETED"), ("reads, http ensemble", ""), ("slow", "FAILED")]
    ):
        entry = ledger.open(f"soak-{number}", kind, 0.0)
        if outcome:
            ledger.close(entry, outcome, 1.0)
    head, reads, slow = (row.split() for row in table(ledger.entries.values()))
    assert head == ["COMPLETED", "FAILED", "TIMEOUT"]
    assert (reads, slow) == (["reads", "1", "1"], ["slow", "1"])


def test_faults_are_read_from_words() -> None:
    assert read_fault(" hang engine") == Fault("hang", "engine")
    with pytest.raises(ValueError, match="given 'burn engine', allowed: kill or hang"):
        read_fault("burn engine")


def test_growth_is_from_the_first_samples_to_the_last() -> None:
    samples = [Memory({"scheduler": 100.0 + i, "engine": 50.0}, 4.0) for i in range(21)]
    grown = growth(samples, 5)
    assert grown.by_process == {"scheduler": 16.0, "engine": 0.0}
    assert (grown.private_mb, grown.shared_mb) == (16.0, 0.0)


def test_lines_are_read_run_by_run_whether_or_not_triton_wraps_them(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(
        'I1129 1 2 a.cc:1] "Started HTTPService at x"\n'
        'I1129 1 2 o.py:6] "{\\"event\\": \\"request\\", \\"id\\": \\"a\\"}"\n'
        "I1129 1 2 a.cc:1] Started HTTPService at x\n"
        'I1129 1 2 o.py:6] {"event": "request", "id": "b"}\n'
        "Signal (15) received.\n"
    )
    assert [[one["id"] for one in run] for run in request_lines(log)] == [[], ["a"], ["b"]]


def test_metrics_are_read_by_outcome_over_all_classes() -> None:
    page = (
        'tritandem_requests_total{outcome="COMPLETED",priority="batch"} 3\n'
        'tritandem_requests_total{outcome="COMPLETED",priority="normal"} 4\n'
        'tritandem_requests_total{outcome="EXPIRED",priority="normal"} 1\ntritandem_requests_running 2\n'
    )
    assert outcome_counts(page) == {"COMPLETED": 7, "EXPIRED": 1}
    assert gauge(page, "tritandem_requests_running") == 2
