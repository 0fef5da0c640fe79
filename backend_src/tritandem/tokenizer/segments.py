"""Control tokens in untrusted text: marked before a template is rendered, told apart after.

Owns the markers and the cutting of a rendered prompt into control tokens and plain text. Pure; knows nothing about
templates or engines.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .source import AddedToken


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of a rendered prompt: a control token that the template wrote, or text whatever it looks like."""

    text: str
    control_id: int | None  # None: plain text


class Markers:
    """Two private-use characters that occur in none of `untrusted`: they bracket what must stay plain text."""

    def __init__(self, untrusted: Any, control: tuple[AddedToken, ...]) -> None:
        used = set().union(*(set(text) for text in strings_in(untrusted) if not text.isascii()))
        free = (chr(code) for code in range(0x10F000, 0x10FFFE) if chr(code) not in used)
        self._open, self._close = next(free), next(free)
        self._control = {token.content: token for token in control}
        self._beginnings = tuple({text[:length] for text in self._control for length in range(1, len(text))})
        longest_first = sorted(map(re.escape, self._control), key=len, reverse=True)
        self._control_re = re.compile("|".join(longest_first) or "(?!)")

    def needed(self, value: Any) -> bool:
        """Whether any string in `value` holds a control token or the beginning of one at its end."""
        return any(self._control_re.search(text) or self._ends_in_a_beginning(text) for text in strings_in(value))

    def mark(self, value: Any) -> Any:
        """A copy of a message, list or string with every control token in its strings (and keys) bracketed.

        A string that ends in the beginning of a control token gets a lone mark, so that the next string, which the
        template may append to it, cannot complete the token.
        """
        if isinstance(value, str):
            marked = self._control_re.sub(lambda match: self._open + match.group() + self._close, value)
            return marked + self._open if self._ends_in_a_beginning(value) else marked
        if isinstance(value, dict):
            return {self.mark(key): self.mark(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.mark(item) for item in value]
        return value

    def cut(self, rendered: str) -> list[Segment]:
        """The rendered prompt without marks, cut at the control tokens that the template itself wrote.

        Adjacent plain text stays in one segment, so its ids are those of the text without any marks.
        """
        segments: list[Segment] = []
        plain = ""
        for text, trusted in self._stretches(rendered):
            at = 0
            for match in self._control_re.finditer(text) if trusted else ():
                token = self._control[match.group()]
                plain += text[at : match.start()]
                _append_text(segments, plain.rstrip() if token.lstrip else plain)
                segments.append(Segment(token.content, token.id))
                plain, at = "", match.end()
            plain += text[at:]
        _append_text(segments, plain)
        return [_without_swallowed(segments, i, self._control) for i in range(len(segments))]

    def _stretches(self, rendered: str) -> Iterator[tuple[str, bool]]:
        """(text, may hold the template's control tokens), split at the marks."""
        bracketed = f"{self._open}({self._control_re.pattern}){self._close}|[{self._open}{self._close}]"
        at = 0
        for match in re.finditer(bracketed, rendered):
            yield rendered[at : match.start()], True
            if match.group(1):
                yield match.group(1), False
            at = match.end()
        yield rendered[at:], True

    def _ends_in_a_beginning(self, text: str) -> bool:
        return text.endswith(self._beginnings)


def strings_in(value: Any) -> Iterator[str]:
    """Every string inside messages, tools or variables; keys of dictionaries included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from strings_in(key)
            yield from strings_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from strings_in(item)


def _append_text(segments: list[Segment], text: str) -> None:
    if text:
        segments.append(Segment(text, None))


def _without_swallowed(segments: list[Segment], index: int, control: dict[str, AddedToken]) -> Segment:
    """A segment without the white space that a control token with `rstrip` before it takes."""
    segment = segments[index]
    before = segments[index - 1] if index else None
    if segment.control_id is None and before and before.control_id is not None and control[before.text].rstrip:
        return Segment(segment.text.lstrip(), None)
    return segment
