"""JSON that clients wrote, parsed within bounds: what would hold up other requests is refused before it does.

Python parses JSON without letting any other thread run. A long text costs nothing (16 MB: 25 ms), but 16 MB of empty
lists take 2 s. Pure; knows nothing about what the values mean.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from ...contracts.errors import InvalidRequest

MAX_DIGITS = 300  # of an integer; a few more no float could hold
MAX_PARTS = 400_000  # quotes, brackets and commas: 10,000 messages of several parts each; 100 ms at most
HARMLESS_CHARS = 1 << 16  # even the worst of this size is parsed in 8 ms
_NO_PART = bytes(byte for byte in range(256) if byte not in b'"[{,')


def parse(
    name: str, text: str, max_chars: int, allowed: str, pairs_hook: Callable[[list[tuple[str, Any]]], Any] | None = None
) -> Any:
    """The value. Raises InvalidRequest for the field `name`, with what is `allowed` there."""
    if len(text) > max_chars:
        raise InvalidRequest(name, f"{len(text)} characters", f"at most {max_chars} characters")
    if len(text) > HARMLESS_CHARS and _has_more_parts(text, MAX_PARTS):
        raise InvalidRequest(name, f"more than {MAX_PARTS} quotes, brackets and commas", f"{allowed} of fewer")

    def bounded_int(digits: str) -> int:
        if len(digits) > MAX_DIGITS:
            raise InvalidRequest(name, f"an integer of {len(digits)} digits", f"at most {MAX_DIGITS} digits")
        return int(digits)

    try:
        return json.loads(text, parse_int=bounded_int, object_pairs_hook=pairs_hook)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(name, f"malformed JSON ({error})", allowed) from error


def deeper_than(value: Any, depth: int) -> bool:
    """Of a list or an object: whether brackets stand inside each other more than `depth` times."""
    level = [value]
    for _ in range(depth):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, (dict, list))
        ]
        if not level:
            return False
    return True


def _has_more_parts(text: str, limit: int) -> bool:
    """Whether there are more quotes, brackets and commas than that outside of texts."""
    if len(text.encode("utf-8", "replace").translate(None, _NO_PART)) <= limit:
        return False  # not even with those inside of texts: nearly always, and one quick pass
    without_escapes = text.replace("\\\\", "").replace('\\"', "")  # now every quote begins or ends a text
    quotes = without_escapes.count('"')
    if quotes > limit:
        return True
    outside = "".join(without_escapes.split('"')[::2])
    return quotes + sum(map(outside.count, "[{,")) > limit
