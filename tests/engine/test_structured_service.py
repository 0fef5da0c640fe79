"""Grammars are compiled beside the running steps: nobody waits for another's, and a bad one costs its own request."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator

import pytest
from tritandem.contracts.errors import InvalidRequest
from tritandem.contracts.requests import EngineRequest
from tritandem.contracts.stream import FinishCode, TokenBatch
from tritandem.engine.service import EngineService
from tritandem.engine.structure.preparing import Preparer
from tritandem.engine.structure.tables import Walker
from tritandem.grammar import Grammar, Kind, Matcher, Vocabulary

from tests.engine.engine_rig import VOCAB, make_runner, prompts, request
from tests.engine.spelled import END, text_of, vocabulary

WAIT_S = 20.0


class Gate:
    """Gives the vocabulary once it is opened."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.opened = 0

    def __call__(self, rows: int) -> Vocabulary:
        assert self.open.wait(WAIT_S)
        self.opened += 1
        return vocabulary(rows)


@pytest.fixture
def start() -> Iterator[Callable[[Gate], EngineService]]:
    services: list[EngineService] = []

    def starter(gate: Gate) -> EngineService:
        services.append(EngineService(make_runner(), preparer=Preparer(gate, VOCAB)))
        return services[-1]

    yield starter
    for service in services:
        service.close()


def structured(seq_id: int, text: str) -> EngineRequest:
    one = request(seq_id, prompts(1, seed=seq_id)[0], stop_ids=(END,), max_tokens=20)
    return dataclasses.replace(one, grammar=Grammar(Kind.REGEX, text))


def ends(service: EngineService, count: int) -> dict[int, tuple[FinishCode, str, str]]:
    """How the next `count` sequences end: code, text, error."""
    found: dict[int, tuple[FinishCode, str, str]] = {}
    tokens: dict[int, list[int]] = {}
    while len(found) < count:
        batch = service.next_batch(WAIT_S)
        assert isinstance(batch, TokenBatch), "nothing came"
        start = 0
        for row, (seq_id, number) in enumerate(zip(batch.seq_ids.tolist(), batch.token_counts.tolist(), strict=True)):
            tokens.setdefault(seq_id, []).extend(batch.tokens[start : start + number].tolist())
            start += number
            code = FinishCode(batch.finish[row])
            if code:
                text = text_of(tokens[seq_id]) if code == FinishCode.COMPLETE else ""
                found[seq_id] = (code, text, batch.errors.get(row, ""))
    return found


def test_others_go_on_while_a_grammar_is_compiled(start: Callable[[Gate], EngineService]) -> None:
    gate = Gate()
    service = start(gate)
    plain = request(2, prompts(1)[0], max_tokens=5)
    assert service.submit([structured(1, "yes{5}"), plain]) == [None, None]
    assert ends(service, 1)[2][0] == FinishCode.LENGTH
    assert service.live() == 1
    gate.open.set()
    assert ends(service, 1) == {1: (FinishCode.COMPLETE, "yesssss", "")}


def test_a_grammar_that_does_not_compile_ends_its_request_by_name(start: Callable[[Gate], EngineService]) -> None:
    gate = Gate()
    gate.open.set()
    service = start(gate)
    service.submit([structured(1, "(a"), structured(2, "ab"), structured(3, "(a")])
    found = ends(service, 3)
    assert found[2] == (FinishCode.COMPLETE, "ab", "")
    for seq_id in (1, 3):
        assert found[seq_id][0] == FinishCode.ERROR
        assert "structured_outputs" in found[seq_id][2]
    assert gate.opened == 1


def test_a_known_grammar_is_not_compiled_again(
    start: Callable[[Gate], EngineService], monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, compiled = Gate(), []
    gate.open.set()
    service = start(gate)
    assert service._preparer is not None
    inner = service._preparer._compile
    monkeypatch.setattr(service._preparer, "_compile", lambda grammar: compiled.append(grammar) or inner(grammar))
    service.submit([structured(i, "[ab]{3}") for i in range(5)])
    assert {code for code, _, _ in ends(service, 5).values()} == {FinishCode.COMPLETE}
    assert len(compiled) == 1


def test_answers_behind_the_first_go_by_the_table_of_a_small_structure(
    start: Callable[[Gate], EngineService], monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate()
    gate.open.set()
    service = start(gate)
    preparer = service._preparer
    assert preparer is not None
    structures: list[object] = []
    inner = service._core.add
    monkeypatch.setattr(service._core, "add", lambda *given: structures.append(given[2]) or inner(*given))
    service.submit([structured(1, "[ab]{2}(yes|no)")])
    first = ends(service, 1)[1]
    preparer._tabulating.submit(lambda: None).result(WAIT_S)  # behind the table
    again = dataclasses.replace(structured(1, "[ab]{2}(yes|no)"), seq_id=2)
    service.submit([again])
    assert ends(service, 1)[2] == first
    assert isinstance(structures[0], (Matcher, Walker))  # whichever was ready
    assert isinstance(structures[1], Walker)


def test_cancelled_while_its_grammar_is_compiled(start: Callable[[Gate], EngineService]) -> None:
    gate = Gate()
    service = start(gate)
    service.submit([structured(1, "ab"), structured(2, "ab")])
    service.cancel([1])
    gate.open.set()
    assert {seq_id: end[0] for seq_id, end in ends(service, 2).items()} == {
        1: FinishCode.CANCELLED,
        2: FinishCode.COMPLETE,
    }


def test_closing_ends_those_that_wait_for_their_grammar() -> None:
    gate = Gate()
    service = EngineService(make_runner(), preparer=Preparer(gate, VOCAB))
    service.submit([structured(i, f"ab{{{i + 1}}}") for i in range(6)])
    closing = threading.Thread(target=service.close)
    closing.start()
    gate.open.set()
    closing.join(WAIT_S)
    assert not closing.is_alive()
    assert set(ends(service, 6)) == set(range(6))


def test_without_a_vocabulary_a_grammar_is_refused_at_once() -> None:
    service = EngineService(make_runner())
    [error] = service.submit([structured(1, "ab")])
    service.close()
    assert isinstance(error, InvalidRequest)
    assert error.field_name == "structured_outputs"
