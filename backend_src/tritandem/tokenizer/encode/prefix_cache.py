"""Remembers the ids of long beginnings of prompts, so that the next turn of a chat encodes only what is new.

Owns the cache (least recently used goes first, bounded in bytes) and the rule where a text may be parted: right
before a control token that nothing else can overlap. Used on the slow path only: beside a fast engine it saves
nothing. Thread-safe.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from ...contracts.arrays import Int32Array
from ..files.source import AddedToken

MIN_PREFIX_CHARS = 1024
MAX_PARTINGS = 256  # the last ones of a text; more turns than that are encoded again
ENTRY_OVERHEAD_BYTES = 200


@dataclass(frozen=True, slots=True)
class Known:
    """The longest remembered beginning of a text."""

    chars: int  # text[:chars]
    ids: Int32Array


class PrefixCache:
    """Ids by beginning. Ids are those without BOS or EOS, so one entry serves both settings of special tokens."""

    def __init__(self, parting_tokens: Sequence[str], max_bytes: int) -> None:
        self._tokens = parting_tokens
        self._max_bytes = max_bytes
        self._entries: OrderedDict[bytes, Int32Array] = OrderedDict()
        self._lock = threading.Lock()
        self._bytes = 0
        self.hits = self.misses = 0

    def partings(self, text: str) -> list[int]:
        """Where `text` may be parted, ascending; beginnings too short to pay are left out."""
        found: set[int] = set()
        for token in self._tokens:
            at = text.rfind(token)
            while at >= MIN_PREFIX_CHARS and len(found) < MAX_PARTINGS:
                found.add(at)
                at = text.rfind(token, 0, at)
        return sorted(found)[-MAX_PARTINGS:]

    def find(self, keys: Sequence[tuple[int, bytes]]) -> Known | None:
        """The longest beginning that is remembered. `keys` from `keys_of`."""
        with self._lock:
            for chars, key in reversed(keys):
                ids = self._entries.get(key)
                if ids is not None:
                    self._entries.move_to_end(key)
                    self.hits += 1
                    return Known(chars, ids)
            self.misses += 1
            return None

    def remember(self, key: bytes, ids: Int32Array) -> None:
        """Keep the ids of a beginning; drops the least recently used until they fit."""
        size = ids.nbytes + ENTRY_OVERHEAD_BYTES
        if size > self._max_bytes:
            return
        with self._lock:
            old = self._entries.pop(key, None)
            self._bytes += size - (old.nbytes + ENTRY_OVERHEAD_BYTES if old is not None else 0)
            self._entries[key] = ids
            while self._bytes > self._max_bytes:
                _, dropped = self._entries.popitem(last=False)
                self._bytes -= dropped.nbytes + ENTRY_OVERHEAD_BYTES

    def present(self) -> dict[str, int]:
        """Counts since the start, by the names of TokenizerStats."""
        with self._lock:
            return {"cache_hits": self.hits, "cache_misses": self.misses}


def keys_of(text: str, partings: Sequence[int]) -> list[tuple[int, bytes]]:
    """(characters, 256-bit digest) of the beginning at every parting, in one pass over the text."""
    digest = hashlib.sha256()
    keys = []
    begin = 0
    for end in partings:
        digest.update(text[begin:end].encode("utf-8"))
        keys.append((end, digest.digest()))
        begin = end
    return keys


def parting_tokens(control: Sequence[AddedToken], added: Sequence[AddedToken], template: str) -> list[str]:
    """The control tokens a template writes whose every occurrence is a boundary: enc(a) + enc(b) == enc(a + b)."""
    return [
        token.content
        for token in control
        if token.content in template and len(token.content) > 1 and _is_boundary(token, added)
    ]


def _is_boundary(token: AddedToken, added: Sequence[AddedToken]) -> bool:
    """No added token can begin before an occurrence and reach into it, none that begins with it has flags."""
    text = token.content
    for other in added:
        content = other.content
        if text in content[1:] or any(
            content.endswith(text[:length]) for length in range(1, min(len(text), len(content)))
        ):
            return False
        if content.startswith(text) and not other.flag_free:
            return False
    return True
