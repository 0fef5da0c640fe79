"""Grammars compiled, and matched token by token: masks of what may come next.

Any thread, one at a time for each matcher. Owns the limits of work. The interpreter runs on while a grammar is
compiled or a mask is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llguidance import LLExecutor, LLMatcher, LLParserLimits

from ..contracts.arrays import Int32Array
from ..contracts.errors import EngineFailed, InvalidRequest
from ..contracts.grammars import MAX_BYTES, Grammar
from ..contracts.printable import printable
from .source import source_of
from .vocabulary import Vocabulary

ALLOWED = "a grammar within this server's means"
MAX_REASON_CHARS = 300  # of which the beginning and the end say most


@dataclass(frozen=True, slots=True)
class Limits:
    """Of work and memory, in the units of llguidance: fuel is spent by the expression engine (50,000 in a ms while a
    grammar is compiled, 14,000 in a ms while a mask is made), an item is a rule that could go on (20,000 in a ms), a
    state of the lexer takes 1 to 2 kB."""

    compile_fuel: int = 1_000_000
    mask_fuel: int = 200_000
    mask_items: int = 50_000
    row_items: int = 2_000
    lexer_states: int = 50_000
    symbols: int = 200_000


DEFAULT = Limits()


class Matcher:
    """Where one answer stands in its grammar. `words` int32 make a mask: bit i of word w allows token 32 w + i."""

    def __init__(self, vocabulary: Vocabulary, state: LLMatcher) -> None:
        self.vocabulary, self.state = vocabulary, state

    def mask_into(self, row: Int32Array) -> None:
        """`row` int32 [vocabulary.words], contiguous, is overwritten with what may come next; end tokens are among it
        where the answer may end. Raises EngineFailed when the grammar has become too hard."""
        self.state.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        self.check()

    def check(self) -> None:
        """Raises EngineFailed when a mask or a token has left the grammar behind."""
        if self.state.is_error():
            raise EngineFailed(f"the grammar became too hard to follow: {_reason(self.state.get_error())}")

    def accept(self, token_id: int) -> bool:
        """False: not allowed here, and nothing has changed."""
        return bool(self.state.try_consume_tokens([token_id]))

    def may_end(self) -> bool:
        return bool(self.state.is_accepting())

    def is_over(self) -> bool:
        """Nothing but the end may follow."""
        return bool(self.state.is_stopped())

    def forced_tokens(self) -> list[int]:
        """The tokens that must come next, as the tokenizer itself would spell them; often none."""
        return list(self.state.compute_ff_tokens())

    def copy(self) -> Matcher:
        """Starts where this one stands, and shares what is costly."""
        return Matcher(self.vocabulary, self.state.deep_copy())

    def rollback(self, count: int) -> None:
        """Take back the last `count` accepted tokens, at most all. Raises ValueError for more."""
        if not self.state.rollback(count):
            raise ValueError(f"{count} tokens cannot be taken back")


class MaskPool:
    """Threads that make masks of many rows at once, without the interpreter."""

    def __init__(self, threads: int) -> None:
        self._threads = LLExecutor(num_threads=threads)

    def fill(self, matchers: Sequence[tuple[Matcher, int]], masks: Int32Array) -> None:
        """`masks` int32 [rows, words], contiguous: each matcher's mask goes to its row. Afterwards `check` each."""
        states = [(matcher.state, row) for matcher, row in matchers]
        rows, words = masks.shape
        self._threads.unsafe_compute_mask_ptr(states, masks.ctypes.data, words * 4, rows)


def compile_grammar(
    vocabulary: Vocabulary, grammar: Grammar, limits: Limits = DEFAULT, field: str = "structured_outputs"
) -> Matcher:
    """At its beginning. Raises InvalidRequest naming `field`, and what is wrong with the grammar."""
    if (size := len(grammar.to_bytes())) > MAX_BYTES:
        raise InvalidRequest(field, f"{size} bytes", f"at most {MAX_BYTES} bytes")
    source = source_of(grammar, vocabulary.special_ids, field)
    state = LLMatcher(
        vocabulary.tokens,
        source,
        log_level=0,
        limits=LLParserLimits(
            max_items_in_row=limits.row_items,
            initial_lexer_fuel=limits.compile_fuel,
            step_lexer_fuel=limits.mask_fuel,
            step_max_items=limits.mask_items,
            max_lexer_states=limits.lexer_states,
            max_grammar_size=limits.symbols,
            verbose_errors=False,
        ),
    )
    if state.is_error():
        raise InvalidRequest(field, grammar.text, f"{ALLOWED}: {_reason(state.get_error())}")
    return Matcher(vocabulary, state)


def _reason(message: str) -> str:
    message = message.removesuffix("\n<non-verbose/>").strip()
    if len(message) > MAX_REASON_CHARS:
        message = f"{message[: MAX_REASON_CHARS // 3]} ... {message[-MAX_REASON_CHARS // 3 :]}"
    return printable(message)
