"""Requests with a structure, and whether their answers have it."""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Sequence
from typing import Any

from tritandem.contracts.requests import EngineRequest
from tritandem.contracts.stream import FinishCode
from tritandem.engine.step import Runner
from tritandem.engine.structure.tables import Walker, table_of
from tritandem.grammar import Grammar, Kind, Matcher, compile_grammar

from tests.engine.engine_rig import Answer, Rig, prompts, request
from tests.engine.spelled import END, spellings, text_of, vocabulary

REGEXES = (r"[ab]{2,}", r"(yes|no|maybe)( (yes|no|maybe)){2}", r"[0-9]{4}-[0-9]{2}", r"(true|false)+\.", r"x{2,40}y?")
DRAWN: dict[str, Any] = {"temperature": 1.0, "seed": 3, "max_tokens": 60}


def structured(seq_id: int, ids: Any, grammar: Grammar, **options: Any) -> EngineRequest:
    return dataclasses.replace(request(seq_id, ids, **{"stop_ids": (END,), **options}), grammar=grammar)


def regex(text: str) -> Grammar:
    return Grammar(Kind.REGEX, text)


def structure_of(one: EngineRequest) -> Matcher | None:
    return None if one.grammar is None else compile_grammar(vocabulary(), one.grammar)


def table_walker(one: EngineRequest) -> Walker | None:
    """Its structure as a table; every expression here is small enough."""
    if one.grammar is None:
        return None
    table = table_of(one.grammar, compile_grammar(vocabulary(), one.grammar), spellings())
    assert table is not None, one.grammar
    return Walker(table, vocabulary())


def run(runner: Runner, requests: Sequence[EngineRequest], structure: Any = structure_of) -> dict[int, Answer]:
    return begun(Rig(runner), requests, structure).run(())


def begun(rig: Rig, requests: Sequence[EngineRequest], structure: Any = structure_of) -> Rig:
    for one in requests:
        rig.core.add(one, 1, structure(one))
    return rig


def mixture(count: int = 15) -> list[EngineRequest]:
    """Every third has no structure."""
    requests = []
    for number, ids in enumerate(prompts(count, seed=4, high=30)):
        if number % 3:
            requests.append(structured(number, ids, regex(REGEXES[number % len(REGEXES)]), **DRAWN))
        else:
            requests.append(request(number, ids, **DRAWN))
    return requests


def come_and_go(rig: Rig, requests: Sequence[EngineRequest], rng: random.Random) -> set[int]:
    """All arrive, with masks or tables, some are cancelled, the rest come to their end. Returns who was cancelled."""
    cancelled, waiting = set[int](), list(requests)
    for _ in range(5000):
        if waiting and rng.random() < 0.3:
            one = waiting.pop()
            rig.core.add(one, 1, rng.choice((structure_of, table_walker))(one))
        live = rig.core.live_ids()
        if live and rng.random() < 0.03:
            cancelled.add(rng.choice(live))
            rig.core.cancel(cancelled)
        rig.step()
        if not waiting and rig.core.idle():
            break
    return cancelled


def check(requests: Sequence[EngineRequest], answers: dict[int, Answer]) -> None:
    """Finished answers are what their expressions ask for, cut ones a beginning that is as long as asked."""
    for one in requests:
        answer = answers[one.seq_id]
        if one.grammar is None:
            continue
        if answer.finish == FinishCode.LENGTH:
            assert len(answer.tokens) == one.sampling.max_tokens
        else:
            assert answer.finish in (FinishCode.STOP, FinishCode.COMPLETE), answer
            assert (answer.tokens[-1] == END) == (answer.finish == FinishCode.STOP)
            assert re.fullmatch(one.grammar.text, text_of(answer.tokens)), text_of(answer.tokens)
