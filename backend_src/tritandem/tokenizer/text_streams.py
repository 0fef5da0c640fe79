"""Ids back to text for many sequences at once, up to their stop words.

Owns what may be emitted now and what must wait: the bytes of an unfinished character, and an end that may become
a stop word. Knows nothing about requests or engines. A state belongs to one thread at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..contracts import Int32Array
from .cleaned_text import CleanedText
from .source import TokenizerSource
from .stop_words import StopWords, stop_words
from .token_text import Undecoded, token_text

# Ids at a prompt's end that can matter to the text of the next.
PROMPT_CONTEXT = 64


class TextStep(NamedTuple):
    """What one push gave one sequence."""

    text: str  # safe to emit; never any part of a stop word
    stopped: bool  # a stop word was completed: the answer ends here
    tokens_used: int  # of the pushed tokens; on a stop, up to the one that completed the stop word


class TextState:
    """One sequence's text so far that has not been emitted."""

    __slots__ = ("held", "stop", "stopped", "undecoded")

    def __init__(self, undecoded: Undecoded, stop: StopWords | None) -> None:
        self.undecoded = undecoded
        self.stop = stop
        self.held = ""  # decoded, but possibly the beginning of a stop word
        self.stopped = False


class TextStreams:
    """The detokenizer of one model. All emitted texts of a sequence add up to transformers' `decode` of its ids."""

    def __init__(self, source: TokenizerSource) -> None:
        self._text = token_text(source)
        if source.clean_up_spaces:
            self._text = CleanedText(self._text, source.renderer.clean_up_tokenization)

    def open(self, prompt_ids: Int32Array, words: tuple[str, ...] = ()) -> TextState:
        """Begin a sequence that continues `prompt_ids` (int32 [n]) and ends at any of `words`."""
        return TextState(self._text.open(prompt_ids[-PROMPT_CONTEXT:].tolist()), stop_words(words))

    def push(self, states: Sequence[TextState], tokens: Int32Array, counts: Int32Array) -> list[TextStep]:
        """One step a state: state i gets the next `counts[i]` of `tokens` (int32 [T]), in order."""
        ids: list[int] = tokens.tolist()
        decode = self._text.decode
        steps = []
        end = 0
        for state, count in zip(states, counts.tolist(), strict=True):
            begin, end = end, end + count
            if state.stop is None:
                text, state.undecoded = decode(state.undecoded, ids[begin:end])
                steps.append(TextStep(text, False, count))
            else:
                steps.append(self._push_until_stop(state, state.stop, ids[begin:end]))
        return steps

    def flush(self, state: TextState) -> str:
        """The rest when the sequence has ended without a stop word: what was held back, then a cut-off character."""
        if state.stopped:
            return ""
        rest = state.held + self._text.finish(state.undecoded)
        state.held, state.undecoded, state.stopped = "", Undecoded(at_start=False), True
        hit = state.stop.find(rest) if state.stop else None
        return rest[: hit[0]] if hit else rest

    def _push_until_stop(self, state: TextState, stop: StopWords, ids: list[int]) -> TextStep:
        if state.stopped:
            return TextStep("", True, 0)
        text, undecoded = self._text.decode(state.undecoded, ids)
        text = state.held + text
        hit = stop.find(text)
        if hit:
            state.stopped = True
            return TextStep(text[: hit[0]], True, self._tokens_until(state, ids, hit[1]))
        held = stop.held_back(text)
        state.undecoded, state.held = undecoded, text[len(text) - held :]
        return TextStep(text[: len(text) - held], False, len(ids))

    def _tokens_until(self, state: TextState, ids: list[int], chars: int) -> int:
        """How many of `ids` it takes for `held` and their text to reach `chars` characters."""
        undecoded, length = state.undecoded, len(state.held)
        for used, token in enumerate(ids, start=1):
            text, undecoded = self._text.decode(undecoded, [token])
            length += len(text)
            if length >= chars:
                return used
        return len(ids)
