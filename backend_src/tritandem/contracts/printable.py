"""Text that came from outside, made fit for an error message, a log line or a span: bounded, and without control
characters. The one place that clips. Tier 0; knows nothing about who writes it where.
"""

from __future__ import annotations

import reprlib
from typing import Any

MAX_TEXT_CHARS = 4096  # of an error message; the longest of ours is a third of that
MAX_TRACEBACK_CHARS = 1 << 14  # of a log record

# C0, DEL and C1, line ends and direction marks of Unicode, and half characters, which UTF-8 cannot express.
_HIDDEN = [*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029, *range(0x202A, 0x202F), *range(0x2066, 0x206A)]
_ESCAPES = {code: f"\\u{code:04x}" for code in (*_HIDDEN, *range(0xD800, 0xE000))}
_ESCAPES_BUT_LINE_ENDS = {code: text for code, text in _ESCAPES.items() if code != ord("\n")}


class Shown(str):
    """A value already in the words that a message shows."""

    __slots__ = ()


def escaped(text: str) -> str:
    """Hidden characters as \\uXXXX, which JSON reads too."""
    return text.translate(_ESCAPES)


def printable(text: str, max_chars: int = MAX_TEXT_CHARS, *, lines: bool = False) -> str:
    """Clipped and escaped. `lines`: line ends stay, as a traceback needs them."""
    if len(text) > max_chars:
        text = f"{text[:max_chars]}... ({len(text)} characters)"
    return text.translate(_ESCAPES_BUT_LINE_ENDS) if lines else escaped(text)


def shown(value: object, max_chars: int = 80) -> Shown:
    """A value as `repr` writes it, shortened; what is cut off is not looked at."""
    if isinstance(value, Shown):
        return value
    if isinstance(value, (str, bytes)) and len(value) > max_chars:
        return Shown(printable(f"{repr(value[:max_chars])[: max_chars - 3]}... ({len(value)} characters)"))
    text = _REPR.repr(value) if isinstance(value, (list, tuple, dict, set)) else repr(value)
    return Shown(printable(text if len(text) <= max_chars else f"{text[: max_chars - 3]}... ({len(text)} characters)"))


def _of_containers() -> reprlib.Repr:
    short = reprlib.Repr()
    short.maxlist = short.maxtuple = short.maxdict = short.maxset = 8
    return short


_REPR: Any = _of_containers()
