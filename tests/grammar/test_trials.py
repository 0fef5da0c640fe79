"""Grammars are tried where they can do no harm: whatever a client sends, the answer comes and others are served."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from tritandem.contracts.errors import EngineFailed, InvalidRequest, Saturated
from tritandem.contracts.grammars import Grammar, Kind
from tritandem.grammar.trials import Trials
from tritandem.machine import processes

from .spelled import END, ROWS, byte_tokenizer

WAIT_S = 60.0  # only bounds what hangs


def chain(length: int) -> str:
    rules = "\n".join(f'r{at}: "a{at}" r{at + 1} | r{at + 1}' for at in range(length))
    return f'start: r0\n{rules}\nr{length}: "x"'


def properties(count: int, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {f"property_{at}": {"type": "string"} for at in range(count)}, **more}


def nested(levels: int) -> str:
    return '{"type":"object","properties":{"a":' * levels + '{"type":"integer"}' + "}}" * levels


DEFINITIONS = {f"d{at}": {"allOf": [{"$ref": f"#/$defs/d{at + 1}"}] * 3} for at in range(40)} | {
    "d40": {"type": "null"}
}
HOSTILE: dict[str, tuple[Kind, Any]] = {
    "an expression that grows exponentially": (Kind.REGEX, "(a|aa)*b{1,200}(a|b){200}"),
    "repetition inside repetition": (Kind.REGEX, "((a{1,1000}){1,1000}){1,1000}"),
    "brackets inside brackets": (Kind.REGEX, "(" * 5000 + "a" + ")" * 5000),
    "expressions that must all hold": (
        Kind.JSON_SCHEMA,
        {"allOf": [{"type": "string", "pattern": f".*a.{{{at}}}"} for at in range(5, 30)]},
    ),
    "rules that lead to rules": (Kind.GRAMMAR, chain(20_000)),
    "rules that lead to themselves": (Kind.GRAMMAR, 'start: a\na: a a | "x" | ""'),
    "levels of a schema": (Kind.JSON_SCHEMA, nested(1000)),
    "levels of JSON": (Kind.JSON_SCHEMA, "[" * 100_000),
    "a megabyte of schema": (Kind.JSON_SCHEMA, properties(25_000)),
    "more than a megabyte": (Kind.JSON_SCHEMA, properties(50_000)),
    "10,000 properties": (Kind.JSON_SCHEMA, properties(10_000)),
    "100,000 choices": (Kind.CHOICE, [f"choice {at}" for at in range(50_000)]),
    "a huge enum": (Kind.JSON_SCHEMA, {"enum": [f"value {at}" for at in range(50_000)]}),
    "a remote reference": (Kind.JSON_SCHEMA, {"$ref": "https://example.com/schema.json"}),
    "a reference to a file": (Kind.JSON_SCHEMA, {"$ref": "file:///etc/passwd"}),
    "a reference to nothing": (Kind.JSON_SCHEMA, {"$ref": "#/$defs/x"}),
    "a reference to itself": (Kind.JSON_SCHEMA, {"allOf": [{"$ref": "#"}]}),
    "references that multiply": (Kind.JSON_SCHEMA, {"$defs": DEFINITIONS, "$ref": "#/$defs/d0"}),
    "alternatives that multiply": (
        Kind.JSON_SCHEMA,
        {"allOf": [{"anyOf": [properties(1, required=[f"p{at}_{one}"]) for one in range(4)]} for at in range(20)]},
    ),
    "numbers that few divide": (Kind.JSON_SCHEMA, {"type": "integer", "multipleOf": 987654321}),
    "long texts": (Kind.JSON_SCHEMA, {"type": "string", "minLength": 10**9, "maxLength": 2 * 10**9}),
    "long lists": (Kind.JSON_SCHEMA, {"type": "array", "minItems": 10**9}),
}
REFUSED = {
    "brackets inside brackets": "allowed",
    "expressions that must all hold": "0.3 s and 512 MiB",
    "rules that lead to rules": "0.3 s and 512 MiB",
    "levels of a schema": "recursion",
    "levels of JSON": "malformed JSON",
    "more than a megabyte": "at most 1048576 bytes",
    "10,000 properties": "0.3 s and 512 MiB|too hard",
    "a remote reference": "example.com",
    "a reference to a file": "file:///etc/passwd",
    "a reference to nothing": "/\\$defs/x",
    "numbers that few divide": "fuel",
}


@pytest.fixture(scope="module")
def trials() -> Iterator[Trials]:
    made = Trials(byte_tokenizer(), ROWS, [END], seconds=0.3)
    made.start()
    yield made
    made.close()


def refusal(trials: Trials, kind: Kind, text: Any, field: str = "here") -> BaseException | None:
    made = text if isinstance(text, str) else json.dumps(text)
    return trials.check(Grammar(kind, made), field).exception(WAIT_S)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_grammar_is_answered_by_name_or_served(trials: Trials, name: str) -> None:
    error = refusal(trials, *HOSTILE[name])
    if name in REFUSED or error is not None:
        assert isinstance(error, InvalidRequest)
        assert error.field_name == "here"
        assert len(str(error)) < 1000
    if name in REFUSED:
        assert re.search(REFUSED[name], str(error))
    assert refusal(trials, Kind.CHOICE, [name]) is None  # others are served


def test_others_do_not_wait_for_a_hostile_grammar(trials: Trials) -> None:
    kind, schema = HOSTILE["expressions that must all hold"]
    hostile = trials.check(Grammar(kind, json.dumps({**schema, "title": "once more"})), "here")
    for at in range(5):
        assert refusal(trials, Kind.CHOICE, [f"beside it {at}"]) is None
    assert not hostile.done()
    assert isinstance(hostile.exception(WAIT_S), InvalidRequest)


def long_ones(count: int) -> list[Grammar]:
    """Each of its own; any takes all the time that a trial may have."""
    kind, schema = HOSTILE["expressions that must all hold"]
    return [Grammar(kind, json.dumps({**schema, "title": f"number {at}"})) for at in range(count)]


def test_another_tenant_waits_for_no_trial_of_one_that_has_brought_many() -> None:
    trials = Trials(byte_tokenizer(), ROWS, [END], seconds=2.0)
    hostile = [trials.check(grammar, "here", "greedy") for grammar in long_ones(7)]  # one runs, four wait
    modest = trials.check(Grammar(Kind.CHOICE, '["modest"]'), "here", "modest")
    assert modest.exception(WAIT_S) is None
    assert not any(one.done() for one in hostile)
    fresh = trials.check(Grammar(Kind.CHOICE, '["its own"]'), "here", "greedy")
    assert fresh.exception(WAIT_S) is None
    full = hostile[-1].exception(WAIT_S)
    assert isinstance(full, Saturated), "a tenant fills a line without end"
    assert re.match(r"here: 4 grammars that take more than 0\.1 s are being tried; retry after 8\.0 s", str(full))
    again = trials.check(long_ones(7)[-1], "here", "greedy")
    assert again is not hostile[-1], "for lack of room, which is no fault of its own"
    trials.close()


def test_who_asks_for_the_same_meanwhile_waits_in_the_line_of_its_own_tenant(trials: Trials) -> None:
    grammar = Grammar(Kind.CHOICE, '["the same"]')
    first, second, other = (trials.check(grammar, "here", tenant) for tenant in ("a", "a", "b"))
    assert first is second
    assert other is not first
    assert first.exception(WAIT_S) is None
    assert other.exception(WAIT_S) is None
    assert trials.check(grammar, "here", "c").done()


def children_of(process: int) -> set[int]:
    return {int(one) for one in Path(f"/proc/{process}/task/{process}/children").read_text().split()}


def worked_s(process: int) -> float:
    with suppress(OSError):  # it has ended
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def test_a_process_goes_on_to_the_next_grammar_until_it_has_refused_one() -> None:
    trials = Trials(byte_tokenizer(), ROWS, [END])
    assert refusal(trials, Kind.CHOICE, ["first"]) is None
    assert trials._process is not None
    begun = children_of(trials._process.pid)
    for at in range(10):
        assert refusal(trials, Kind.CHOICE, [f"good {at}"]) is None
    assert children_of(trials._process.pid) >= begun
    assert isinstance(refusal(trials, Kind.REGEX, "("), InvalidRequest)
    assert refusal(trials, Kind.CHOICE, ["afterwards"]) is None  # the one that refused has been waited for
    assert not children_of(trials._process.pid) >= begun
    trials.close()


def test_each_trial_is_noted() -> None:
    noted: list[int] = []
    trials = Trials(byte_tokenizer(), ROWS, [END], note=noted.append)
    for _ in range(2):
        assert refusal(trials, Kind.CHOICE, ["known"]) is None
    assert isinstance(refusal(trials, Kind.REGEX, "("), InvalidRequest)
    assert len(noted) == 2
    assert min(noted) > 0
    trials.close()


def test_what_is_known_is_not_tried_again(trials: Trials) -> None:
    good, bad = Grammar(Kind.CHOICE, '["known"]'), Grammar(Kind.REGEX, "(")
    assert trials.check(good, "here").exception(WAIT_S) is None
    assert trials.check(good, "here").done()
    first = trials.check(bad, "here")
    assert isinstance(first.exception(WAIT_S), InvalidRequest)
    assert trials.check(bad, "here") is first
    there = trials.check(bad, "there").exception(WAIT_S)
    assert isinstance(there, InvalidRequest)
    assert there.field_name == "there"


def test_what_is_remembered_is_bounded() -> None:
    trials = Trials(byte_tokenizer(), ROWS, [END], remembered=2)
    one, two, three = (Grammar(Kind.CHOICE, json.dumps([word])) for word in ("one", "two", "three"))
    for grammar in (one, two, one, three):
        assert trials.check(grammar, "here").exception(WAIT_S) is None
    assert trials.check(one, "here").done()
    assert not trials.check(two, "here").done()
    trials.close()


def test_a_process_that_has_ended_is_replaced_and_what_it_was_asked_fails() -> None:
    trials = Trials(byte_tokenizer(), ROWS, [END], seconds=300.0)
    assert refusal(trials, Kind.CHOICE, ["before"]) is None
    process = trials._process
    assert process is not None
    kind, schema = HOSTILE["expressions that must all hold"]
    lost = trials.check(Grammar(kind, json.dumps(schema)), "here")
    forks = set[int]()
    while not any(worked_s(fork) > 0.3 for fork in forks):
        Event().wait(0.01)
        forks = children_of(process.pid)
    process.kill()
    assert isinstance(lost.exception(WAIT_S), EngineFailed)
    while any(processes.state(fork) not in "XZ" for fork in forks):
        assert all(worked_s(fork) < 3 for fork in forks), "a trial goes on for nobody"
        Event().wait(0.01)
    assert refusal(trials, Kind.CHOICE, ["after"]) is None
    trials.close()


def test_after_close_nothing_is_left_and_nothing_starts() -> None:
    trials = Trials(byte_tokenizer(), ROWS, [END])
    assert refusal(trials, Kind.CHOICE, ["a"]) is None
    process = trials._process
    trials.close()
    assert process is not None
    assert process.poll() is not None
    assert isinstance(refusal(trials, Kind.CHOICE, ["b"]), EngineFailed)


def test_the_process_ends_with_who_asks() -> None:
    trials = Trials(byte_tokenizer(), ROWS, [END])
    assert refusal(trials, Kind.CHOICE, ["a"]) is None
    process = trials._process
    assert process is not None
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(WAIT_S) == 0
    trials.close()


def test_a_tokenizer_whose_tokens_have_no_known_bytes_refuses_every_grammar_by_name() -> None:
    trials = Trials(json.dumps({"model": {"vocab": {"a": 0}}, "decoder": {"type": "WordPiece"}}), 1, [0])
    for word in ("a", "b"):
        error = refusal(trials, Kind.CHOICE, [word])
        assert isinstance(error, InvalidRequest)
        assert "WordPiece" in str(error)
    trials.close()
