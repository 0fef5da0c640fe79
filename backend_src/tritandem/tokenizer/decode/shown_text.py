"""Text in which control tokens are shown as they are spelled, for who tells the parts of an answer apart by them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .token_text import SETTLED, TokenText, Undecoded


class ShownText:
    """Another decoder's text, and between it the control tokens. What stood unfinished before one stays so."""

    finite = False

    def __init__(self, inner: TokenText, spellings: Mapping[int, str]) -> None:
        self._inner, self._spellings = inner, spellings

    def open(self, prompt_ids: Sequence[int]) -> Undecoded:
        return self._inner.open(prompt_ids)

    def decode(self, state: Undecoded, ids: Sequence[int]) -> tuple[str, Undecoded]:
        parts: list[str] = []
        begin = 0
        for at, token in enumerate(ids):
            if (spelled := self._spellings.get(token)) is None:
                continue
            text, state = self._inner.decode(state, ids[begin:at])
            parts += (text, self._inner.finish(state), spelled)
            state, begin = SETTLED, at + 1
        text, state = self._inner.decode(state, ids[begin:])
        return "".join((*parts, text)), state

    def finish(self, state: Undecoded) -> str:
        return self._inner.finish(state)
