"""Pieces of a grammar put together in the language of llguidance: rules in Lark, and grammars of their own by name.

Pure. A special token has no text: where a literal spells one, its id stands in the rule.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from llguidance import regex_to_lark

ANY_TEXT = r"/(?s:.*)/"
# Bounded, so that a model cannot write blanks for ever: two in a line, or one line end and an indent.
BLANKS = r"[ \t]{1,2}|\r?\n[ \t]{0,40}"
# Every option by name: a schema may bring its own, and these go before them.
JSON_OPTIONS = {
    "item_separator": ",",
    "key_separator": ":",
    "whitespace_flexible": True,
    "whitespace_pattern": BLANKS,
    "coerce_one_of": False,
    "lenient": False,
}


class Lark:
    """`special_ids`: the vocabulary's special tokens by their text."""

    def __init__(self, special_ids: Mapping[str, int]) -> None:
        self._ids = special_ids
        longest_first = sorted(filter(None, special_ids), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
        self._rules: list[str] = []
        self._grammars: list[dict[str, Any]] = []
        self._count = 0

    def literal(self, text: str) -> str:
        """This text and nothing else; special tokens in it are themselves."""
        parts, at = [], 0
        for found in self._special.finditer(text) if self._special else ():
            parts += [quoted(text[at : found.start()]), f"<[{self._ids[found.group()]}]>"]
            at = found.end()
        return " ".join(part for part in (*parts, quoted(text[at:])) if part) or '""'

    def rule(self, body: str, attributes: str = "") -> str:
        name = self._name("r")
        self._rules.append(f"{name}{attributes}: {body}")
        return name

    def text_until(self, end: str) -> str:
        """Any text, and `end`, which it does not hold. `end` is not empty."""
        found = self._special.match(end) if self._special else None
        if found is None:
            plain = self._special.search(end) if self._special else None
            head = end if plain is None else end[: plain.start()]
            lazy = self.rule(f"{ANY_TEXT} {quoted(head)}", "[lazy]")
        else:
            head, lazy = found.group(), f"{ANY_TEXT} {self.literal(found.group())}"
        rest = end[len(head) :]
        return f"{lazy} {self.literal(rest)}" if rest else lazy

    def json(self, schema: Any) -> str:
        """`schema` was checked. Options of its own do not count."""
        if not isinstance(schema, dict):
            schema = {} if schema else {"not": {}}
        return self._add({"json_schema": {**schema, "x-guidance": JSON_OPTIONS}})

    def regex(self, pattern: str) -> str:
        """All of a text; anchors at both its ends say the same."""
        pattern = pattern.removeprefix("^")
        if pattern.endswith("$") and (len(pattern) - len(pattern[:-1].rstrip("\\"))) % 2 == 1:
            pattern = pattern[:-1]
        return self._add({"lark_grammar": f"start: /{regex_to_lark(pattern)}/"})

    def lark(self, text: str) -> str:
        return self._add({"lark_grammar": text})

    def source(self, start: str) -> str:
        """The whole grammar."""
        top = "\n".join(("%llguidance {}", f"start: {start}", *self._rules))
        return json.dumps({"grammars": [{"lark_grammar": top}, *self._grammars]})

    def _add(self, grammar: dict[str, Any]) -> str:
        name = self._name("g")
        self._grammars.append({"name": name, **grammar})
        return f"@{name}"

    def _name(self, letter: str) -> str:
        self._count += 1
        return f"{letter}{self._count}"


def quoted(text: str) -> str:
    """As Lark writes a text; nothing for an empty one."""
    return json.dumps(text) if text else ""
