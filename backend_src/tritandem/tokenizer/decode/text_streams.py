"""Ids back to text for many sequences at once, up to their stop words.

Owns what may be emitted now and what must wait: the bytes of an unfinished character, and an end that may become
a stop word. Knows nothing about requests or engines. A state belongs to one thread at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ...contracts.arrays import Int32Array
from ..files.source import TokenizerSource
from .cleaned_text import CleanedText
from .shown_text import ShownText
from .stop_words import StopWords, stop_words
from .token_text import SETTLED, TokenText, Undecoded, token_text

# Ids at a prompt's end that can matter to the text of the next.
PROMPT_CONTEXT = 64
MAX_KNOWN = 1 << 17  # remembered steps of one token; 30 MB


class TextStep(NamedTuple):
    """What one push gave one sequence."""

    text: str  # safe to emit; never any part of a stop word
    stopped: bool  # a stop word was completed: the answer ends here
    tokens_used: int  # of the pushed tokens; on a stop, up to the one that completed the stop word


class TextState:
    """One sequence's text so far that has not been emitted."""

    __slots__ = ("early", "found", "held", "plain", "stop", "stopped", "text", "undecoded")

    def __init__(self, text: TokenText, undecoded: Undecoded, stop: StopWords | None, early: int, plain: bool) -> None:
        self.text = text
        self.undecoded = undecoded
        self.stop = stop
        self.plain = plain  # neither stop words nor control tokens
        self.early = early  # so many tokens more are text whatever they spell; 0 without stop words
        self.held = ""  # decoded, but possibly the beginning of a stop word
        self.stopped = False
        self.found = ""  # the stop word that was completed


class TextStreams:
    """The detokenizer of one model. All emitted texts of a sequence add up to transformers' `decode` of its ids."""

    def __init__(self, source: TokenizerSource) -> None:
        self._text: TokenText = token_text(source)
        if source.clean_up_spaces:
            self._text = CleanedText(self._text, source.renderer.clean_up_tokenization)
        spellings = {token.id: token.content for token in source.added_tokens if token.special}
        self._shown = ShownText(self._text, spellings)
        self._known: dict[tuple[Undecoded, int], tuple[TextStep, Undecoded]] = {}
        self._alone: dict[int, TextStep] = {}  # of these, the ones from SETTLED to SETTLED: nearly all tokens

    def open(
        self, prompt_ids: Int32Array, words: tuple[str, ...] = (), min_tokens: int = 0, control_tokens: bool = False
    ) -> TextState:
        """Begin a sequence that continues `prompt_ids` (int32 [n]) and ends at any of `words` that begins behind its
        first `min_tokens` tokens. `control_tokens`: they are part of the text."""
        text: TokenText = self._shown if control_tokens else self._text
        undecoded, stop = text.open(prompt_ids[-PROMPT_CONTEXT:].tolist()), stop_words(words)
        return TextState(text, undecoded, stop, min_tokens if stop else 0, stop is None and not control_tokens)

    def push(self, states: Sequence[TextState], tokens: Int32Array, counts: Int32Array) -> list[TextStep]:
        """One step a state: state i gets the next `counts[i]` of `tokens` (int32 [T]), in order."""
        ids: list[int] = tokens.tolist()
        if len(ids) == len(states) and bool((counts == 1).all()):
            push_one, alone = self._push_one, self._alone.get
            return [
                alone(token) or push_one(state, token)
                if state.undecoded is SETTLED and state.plain
                else push_one(state, token)
                for state, token in zip(states, ids, strict=True)
            ]
        steps = []
        end = 0
        for state, count in zip(states, counts.tolist(), strict=True):
            begin, end = end, end + count
            steps.append(self._push_some(state, ids[begin:end]))
        return steps

    def flush(self, state: TextState) -> str:
        """The rest when the sequence has ended without a stop word: what was held back, then a cut-off character."""
        if state.stopped:
            return ""
        rest = state.held + state.text.finish(state.undecoded)
        state.held, state.undecoded, state.stopped = "", Undecoded(at_start=False), True
        hit = state.stop.find(rest) if state.stop else None
        return rest[: hit[0]] if hit else rest

    def stop_word(self, state: TextState) -> str:
        """The stop word that ended the text; "": none did."""
        return state.found

    def _push_one(self, state: TextState, token: int) -> TextStep:
        if state.held or state.stopped or state.early or state.text is not self._text:
            return self._push_some(state, [token])
        step, undecoded = self._known.get((state.undecoded, token)) or self._follow(state.undecoded, token)
        if state.stop is not None and state.stop.may_begin_in(step.text):
            return self._push_some(state, [token])
        state.undecoded = undecoded
        return step

    def _follow(self, before: Undecoded, token: int) -> tuple[TextStep, Undecoded]:
        """What one token gives from a state; remembered where states repeat."""
        text, after = self._text.decode(before, [token])
        found = TextStep(text, False, 1), after
        if self._text.finite and len(self._known) < MAX_KNOWN:
            self._known[before, token] = found
            if before is after is SETTLED:
                self._alone[token] = found[0]
        return found

    def _push_some(self, state: TextState, ids: list[int]) -> TextStep:
        if state.stop is not None:
            return self._push_until_stop(state, state.stop, ids)
        text, state.undecoded = state.text.decode(state.undecoded, ids)
        return TextStep(text, False, len(ids))

    def _push_until_stop(self, state: TextState, stop: StopWords, ids: list[int]) -> TextStep:
        if state.stopped:
            return TextStep("", True, 0)
        if state.early:
            return self._push_early(state, stop, ids)
        text, undecoded = state.text.decode(state.undecoded, ids)
        text = state.held + text
        hit = stop.find(text)
        if hit:
            state.stopped, state.found = True, text[hit[0] : hit[1]]
            return TextStep(text[: hit[0]], True, self._tokens_until(state, ids, hit[1]))
        held = stop.held_back(text)
        state.undecoded, state.held = undecoded, text[len(text) - held :]
        return TextStep(text[: len(text) - held], False, len(ids))

    def _push_early(self, state: TextState, stop: StopWords, ids: list[int]) -> TextStep:
        early, rest = ids[: state.early], ids[state.early :]
        text, state.undecoded = state.text.decode(state.undecoded, early)
        state.early -= len(early)
        if not rest:
            return TextStep(text, False, len(early))
        step = self._push_until_stop(state, stop, rest)
        return TextStep(text + step.text, step.stopped, len(early) + step.tokens_used)

    def _tokens_until(self, state: TextState, ids: list[int], chars: int) -> int:
        """How many of `ids` it takes for `held` and their text to reach `chars` characters."""
        undecoded, length = state.undecoded, len(state.held)
        for used, token in enumerate(ids, start=1):
            text, undecoded = state.text.decode(undecoded, [token])
            length += len(text)
            if length >= chars:
                return used
        return len(ids)
