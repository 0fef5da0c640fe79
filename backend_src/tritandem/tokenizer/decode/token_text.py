"""Ids to text, a few at a time: byte tables for the families whose decoders are known, windows for all others.

Owns what is known of a decoder's rules. Knows nothing about stop words or sequences. States are small values: a
copy taken before a push replays it. Thread-safe as long as each state has one owner.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from tokenizers import Tokenizer

from ..files.source import TokenizerSource

REPLACEMENT = "\ufffd"


class Undecoded(NamedTuple):
    """What a stream of ids has left over: bytes of an unfinished character, or ids whose text is not settled."""

    pending: bytes = b""
    at_start: bool = True  # nothing has been decoded yet
    ids: tuple[int, ...] = ()
    settled: int = 0  # ids[:settled] have been emitted, kept as context for the rest
    uncleaned: str = ""  # decoded, its white space not settled (CleanedText only)


# Nothing is left over and the text has begun: every decoder returns this very object when it can, so that callers
# may ask by identity.
SETTLED = Undecoded(at_start=False)


class TokenText(Protocol):
    """Turns chunks of ids into text. The chunks' texts and the last `finish` add up to transformers' `decode`."""

    finite: bool  # whether states repeat, so that what follows from a state and an id is worth remembering

    def open(self, prompt_ids: Sequence[int]) -> Undecoded:
        """The state after a prompt; an unfinished character at its end is completed by the answer."""

    def decode(self, state: Undecoded, ids: Sequence[int]) -> tuple[str, Undecoded]:
        """Text that later ids cannot change, and the new state."""

    def finish(self, state: Undecoded) -> str:
        """The text of what is left; an unfinished character becomes U+FFFD."""


def token_text(source: TokenizerSource) -> TokenText:
    """The decoder for a tokenizer, without any cleaning: a table where its rules are known."""
    kinds = _decoder_kinds(source.spec["decoder"])
    if kinds == ["ByteLevel"]:
        return ByteLevelText(_spellings(source))
    if kinds in (["Replace", "ByteFallback", "Fuse", "Strip"], ["Replace", "ByteFallback", "Fuse"]):
        spaces, *_, last = _flat(source.spec["decoder"])
        if spaces["pattern"] == {"String": "▁"} and spaces["content"] == " ":
            strip = last["type"] == "Strip"
            if not strip or (last["content"], last["start"], last["stop"]) == (" ", 1, 0):
                return ByteFallbackText(_spellings(source), strip)
    return WindowText(source.new_tokenizer())


class ByteLevelText:
    """Byte-level BPE: every id is a byte string, the text is UTF-8 with errors replaced.

    The rules of `tokenizers`' ByteLevel decoder: an entry spelled in the byte alphabet is those bytes, any other
    (an added token) its own UTF-8.
    """

    finite = True

    def __init__(self, spellings: Sequence[str]) -> None:
        byte_of = {char: byte for byte, char in enumerate(byte_alphabet())}
        self._bytes = [_bytes_of(spelling, byte_of) for spelling in spellings]
        self._texts = [_decoded_or_none(raw) for raw in self._bytes]
        self._text_of = self._texts.__getitem__

    def open(self, prompt_ids: Sequence[int]) -> Undecoded:
        return _waiting_for(_unfinished(b"".join(self._raw(token) for token in prompt_ids[-32:])))

    def decode(self, state: Undecoded, ids: Sequence[int]) -> tuple[str, Undecoded]:
        if not state.pending:
            try:
                return "".join(map(self._text_of, ids)), state  # type: ignore[arg-type]
            except (TypeError, IndexError):
                pass  # a token that ends inside a character, or an id without a text
        raw = state.pending + b"".join([self._raw(token) for token in ids])
        text, used = codecs.utf_8_decode(raw, "replace", False)
        return text, _waiting_for(raw[used:])

    def finish(self, state: Undecoded) -> str:
        return state.pending.decode("utf-8", "replace")

    def _raw(self, token: int) -> bytes:
        return self._bytes[token] if token < len(self._bytes) else b""


class ByteFallbackText:
    """SentencePiece BPE with byte tokens: `▁` is a space, `<0xE2>` a byte, one leading space may be dropped.

    `tokenizers` joins a run of byte tokens: valid UTF-8 as a whole, or one U+FFFD for each byte of the run. Here a
    character is emitted when it is complete, so that a stream does not wait for the end of its run.
    """

    finite = True

    def __init__(self, spellings: Sequence[str], strip_first_space: bool) -> None:
        self._strip = strip_first_space
        self._bytes = [_fallback_byte(spelling) for spelling in spellings]
        self._texts = [
            None if raw else spelling.replace("▁", " ") for spelling, raw in zip(spellings, self._bytes, strict=True)
        ]
        self._text_of = self._texts.__getitem__

    def open(self, prompt_ids: Sequence[int]) -> Undecoded:
        state = Undecoded()
        for token in prompt_ids[-32:]:
            _, state = self.decode(state, [token])
        silent = state.at_start and not any(self._raw(token) or self._text(token) for token in prompt_ids)
        return Undecoded(state.pending) if silent else _waiting_for(state.pending)

    def decode(self, state: Undecoded, ids: Sequence[int]) -> tuple[str, Undecoded]:
        if not state.pending and not state.at_start:
            try:
                return "".join(map(self._text_of, ids)), state  # type: ignore[arg-type]
            except (TypeError, IndexError):
                pass  # a byte token, or an id without a text
        out, pending = "", state.pending
        for token in ids:
            raw = self._raw(token)
            if raw:
                pending += raw
                text = _decoded_or_none(pending)
                out, pending = (out, pending) if text is None else (out + text, b"")
            elif text := self._text(token):
                out, pending = out + REPLACEMENT * len(pending) + text, b""
        if state.at_start and not out:
            return out, Undecoded(pending)
        drop = state.at_start and self._strip and out.startswith(" ")
        return out[1:] if drop else out, _waiting_for(pending)

    def finish(self, state: Undecoded) -> str:
        return REPLACEMENT * len(state.pending)

    def _raw(self, token: int) -> bytes:
        return self._bytes[token] if token < len(self._bytes) else b""

    def _text(self, token: int) -> str | None:
        return self._texts[token] if token < len(self._texts) else ""


class WindowText:
    """Any decoder, unknown rules: decode a short window twice, with and without the new ids; emit the difference.

    The context keeps rules about the beginning of a text away from its middle. A window that ends in U+FFFD waits.
    """

    CONTEXT_IDS = 6
    finite = False

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def open(self, prompt_ids: Sequence[int]) -> Undecoded:
        context = tuple(int(token) for token in prompt_ids[-self.CONTEXT_IDS :])
        return Undecoded(at_start=False, ids=context, settled=len(context))

    def decode(self, state: Undecoded, ids: Sequence[int]) -> tuple[str, Undecoded]:
        window = (*state.ids, *ids)
        text = self._difference(window, state.settled)
        if text.endswith(REPLACEMENT):
            return "", state._replace(ids=window)
        kept = window[-self.CONTEXT_IDS :]
        return text, state._replace(ids=kept, settled=len(kept))

    def finish(self, state: Undecoded) -> str:
        return self._difference(state.ids, state.settled)

    def _difference(self, window: tuple[int, ...], settled: int) -> str:
        before = self._tokenizer.decode(list(window[:settled]), skip_special_tokens=True)
        return self._tokenizer.decode(list(window), skip_special_tokens=True)[len(before) :]


def byte_alphabet() -> str:
    """The 256 characters in which byte-level BPE spells bytes 0 to 255 (GPT-2's `bytes_to_unicode`)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    shifted = iter(range(0x100, 0x200))
    return "".join(chr(byte) if byte in printable else chr(next(shifted)) for byte in range(256))


def _spellings(source: TokenizerSource) -> list[str]:
    """The vocabulary's entries by id; special tokens and gaps are empty, since `decode` skips them."""
    by_id = source.spellings
    special = {token.id for token in source.added_tokens if token.special}
    return ["" if token in special else by_id.get(token, "") for token in range(source.vocab_size)]


def _bytes_of(spelling: str, byte_of: dict[str, int]) -> bytes:
    try:
        return bytes([byte_of[char] for char in spelling])
    except KeyError:
        return spelling.encode("utf-8")


def _fallback_byte(spelling: str) -> bytes:
    if len(spelling) == 6 and spelling.startswith("<0x") and spelling.endswith(">"):
        try:
            return bytes([int(spelling[3:5], 16)])
        except ValueError:
            return b""
    return b""


def _decoded_or_none(raw: bytes) -> str | None:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return None


def _waiting_for(pending: bytes) -> Undecoded:
    return Undecoded(pending, at_start=False) if pending else SETTLED


def _unfinished(raw: bytes) -> bytes:
    """The bytes at the end that begin a character and do not finish it."""
    return raw[codecs.utf_8_decode(raw, "replace", False)[1] :]


def _flat(decoder: Any) -> list[Any]:
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [part for inner in decoder["decoders"] for part in _flat(inner)]
    return [decoder]


def _decoder_kinds(decoder: Any) -> list[str]:
    return [part["type"] for part in _flat(decoder)]
