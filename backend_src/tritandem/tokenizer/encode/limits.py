"""What text is refused, before or after it costs time.

Pure checks. Knows nothing about engines.
"""

from __future__ import annotations

from ...contracts.errors import InvalidRequest
from ..files.source import TokenizerSource


def check_text(field: str, text: str, max_tokens: int | None, longest_token_chars: int) -> None:
    """Refuse what cannot be valid. Raises InvalidRequest; costs microseconds, however long the text is.

    A text of n characters has at least n / longest_token_chars tokens.
    """
    if not isinstance(text, str):
        raise InvalidRequest(field, text, "a string")
    if max_tokens is not None and len(text) > max_tokens * longest_token_chars:
        raise InvalidRequest(
            field,
            f"{len(text)} characters",
            f"at most {max_tokens} tokens, which {max_tokens * longest_token_chars} characters always exceed",
        )
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            given = f"a lone surrogate U+{ord(text[error.start]):04X} at character {error.start}"
            raise InvalidRequest(field, given, "text that UTF-8 can express") from error


def check_tokens(field: str, tokens: int, max_tokens: int | None) -> None:
    """Raises InvalidRequest for more than `max_tokens` ids."""
    if max_tokens is not None and tokens > max_tokens:
        raise InvalidRequest(field, f"{tokens} tokens", f"at most {max_tokens} tokens")


def longest_token_chars(source: TokenizerSource) -> int:
    """The most characters of text one id can stand for.

    A vocabulary entry has at least as many characters as its text: byte-level entries spell every byte as one
    character. Two cases shrink text before the vocabulary sees it, by at most a factor of four in characters that
    composition joins; the factor below covers both.
    """
    longest = max(map(len, source.spellings.values()), default=1)
    return longest if source.spec["normalizer"] is None else longest * 4
