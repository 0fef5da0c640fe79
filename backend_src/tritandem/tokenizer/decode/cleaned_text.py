"""transformers' `clean_up_tokenization_spaces` for text that arrives in pieces (WordPiece and Unigram models only).

Owns the rule how far the text so far can be cleaned without knowing the rest. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .token_text import TokenText, Undecoded

# No pattern that cleaning looks for ("␣.", "␣'␣", "␣n't", "␣'ve", ...) goes across a space that follows any other
# character than these: none begins before such a space and ends after it, and none arises there from cleaning.
JOINING = frozenset(" 'n")


class CleanedText:
    """Another decoder's text, cleaned; what stands after the last safe space waits."""

    finite = False

    def __init__(self, inner: TokenText, clean: Callable[[str], str]) -> None:
        self._inner = inner
        self._clean = clean

    def open(self, prompt_ids: Sequence[int]) -> Undecoded:
        """As the inner decoder. The prompt's own end is not cleaned again."""
        return self._inner.open(prompt_ids)

    def decode(self, state: Undecoded, ids: Sequence[int]) -> tuple[str, Undecoded]:
        """Cleaned text up to the last safe space."""
        text, after = self._inner.decode(state, ids)
        text = state.uncleaned + text
        end = last_safe_space(text)
        return self._clean(text[:end]), after._replace(uncleaned=text[end:])

    def finish(self, state: Undecoded) -> str:
        """The rest, cleaned."""
        return self._clean(state.uncleaned + self._inner.finish(state))


def last_safe_space(text: str) -> int:
    """The index of the last space where cleaning the two sides apart is cleaning the whole; 0 without any."""
    at = text.rfind(" ")
    while at > 0 and text[at - 1] in JOINING:
        at = text.rfind(" ", 0, at)
    return max(at, 0)
