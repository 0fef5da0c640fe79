"""Small structures as tables: the grammar's own matcher and the table allow the same, and a device's tokens with tables
are those with masks of the host."""

from __future__ import annotations

import dataclasses
import json
import random
import re
import time

import numpy as np
import pytest
import torch
from tritandem.contracts.stream import FinishCode
from tritandem.engine.host.shelf import TableShelf
from tritandem.engine.rows.state import SlotState
from tritandem.engine.sampling.sampler import sample
from tritandem.engine.step import TABLED, TABLES, SamplingFeatures, SlotInit
from tritandem.engine.structure.expressions import TooMuch, automaton, parse
from tritandem.engine.structure.tables import Table, Walker, may_be_small, table_of
from tritandem.grammar import Grammar, Kind, Matcher, compile_grammar

from tests.engine.engine_rig import VOCAB, Rig, make_runner, prompts, request, tokens_of
from tests.engine.spelled import END, SPELLING, allowed, spellings, vocabulary
from tests.engine.structured_rig import REGEXES, check, mixture, regex, run, structured, table_walker
from tests.fakes.delayed_runner import DelayedRunner

SMALL = [
    *(Grammar(Kind.REGEX, text) for text in REGEXES),
    Grammar(Kind.CHOICE, json.dumps(["yes", "no", "maybe", "ye", "abc abc"])),
    Grammar(Kind.JSON_SCHEMA, json.dumps({"enum": ["abc", "b c", "\u00e9a"], "type": "string"})),
    Grammar(Kind.REGEX, r"[^ab]{1,3}c?"),
    Grammar(Kind.REGEX, r"\+?[0-9 ()-]{7,15}"),
]


def pair(grammar: Grammar) -> tuple[Matcher, Walker]:
    matcher = compile_grammar(vocabulary(), grammar)
    table = table_of(grammar, matcher, spellings())
    assert table is not None
    return matcher, Walker(table, vocabulary())


@pytest.mark.parametrize("grammar", SMALL, ids=lambda grammar: grammar.text)
def test_matcher_and_table_agree_on_random_walks(grammar: Grammar) -> None:
    """Where only one text can follow, the matcher's mask may hold one spelling of it and the table's another, which the
    matcher takes as well."""
    first, start = pair(grammar)
    rng, row = random.Random(1), np.empty(vocabulary().words, np.int32)
    for _ in range(60):
        matcher, walker = first.copy(), start.copy()
        for _ in range(25):
            matcher.mask_into(row)
            by_matcher, by_table = set(allowed(row)), set(allowed(walker.mask()))
            assert by_matcher == by_table or len(by_matcher) == len(by_table) == 1
            assert (END in by_table) == matcher.may_end()
            assert walker.is_over() == matcher.is_over()
            going = sorted(by_table - {END})
            if not going:
                break
            token = rng.choice(going)
            assert matcher.accept(token)
            assert walker.accept(token)
        assert not walker.accept(SPELLING.index("~")) or "^" in grammar.text


UNDERSTOOD = [
    r"[a-c]{2,5}",
    r"(yes|no)( x)*",
    r"[^a]{1,3}b?",
    r"a.c",
    "[\u00e9-\u00fc\\]x-]+",
    r"(a|b)*abb",
    r"x{0}y",
    r"(?:ab?c){2,}",
    "[\u0800-\uffff\U0001f600]z",
    r"\$[0-9]+\.[0-9]{2}",
]
OTHERS = [r"\d", "a**", "(a", "[[:alpha:]]", "(?i)a", "^a", "a+?", r"\bx", "a{2", "([ab]{40}){40}"]
LETTERS = "abcxyz019.$]- \n\u00e9n\u00fc\u017f\u6f22\U0001f600"


@pytest.mark.parametrize("pattern", UNDERSTOOD)
def test_expressions_take_the_texts_that_re_takes(pattern: str) -> None:
    made, theirs, rng = automaton(parse(pattern)), re.compile(pattern), random.Random(3)
    taken = 0
    for _ in range(3000):
        text = "".join(rng.choice(LETTERS) for _ in range(rng.randrange(7)))
        state = 0
        for byte in text.encode():
            state = int(made.moves[state, byte]) if state >= 0 else state
        assert (state >= 0 and bool(made.accepting[state])) == bool(theirs.fullmatch(text)), text
        taken += state >= 0
    assert taken > 0


@pytest.mark.parametrize("pattern", OTHERS)
def test_whatever_is_not_understood_has_no_automaton(pattern: str) -> None:
    with pytest.raises(TooMuch):
        automaton(parse(pattern))


@pytest.mark.parametrize(
    "pattern", ["a(){0,4000000000}", "a(){4000000000}", "((?:){60000}){60000}a", "([\x01-\x7f]?){1200}"]
)
def test_what_takes_long_has_no_automaton_soon(pattern: str) -> None:
    """Repetitions of nothing make no parts, and many parts many moves: the work itself is bounded."""
    begun_s = time.process_time()
    with pytest.raises(TooMuch):
        automaton(parse(pattern))
    assert time.process_time() - begun_s < 2


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar(Kind.REGEX, r"([a-z]{100} ){3}"),
        Grammar(Kind.JSON_SCHEMA, '{"type": "object"}'),
        Grammar(Kind.CHOICE, json.dumps([f"{i:03}" * 4 for i in range(0, 900, 7)])),
    ],
    ids=lambda grammar: grammar.text[:20],
)
def test_what_is_not_small_has_no_table(grammar: Grammar) -> None:
    assert table_of(grammar, compile_grammar(vocabulary(), grammar), spellings()) is None
    assert not may_be_small(Grammar(Kind.GRAMMAR, "start: /a/"))


@pytest.mark.parametrize("ahead", [0, 3])
def test_answers_by_tables_equal_those_by_masks(ahead: int) -> None:
    requests = mixture()
    runner = DelayedRunner(make_runner(), ahead)
    by_tables = run(runner, requests, table_walker)
    check(requests, by_tables)
    assert tokens_of(by_tables) == tokens_of(run(make_runner(), requests))
    assert runner.waited == 0  # no step depends on the host


def test_a_preempted_answer_goes_on_in_its_table() -> None:
    requests = mixture()
    rig = Rig(DelayedRunner(make_runner(num_blocks=26), 2))
    for one in requests:
        rig.core.add(one, 1, table_walker(one))
    assert tokens_of(rig.run(())) == tokens_of(run(make_runner(), requests))
    assert rig.core.load().preemptions > 0


def test_more_tables_than_places_are_followed_by_masks_of_the_host() -> None:
    inner = make_runner()
    inner.spec = dataclasses.replace(inner.spec, table_places=2)
    requests = [
        structured(i, ids, regex(f"[ab]{{{i + 3}}}(yes|no)"), max_tokens=30) for i, ids in enumerate(prompts(8, seed=2))
    ]
    runner = DelayedRunner(inner, 2)
    answers = run(runner, requests, table_walker)
    check(requests, answers)
    assert {answer.finish for answer in answers.values()} == {FinishCode.COMPLETE}
    assert runner.waited > 0


def test_the_table_unused_for_longest_makes_room() -> None:
    tables = [Table(*(np.zeros(1, kind) for kind in (np.uint8, np.uint8, bool, np.int32))) for _ in range(4)]
    shelf = TableShelf(2)
    assert [shelf.take(tables[0], 5), shelf.take(tables[1], 6), shelf.take(tables[0], 7)] == [0, 1, 0]
    assert shelf.take(tables[2], 8) is None
    shelf.fresh.clear()
    shelf.give_back(5)
    assert shelf.take(tables[2], 8) is None  # slot 7 needs the first one still
    shelf.give_back(6)
    shelf.give_back(7)
    assert shelf.take(tables[2], 8) == 1  # the second was taken before the first was taken again
    assert shelf.fresh == {1: tables[2]}
    assert shelf.take(tables[0], 9) == 0


def test_a_table_masks_its_rows_and_moves_on_with_their_tokens() -> None:
    _, walker = pair(Grammar(Kind.CHOICE, '["ab", "no"]'))
    state, nothing = SlotState.empty(3, 4, VOCAB, "cpu"), np.zeros(0, np.int32)
    state.write_table(7, torch.from_numpy(walker.table.words))
    for slot, kind in enumerate((TABLES + 7, 0)):
        state.init_row(
            SlotInit(slot, np.array([1], np.int32), request(0, [1]).sampling, (), (), nothing, structure=kind), 9
        )
    rows, features = torch.tensor([1, 0, 3]), SamplingFeatures(frozenset({TABLED}))
    logits = torch.zeros(3, VOCAB)
    logits[:, SPELLING.index("a")] = 2.0
    logits[:, SPELLING.index("x")] = 5.0
    sampled = sample(logits, rows, state, features)
    assert sampled.tokens.tolist() == [SPELLING.index("x"), SPELLING.index("a"), SPELLING.index("x")]
    state.advance(rows, sampled.tokens, sampled.broken, penalised=False)
    state.follow_tables(rows)
    assert walker.accept(SPELLING.index("a"))
    assert state.structure_state.tolist() == [walker.state, 0, 0, 0]
    again = sample(logits, rows, state, features)
    assert again.tokens.tolist() == [SPELLING.index("x"), SPELLING.index("b"), SPELLING.index("x")]
