"""Fifty prompts that have little in common: short and long, many scripts, code, emoji, digits, odd spacing."""

from __future__ import annotations

SENTENCES = (
    "The capital of France is",
    "Once upon a time",
    "A",
    " leading space",
    "trailing space ",
    "Water boils at a temperature of",
    "The three primary colours are red,",
    "Q: Who wrote Romeo and Juliet?\nA:",
    "Dear Sir or Madam,\n\nI am writing to",
    "The opposite of hot is",
    "List five animals:\n1. Dog\n2.",
    "In 1969, Neil Armstrong became the first person to",
    "My favourite recipe needs flour, eggs and",
    "to be, or not to be: that is",
    "She sells sea shells by the",
    "ONLY CAPITALS SHOULD FOLLOW:",
    "Roses are red,\nviolets are",
    "The quick brown fox jumps over the lazy",
)
SCRIPTS = (
    "La capitale de l'Italie est",
    "Die Hauptstadt von Deutschland ist",
    "El perro come en la",
    "日本の首都は",
    "中国的首都是",
    "Столица России —",
    "عاصمة مصر هي",
    "भारत की राजधानी",
    "한국의 수도는",
    "Η πρωτεύουσα της Ελλάδας είναι",
    "Türkiye'nin başkenti",
    "Zażółć gęślą jaźń, czyli",
)
CODE = (
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "for (int i = 0; i < 10; i++) {\n    printf(",
    "SELECT name, COUNT(*) FROM users WHERE",
    "<html>\n<head>\n  <title>",
    'import numpy as np\n\ndef mean(x):\n    """Return the mean."""\n    return',
    '{"name": "Ada", "born": 1815, "fields": [',
    "#!/bin/sh\nset -eu\nfor file in *.txt; do\n",
    "fn main() {\n\tlet mut total = 0;\n\tfor i in 0..10 {\n",
)
SYMBOLS = (
    "I love cats 🐈 and dogs 🐕 and",
    "👩‍👩‍👧‍👦 is a family of",
    "1, 2, 3, 4, 5,",
    "3.14159265358979323846",
    "12345 + 67890 =",
    "2024-01-31, 2024-02-29, 2024-03-31,",
    "+++ --- *** /// \\\\\\ ???",
    "a\tb\tc\n1\t2\t3\n",
    "     indented     by     spaces",
)
STORY = (
    "On day {day}, the keeper of the lighthouse wrote: wind {wind}, {ships} ships passed, and the lamp burned well. "
)


def _logbook(days: int, first_day: int) -> str:
    entries = (
        STORY.format(day=day, wind=("north", "south", "east", "west")[day * day % 4], ships=day * 7 % 23)
        for day in range(first_day, first_day + days)
    )
    return "".join(entries)


LONG = (
    _logbook(28, 1),  # about 750 tokens each, three chunks of a prefill; the second begins as the first does
    _logbook(28, 1) + "In the end",
    "\n".join(f"{i} squared is {i * i}" for i in range(1, 90)),
)
PROMPTS = (*SENTENCES, *SCRIPTS, *CODE, *SYMBOLS, *LONG)
