"""Text made of token ids: token 7 reads `7.`; a stop word is the text of one token.

Refuses what a real detokenizer may refuse: tokens after a stop, a second flush, a token it cannot read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

UNREADABLE_TOKEN = 666


def text_of(tokens: Sequence[int]) -> str:
    return "".join(f"{token}." for token in tokens)


@dataclass
class FakeText:
    stop_words: tuple[str, ...]
    over: bool = False
    found: str = ""


@dataclass(frozen=True)
class FakeStep:
    text: str
    stopped: bool
    tokens_used: int


class FakeTextStreams:
    def __init__(self) -> None:
        self.pushes = 0
        self.fail_to_open = False

    def open(
        self, prompt_ids: np.ndarray, stop_words: tuple[str, ...], min_tokens: int, control_tokens: bool
    ) -> FakeText:
        if self.fail_to_open:
            raise ValueError("cannot open")
        return FakeText(tuple(stop_words))

    def push(self, states: list[FakeText], tokens: np.ndarray, counts: np.ndarray) -> list[FakeStep]:
        self.pushes += 1
        if len(states) != len(counts) or int(counts.sum()) != len(tokens):
            raise AssertionError(f"{len(states)} states, counts {counts}, {len(tokens)} tokens")
        if UNREADABLE_TOKEN in tokens:
            raise ValueError(f"token {UNREADABLE_TOKEN} is unreadable")
        steps, start, flat = [], 0, tokens.tolist()
        for state, count in zip(states, counts.tolist(), strict=True):
            if state.over and count:
                raise AssertionError("tokens after the end of a text")
            steps.append(self._step(state, flat[start : start + count]))
            start += count
        return steps

    def stop_word(self, state: FakeText) -> str:
        if not state.over:
            raise AssertionError("a text that no stop word has ended")
        return state.found

    def flush(self, state: FakeText) -> str:
        if state.over:
            raise AssertionError("a text was flushed after its end")
        state.over = True
        return ""

    def _step(self, state: FakeText, tokens: list[int]) -> FakeStep:
        for used, token in enumerate(tokens):
            if text_of([token]) in state.stop_words:
                state.over, state.found = True, text_of([token])
                return FakeStep(text_of(tokens[:used]), True, used + 1)
        return FakeStep(text_of(tokens), False, len(tokens))
