"""How long the tokenizer takes, beside `Tokenizer.encode` on the same texts in the same run.

Run as `python -m tritandem_bench.tokenizer [--rounds N] [--quick] [MODEL ...]`. Every text is new to every engine:
engines take turns on texts that none has seen, each on a thread and so in a memory arena of its own. Ids are compared
each time. The last line is one JSON document.
"""

# On one thread the engine after `Tokenizer.encode` would pay for it: that frees some million small blocks, and whoever
# next asks the same arena for a large one waits 3 to 8 ms while they are put in order. A server does not call it.

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from tritandem.config import TokenizerConfig
from tritandem.contracts.arrays import Int32Array
from tritandem.models import resolve_model
from tritandem.tokenizer import load_tokenizer
from tritandem.tokenizer.decode.text_streams import TextStreams
from tritandem.tokenizer.encode.affixes import affixes
from tritandem.tokenizer.encode.fast import load_fast
from tritandem.tokenizer.encode.pieces import PieceEncoder
from tritandem.tokenizer.encode.safe_cuts import cut_rules
from tritandem.tokenizer.encode.threads import cores_given, use_own_threads_only
from tritandem.tokenizer.encode.whole import WholeEncoder
from tritandem.tokenizer.files.source import TokenizerSource, read_source

from .tokenizer_texts import KINDS, Corpus

SIZES = (1_000, 8_000, 32_000, 114_000)  # tokens
SEQUENCES, PUSHES = 256, 400
DETOKENIZED = (("prose", "prose", ()), ("prose, two stop words", "prose", ("###", "STOP")), ("cjk", "cjk", ()))
Encode = Callable[[str], Int32Array]


class Engine:
    """One way to encode, on a thread that nothing else uses."""

    def __init__(self, encode: Encode) -> None:
        self._encode = encode
        self._thread = ThreadPoolExecutor(1)

    def timed(self, text: str) -> tuple[Int32Array, float]:
        """The ids and how many milliseconds they took. Raises ValueError where a fast engine refuses the text."""
        return self._thread.submit(self._timed, text).result()

    def _timed(self, text: str) -> tuple[Int32Array, float]:
        begun = time.perf_counter()
        ids = self._encode(text)
        return ids, (time.perf_counter() - begun) * 1e3


@dataclass
class Cell:
    """One vocabulary, one kind of text, one size, one number of cores: milliseconds by engine."""

    name: str
    kind: str
    tokens: int
    cores: int
    ms: dict[str, list[float]] = field(default_factory=dict)
    mismatches: int = 0

    def median(self, engine: str) -> float | None:
        return statistics.median(self.ms[engine]) if self.ms.get(engine) else None

    def ratio(self, engine: str) -> float | None:
        """How many times faster than `Tokenizer.encode`: the median of the rounds' own ratios."""
        pairs = zip(self.ms["encode"], self.ms.get(engine, []), strict=False)
        ratios = [reference / other for reference, other in pairs]
        return statistics.median(ratios) if ratios else None


def engines_of(source: TokenizerSource, threads: int) -> dict[str, Engine]:
    """The published reference first, then ours."""
    tokenizer, whole = source.new_tokenizer(), WholeEncoder(source.new_tokenizer())
    engines: dict[str, Encode] = {"encode": lambda text: np.array(tokenizer.encode(text).ids, np.int32)}
    if fast := load_fast(source):
        engines["fast"] = lambda text: fast.encode(text, True)
    if (rules := cut_rules(source)) and (ends := affixes(whole)):
        pieces = PieceEncoder(whole, rules, ends, TokenizerConfig().piece_chars, threads)
        engines["slow path"] = lambda text: pieces.encode(text, True)
    return {name: Engine(encode) for name, encode in engines.items()}


def measure(cell: Cell, engines: dict[str, Engine], corpus: Corpus, rounds: int) -> None:
    """`rounds` new texts, each through every engine in turn."""
    chars = corpus.chars_for(cell.kind, cell.tokens, lambda text: len(engines["encode"].timed(text)[0]))
    for round_number in range(rounds + 1):
        text = corpus.text(cell.kind, chars)
        expected = None
        for engine, runs in engines.items():
            try:
                ids, took_ms = runs.timed(text)
            except ValueError:
                continue  # a loud refusal by the fast engine; a server then takes the slow path
            expected = ids if expected is None else expected
            cell.mismatches += not np.array_equal(ids, expected)
            if round_number:  # the first round only warms up
                cell.ms.setdefault(engine, []).append(took_ms)


def show(cell: Cell) -> None:
    parts = [f"{cell.name:9} {cell.kind:9} {cell.tokens // 1000:4}k {cell.cores:2}"]
    for engine in ("encode", "fast", "slow path"):
        median, ratio = cell.median(engine), cell.ratio(engine)
        parts.append(f"{median:9.2f} ms {ratio:7.1f}x" if median is not None and ratio else f"{'-':>21}")
    print(" | ".join([*parts, str(cell.mismatches)]), flush=True)


def beside_long_texts(model: Path, corpus: Corpus, rounds: int) -> dict[str, float]:
    """Median ms of a text of 1k and of 8k tokens alone, and of one that arrives while two of 114k are being encoded."""
    found = {}
    for path, config in (("fast", TokenizerConfig()), ("slow", TokenizerConfig(fast=False, prefix_cache=False))):
        tokenizer = load_tokenizer(model, config)
        for size, chars in (("1k", 4_300), ("8k", 34_000)):
            for case in ("alone", "beside"):
                took = []
                for _ in range(rounds):
                    long_texts = [corpus.text("prose", 480_000) for _ in range(2)] if case == "beside" else []
                    text = corpus.text("prose", chars)
                    futures = [tokenizer.submit(text) for text in long_texts]
                    time.sleep(0.001)  # so that both are in work
                    begun = time.perf_counter()
                    tokenizer.encode(text)
                    took.append((time.perf_counter() - begun) * 1e3)
                    for future in futures:
                        future.result()
                found[f"{path}_{size}_{case}_ms"] = round(statistics.median(took), 3)
        tokenizer.close()
    return found


def detokenizing(source: TokenizerSource, corpus: Corpus, kind: str, stop_words: tuple[str, ...]) -> float:
    """Microseconds a token, median: 256 sequences, each at another place of the text, one token each a push."""
    streams = TextStreams(source)
    ids = WholeEncoder(source.new_tokenizer()).encode(corpus.text(kind, 40_000), False)
    states = [streams.open(ids[:0], stop_words) for _ in range(SEQUENCES)]
    places = np.arange(SEQUENCES) * 37
    counts = np.ones(SEQUENCES, np.int32)
    took = []
    for step in range(PUSHES):
        tokens = ids[(places + step) % len(ids)]
        begun = time.perf_counter()
        streams.push(states, tokens, counts)
        took.append(time.perf_counter() - begun)
    return round(statistics.median(took) * 1e6 / SEQUENCES, 3)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=["smollm2"], metavar="MODEL", help="as for `tritandem serve`")
    parser.add_argument("--rounds", type=int, default=7, help="new texts for each cell (default 7)")
    parser.add_argument("--quick", action="store_true", help="only prose at 114k tokens")
    options = parser.parse_args()
    use_own_threads_only()
    cores = sorted(os.sched_getaffinity(0))
    kinds, sizes = (("prose",), SIZES[-1:]) if options.quick else (KINDS, SIZES)
    corpus = Corpus(random.Random())
    cells: list[Cell] = []
    detok_us: dict[str, dict[str, float]] = {}
    print("vocabulary kind     tokens cores | Tokenizer.encode | fast path | slow path | mismatches")
    folders = [resolve_model(model, print) for model in options.models]
    for folder in folders:
        name, source = folder.name, read_source(folder)
        for given in (cores[:2], cores[:1]) if len(cores) > 1 else (cores,):
            os.sched_setaffinity(0, given)
            engines = engines_of(source, cores_given())
            for kind in kinds:
                for size in sizes:
                    cell = Cell(name, kind, size, len(given))
                    measure(cell, engines, corpus, options.rounds)
                    show(cell)
                    cells.append(cell)
            os.sched_setaffinity(0, cores)
        for what, kind, stop_words in DETOKENIZED:
            detok_us.setdefault(what, {})[name] = detokenizing(source, corpus, kind, stop_words)
        print(
            f"{name:9} detokenizing: " + ", ".join(f"{what} {us[name]} us" for what, us in detok_us.items()), flush=True
        )
    print(json.dumps(summary(cells, detok_us) | beside_long_texts(folders[0], corpus, options.rounds * 3)))
    return 1 if any(cell.mismatches for cell in cells) or not cells else 0


def summary(cells: list[Cell], detok_us: dict[str, dict[str, float]]) -> dict[str, object]:
    """The medians over vocabularies for prose at 114k tokens, and all mismatches."""

    def over(figure: Callable[[Cell], float | None], cores: int) -> float | None:
        chosen = [cell for cell in cells if (cell.kind, cell.tokens, cell.cores) == ("prose", SIZES[-1], cores)]
        values = [value for cell in chosen if (value := figure(cell)) is not None]
        return round(statistics.median(values), 2) if values else None

    most = max((cell.cores for cell in cells), default=1)
    return {
        "cores": most,
        "ratio_114k": over(lambda cell: cell.ratio("fast"), most),
        "ms_114k": over(lambda cell: cell.median("fast"), most),
        "ms_114k_encode": over(lambda cell: cell.median("encode"), most),
        "ratio_114k_slow_path": over(lambda cell: cell.ratio("slow path"), most),
        "ms_114k_slow_path": over(lambda cell: cell.median("slow path"), most),
        "ratio_114k_one_core": over(lambda cell: cell.ratio("fast"), 1),
        "ratio_114k_slow_path_one_core": over(lambda cell: cell.ratio("slow path"), 1),
        "detokenize_us_per_token": detok_us,
        "mismatches": sum(cell.mismatches for cell in cells),
    }


if __name__ == "__main__":
    sys.exit(main())
