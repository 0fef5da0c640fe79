"""A grammar as it travels: what kind, its text, and whether the answer may think first. Tier 0.

Knows nothing about how it is compiled (`grammar`), nor which field of which API it came from.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from enum import Enum

MAX_BYTES = 1 << 20  # of the canonical form


class Kind(str, Enum):
    JSON_OBJECT = "json_object"  # any object; no text
    JSON_SCHEMA = "json_schema"  # text: the schema
    REGEX = "regex"
    CHOICE = "choice"  # text: a JSON list of texts
    GRAMMAR = "grammar"  # text: Lark, or GBNF
    STRUCTURAL_TAG = "structural_tag"  # text: JSON, see `structural`


@dataclass(frozen=True, slots=True)
class Thinking:
    """How the model marks its thoughts, as text. `is_open`: the prompt has begun them, and the answer must end them;
    otherwise an answer may begin with thoughts, and need not."""

    begin: str
    end: str
    is_open: bool = False


@dataclass(frozen=True, slots=True)
class Grammar:
    """What the answer must be, from its first token on or after the end of its thoughts."""

    kind: Kind
    text: str = ""
    thinking: Thinking | None = None

    def to_bytes(self) -> bytes:
        """The one serialised form: equal grammars, equal bytes. Half characters, which JSON may name, survive."""
        thinking = self.thinking
        document = [
            self.kind.value,
            self.text,
            None if thinking is None else [thinking.begin, thinking.end, thinking.is_open],
        ]
        return json.dumps(document, separators=(",", ":")).encode()

    @staticmethod
    def from_bytes(data: bytes) -> Grammar:
        kind, text, thinking = json.loads(data)
        return Grammar(Kind(kind), text, None if thinking is None else Thinking(*thinking))

    @property
    def key(self) -> str:
        """For caches."""
        return hashlib.blake2b(self.to_bytes(), digest_size=16).hexdigest()
