"""Fuzzes every engine of the tokenizer against `tokenizers`: adversarial texts, long runs, random Unicode, and every
character once.

Run as `python -m tests.fuzz [--texts N] [--seed S] [NAME ...]`. The last line is one JSON document; exits 1 when a
claim was refuted. Each refutation is printed with the seed and text that repeat it.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time

from tritandem.tokenizer.encode.threads import use_own_threads_only

from .claims import refute, subject
from .texts import all_characters, texts, wrong_about
from .vocabularies import VOCABULARIES, Unavailable, vocabulary_folder

PRINTED = 5  # refutations of one vocabulary that are printed in full


def fuzz(name: str, count: int, seed: int) -> dict[str, object]:
    """Try one vocabulary; the counts for the report."""
    it = subject(vocabulary_folder(name))
    rng = random.Random(f"{seed} {name}")
    tried = refuted = cuts = 0
    begun = time.monotonic()
    for text in texts(rng, count, it):
        tried += 1
        cuts += len(it.rules.split(text, 1)) - 1 if it.rules else 0
        reason = refute(it, text, rng)
        if reason:
            refuted += 1
            if refuted <= PRINTED:
                print(f"REFUTED {name} seed {seed} text {tried}: {reason[:400]}\n  {text[:400]!r}", flush=True)
    wrong = wrong_about(it, all_characters())
    refuted += len(wrong)
    if wrong:
        print(f"REFUTED {name} {len(wrong)} of every character's places: {wrong[:PRINTED]!a}", flush=True)
    seconds = time.monotonic() - begun
    print(f"{name:20} {tried:7} texts {cuts:9} cuts {refuted:4} refuted {seconds:7.1f} s", flush=True)
    fast = it.fast is not None
    return {"texts": tried, "cuts": cuts, "refuted": refuted, "fast": fast, "pieces": it.rules is not None}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="vocabularies; all by default")
    parser.add_argument("--texts", type=int, default=20_000, help="texts a vocabulary (default 20000)")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="default: from the clock")
    options = parser.parse_args()
    use_own_threads_only()
    report: dict[str, object] = {}
    refuted = 0
    for name in options.names or ["smollm2", *VOCABULARIES]:
        try:
            found = fuzz(name, options.texts, options.seed)
        except Unavailable as reason:
            print(f"{name:20} skipped: {reason}", flush=True)
            continue
        report[name] = found
        refuted += int(str(found["refuted"]))
    print(json.dumps({"seed": options.seed, "refuted": refuted, "vocabularies": report}))
    return 1 if refuted or not report else 0


if __name__ == "__main__":
    sys.exit(main())
