"""What the tokenizer's choices rest on: forms of a pre-tokenizer, threads inside fastokens, sizes of pieces, and what a
call pays for the one before it.

    python loadtest/benchmarks/tokenizer_choices.py [--rounds N]

Prose of about 114k tokens, new for every call, medians in milliseconds of CPU time of the calling thread, which does
all the work but where threads are the question. One table for each choice; the last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.tokenizer_texts import Corpus
from fuzz.tokenizer_claims import Subject, subject
from fuzz.vocabularies import vocabulary_folder
from tritandem.tokenizer.encode.fast import FastEncoder, load_fast, warm_up
from tritandem.tokenizer.encode.fast_forms import ByNumbers
from tritandem.tokenizer.encode.pieces import PieceEncoder
from tritandem.tokenizer.encode.threads import use_own_threads_only

CHARS = 480_000
# GPT-2's regex and digits one by one in one expression: equal, but no form that fastokens recognises.
ONE_REGEX = (
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?![^\s\p{N}])|\s+"  # \s+ ends where a digit begins
)
Call = Callable[[str], object]


def medians(calls: dict[str, Call], corpus: Corpus, rounds: int, clock: Callable[[], float]) -> dict[str, float]:
    """Each call on a thread of its own, in turns; the first round only warms up."""
    threads = {name: ThreadPoolExecutor(1) for name in calls}
    took: dict[str, list[float]] = {name: [] for name in calls}

    def timed(call: Call, text: str) -> float:
        begun = clock()
        call(text)
        return (clock() - begun) * 1e3

    for _ in range(rounds + 1):
        for name, call in calls.items():
            took[name].append(threads[name].submit(timed, call, corpus.text("prose", CHARS)).result())
    return {name: round(statistics.median(values[1:]), 2) for name, values in took.items()}


def forms(corpus: Corpus, rounds: int) -> dict[str, float]:
    """SmolLM2's pre-tokenizer in three spellings with the same ids."""
    from fastokens import Tokenizer

    it = subject(vocabulary_folder("smollm2"))
    assert it.fast is not None
    native: Any = it.fast._native
    assert isinstance(native, ByNumbers)
    split = {"type": "Split", "pattern": {"Regex": ONE_REGEX}, "behavior": "Isolated", "invert": False}
    last = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    spec = {**it.source.spec, "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, last]}}
    spellings = {
        "digits as added tokens": native._recognised,
        "one regex": Tokenizer.from_json_str(json.dumps(spec, ensure_ascii=False)),
        "digits, then a regex": native._general,
    }
    encoders = {name: FastEncoder(form, folds_case=False) for name, form in spellings.items()}
    for encoder in encoders.values():
        warm_up(encoder)
    calls = {name: lambda text, encoder=encoder: encoder.encode(text, True) for name, encoder in encoders.items()}
    return medians(calls, corpus, rounds, time.thread_time)


def fast_only(name: str, corpus: Corpus, rounds: int) -> dict[str, float]:
    """Wall and CPU time of the fast engine with the threads that the environment gives it."""
    fast = _fast(vocabulary_folder(name))
    call: dict[str, Call] = {"wall": lambda text: fast.encode(text, True)}
    found = medians(call, corpus, rounds, time.perf_counter)
    return {**found, "cpu": medians(call, corpus, rounds, time.process_time)["wall"]}


def threads_inside(rounds: int) -> dict[str, Any]:
    """`fast_only` in processes of their own, since fastokens reads its setting once."""
    found: dict[str, Any] = {}
    for name in ("qwen2", "mistral"):
        for threads in ("1", "2"):
            command = [sys.executable, __file__, "--rounds", str(rounds), "--fast-only", name]
            environment = {**os.environ, "FASTOKENS_BPE_THREADS": threads}
            said = subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=300)
            found[f"{name}, {threads}"] = json.loads(said.stdout.splitlines()[-1])
    return found


def sizes_of_pieces(it: Subject, corpus: Corpus, rounds: int) -> dict[str, float]:
    """CPU time on one thread of `Tokenizer.encode`, of the text whole and of pieces of some sizes."""
    assert it.rules is not None
    assert it.affixes is not None
    tokenizer = it.source.new_tokenizer()
    calls: dict[str, Call] = {"Tokenizer.encode": lambda text: np.array(tokenizer.encode(text).ids, np.int32)}
    calls["whole"] = lambda text: it.whole.encode(text, True)
    for chars in (512, 2048, 8192, 16384):
        pieces = PieceEncoder(it.whole, it.rules, it.affixes, chars, 1)
        calls[f"{chars}"] = lambda text, pieces=pieces: pieces.encode(text, True)  # type: ignore[misc]
    return medians(calls, corpus, rounds, time.thread_time)


def after(corpus: Corpus, rounds: int) -> dict[str, float]:
    """The fast engine after something else on the same thread, and so in the same memory arena."""
    it = subject(vocabulary_folder("qwen2"))
    fast = _fast(vocabulary_folder("qwen2"))
    tokenizer = it.source.new_tokenizer()
    before: dict[str, Call] = {
        "another fast call": lambda text: fast.encode(text, True),
        "0.1 s of sleep": lambda text: time.sleep(0.1),
        "Tokenizer.encode": lambda text: tokenizer.encode(text).ids,
    }
    took: dict[str, list[float]] = {name: [] for name in before}
    for _ in range(rounds):
        for name, call in before.items():
            other, text = corpus.text("prose", CHARS), corpus.text("prose", CHARS)
            call(other)
            begun = time.thread_time()
            fast.encode(text, True)
            took[name].append((time.thread_time() - begun) * 1e3)
    return {name: round(statistics.median(values), 2) for name, values in took.items()}


def _fast(folder: Path) -> FastEncoder:
    from tritandem.tokenizer.files.source import read_source

    fast = load_fast(read_source(folder))
    if fast is None:
        raise SystemExit("fastokens is not installed or refuses the vocabulary: nothing to measure")
    warm_up(fast)
    return fast


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--fast-only", metavar="NAME", help=argparse.SUPPRESS)
    options = parser.parse_args()
    use_own_threads_only()
    corpus = Corpus(random.Random())
    if options.fast_only:
        print(json.dumps(fast_only(options.fast_only, corpus, options.rounds)))
        return 0
    found: dict[str, Any] = {
        "smollm2 by form of its pre-tokenizer": forms(corpus, options.rounds),
        "fastokens by threads inside": threads_inside(options.rounds),
        "qwen2 on the fast path after": after(corpus, options.rounds),
    }
    for name in ("smollm2", "qwen2"):
        found[f"{name} by size of pieces"] = sizes_of_pieces(subject(vocabulary_folder(name)), corpus, options.rounds)
    for what, figures in found.items():
        print(what, *(f"  {name:24} {value}" for name, value in figures.items()), sep="\n")
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
