"""How long grammars take to try and to compile, and masks to make: by themselves, and for many rows on some threads.

Run as `python -m tritandem_bench.grammar [--schemas FILE] [--rows 64,256] [--threads 1,2] [MODEL]`. Each row has a
schema of its own and writes an answer that keeps to it. Compilation and single masks are CPU time, a trial is what a
request waits for it; where rows share threads, numbers of threads take turns. Of a FILE every line is an object with
`schema` and `tests`, a list of {valid, data}. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tritandem.contracts.errors import InvalidRequest
from tritandem.contracts.grammars import Grammar, Kind
from tritandem.grammar import Matcher, Vocabulary, compile_grammar
from tritandem.grammar.compiled import MaskPool
from tritandem.grammar.trials import Trials
from tritandem.models import resolve_model
from tritandem.tokenizer.files.source import TokenizerSource, read_source

STEPS = 120
WORDS = ("name", "price", "count", "street", "created", "tags", "owner", "status")
Pair = tuple[Any, Any]  # a schema, and an instance


def made_pairs(count: int) -> Iterator[Pair]:
    """Orders, each of its own: nested objects, lists, numbers within bounds, dates, enumerations."""
    for at in range(count):
        parts = {
            f"{word}_{at}": {"type": "string", "maxLength": 20} if n % 2 else {"type": "integer", "minimum": at}
            for n, word in enumerate(WORDS)
        }
        item = {"type": "object", "properties": parts, "required": list(parts), "additionalProperties": False}
        schema = {
            "type": "object",
            "properties": {
                "id": {"type": "string", "format": "uuid"},
                "at": {"type": "string", "format": "date-time"},
                "kind": {"enum": [f"kind {at} {n}" for n in range(8)]},
                "items": {"type": "array", "items": item, "minItems": 1, "maxItems": 4},
                "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            },
            "required": ["id", "at", "kind", "items"],
            "additionalProperties": False,
        }
        written = {name: f"a text of {at}" if n % 2 else at + 17 * n for n, name in enumerate(parts)}
        head = {"id": f"123e4567-e89b-12d3-a456-4266{at:08}", "at": "2026-12-01T12:30:00Z", "kind": f"kind {at} 5"}
        yield schema, {**head, "items": [written, written], "note": "Leave it at the door, please."}


def read_pairs(file: Path) -> Iterator[Pair]:
    for line in file.read_text().splitlines():
        one = json.loads(line)
        for test in one["tests"]:
            if test["valid"]:
                yield one["schema"], test["data"]
                break


class Writer:
    """A schema's answer, written again and again."""

    def __init__(self, beginning: Matcher, ids: Sequence[int]) -> None:
        self._beginning, self._ids = beginning, ids
        self.begin()

    def begin(self) -> None:
        self.at, self._next = self._beginning.copy(), 0

    def write(self) -> bool:
        """One token; False: that was the last, and it begins anew."""
        assert self.at.accept(self._ids[self._next])
        self._next += 1
        if self._next < len(self._ids):
            return True
        self.begin()
        return False


def compiled(
    vocabulary: Vocabulary, encode: Callable[[str], Sequence[int]], pairs: Sequence[Pair]
) -> tuple[list[Writer], list[float]]:
    """Of the schemas that compile, and ms of CPU each."""
    writers, times_ms = [], []
    for schema, instance in pairs:
        grammar, begun_s = Grammar(Kind.JSON_SCHEMA, json.dumps(schema)), time.thread_time()
        try:
            matcher = compile_grammar(vocabulary, grammar)
        except InvalidRequest:
            continue
        times_ms.append((time.thread_time() - begun_s) * 1e3)
        writers.append(Writer(matcher, encode(json.dumps(instance, ensure_ascii=False))))
    return writers, times_ms


def tried(source: TokenizerSource, pairs: Sequence[Pair]) -> list[float]:
    """ms of each trial, one after the other."""
    trials, times_ms = Trials(source.json_text, source.vocab_size, source.end_ids), []
    trials.check(Grammar(Kind.JSON_OBJECT), "").exception()  # the process is there
    for schema, _ in pairs:
        grammar, begun_s = Grammar(Kind.JSON_SCHEMA, json.dumps(schema)), time.perf_counter()
        trials.check(grammar, "").exception()
        times_ms.append((time.perf_counter() - begun_s) * 1e3)
    trials.close()
    return times_ms


def alone(words: int, writers: Sequence[Writer]) -> list[float]:
    """us of CPU of each mask of each answer."""
    times_us = []
    row = np.zeros(words, np.int32)
    for writer in writers:
        going_on = True
        while going_on:
            begun_s = time.thread_time()
            writer.at.mask_into(row)
            times_us.append((time.thread_time() - begun_s) * 1e6)
            going_on = writer.write()
    return times_us


def together(words: int, writers: Sequence[Writer], threads: Sequence[int]) -> dict[int, list[float]]:
    """us of the masks of all rows, by threads; each its own step, in turns."""
    masks = np.zeros((len(writers), words), np.int32)
    pools = {count: MaskPool(count) for count in threads}
    times_us: dict[int, list[float]] = {count: [] for count in threads}
    for step in range(STEPS):
        used = threads[step % len(threads)]
        begun_s = time.perf_counter()
        pools[used].fill([(writer.at, row) for row, writer in enumerate(writers)], masks)
        times_us[used].append((time.perf_counter() - begun_s) * 1e6)
        for writer in writers:
            writer.write()
    return times_us


def spread(times: Sequence[float]) -> dict[str, float]:
    p50, p99 = np.percentile(times, (50, 99))
    return {"p50": round(float(p50), 2), "p99": round(float(p99), 2), "max": round(max(times), 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--schemas", type=Path, help="instead of made ones")
    parser.add_argument("--rows", default="64,256")
    parser.add_argument("--threads", default="1,2")
    flags = parser.parse_args()
    rows, threads = ([int(one) for one in text.split(",")] for text in (flags.rows, flags.threads))

    source = read_source(resolve_model(flags.model, print))
    tokenizer = source.new_tokenizer()
    begun_s = time.perf_counter()
    vocabulary = Vocabulary(source.json_text, source.vocab_size, source.end_ids)
    report: dict[str, Any] = {"tokens": vocabulary.rows, "vocabulary_s": round(time.perf_counter() - begun_s, 3)}
    pairs = list(read_pairs(flags.schemas) if flags.schemas else made_pairs(max(rows)))
    writers, times_ms = compiled(vocabulary, lambda text: tokenizer.encode(text, add_special_tokens=False).ids, pairs)
    report |= {"schemas": len(pairs), "refused": len(pairs) - len(writers)}
    print(f"{vocabulary.rows} tokens in {report['vocabulary_s']} s; {len(pairs)} schemas, {report['refused']} refused")
    print(f"{'':24}{'p50':>10}{'p99':>10}{'max':>10}")
    figures: list[tuple[str, str, Sequence[float]]] = [
        ("trial", "ms", tried(source, pairs)),
        ("compile", "ms", times_ms),
        ("mask", "us", alone(vocabulary.words, writers)),
    ]
    for count in rows:
        for used, times_us in together(vocabulary.words, writers[:count], threads).items():
            figures.append((f"{count} rows, {used} threads", "us", times_us))
    for name, unit, times in figures:
        said = report[name] = {"unit": unit, **spread(times)}
        print(f"{name + ', ' + unit:24}{said['p50']:10}{said['p99']:10}{said['max']:10}")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
