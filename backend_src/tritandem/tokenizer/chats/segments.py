"""A rendered prompt as control tokens and plain text, told apart by who wrote them.

Owns the rule what may be a control token. Pure; knows nothing about templates or engines.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..files.source import AddedToken
from .authorship import MODEL, Span, spans_of


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of a rendered prompt: a control token that may be one, or text whatever it looks like."""

    text: str
    control_id: int | None  # None: plain text


class ControlTokens:
    """What steers a model, and where a prompt may hold it.

    All characters of a control token are the template's own. In what the model wrote earlier, tokens that are not
    special may stand as well: decoding shows those, as `</think>` or `<tool_call>`, so that they come back in a
    history as the tokens they were. A special one is never shown; where one stands, the model spelled it.
    """

    def __init__(self, tokens: Sequence[AddedToken]) -> None:
        self._tokens = {token.content: token for token in tokens}
        longest_first = sorted(map(re.escape, self._tokens), key=len, reverse=True)
        self._any = re.compile("|".join(longest_first) or "(?!)")

    def segments(self, prompt: str) -> list[Segment] | None:
        """The prompt cut at its control tokens; None where everything that looks like one is one.

        Adjacent plain text stays in one segment, so its ids are those of the text by itself.
        """
        text = str.__str__(prompt)
        found, refused = self._found(text, spans_of(prompt))
        if not refused:
            return None
        segments: list[Segment] = []
        at = 0
        for match in found:
            token = self._tokens[match.group()]
            before = text[at : match.start()]
            _append_text(segments, before.rstrip() if token.lstrip else before)
            segments.append(Segment(token.content, token.id))
            at = match.end()
        _append_text(segments, text[at:])
        return [_without_swallowed(segments, i, self._tokens) for i in range(len(segments))]

    def _found(self, text: str, spans: Sequence[Span]) -> tuple[list[re.Match[str]], bool]:
        """The control tokens, leftmost first, and whether other text looks like one."""
        found, refused, at = [], False, 0
        ends = [end for _, end, _ in spans]
        while match := self._any.search(text, at):
            touched = bisect_right(ends, match.start())
            if self._may_stand(match, spans[touched] if touched < len(spans) else None):
                found.append(match)
                at = match.end()
            else:
                refused = True
                at = match.start() + 1  # one that may stand can begin inside it
        return found, refused

    def _may_stand(self, match: re.Match[str], authored: Span | None) -> bool:
        """`authored`: the first span that ends behind the beginning of the match."""
        if authored is None or authored[0] >= match.end():
            return True
        begin, end, author = authored
        all_by_one = begin <= match.start() and match.end() <= end
        return author == MODEL and all_by_one and not self._tokens[match.group()].special


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
