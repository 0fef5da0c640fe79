"""Grammars on their way to matchers and tables: compiled on threads of their own, once by key.

Owns those threads, the cache of compiled grammars and the model's vocabulary, which is read when the first grammar
comes. Any thread may ask; whoever asked is told on a thread of the pool, or at once where the grammar is known.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

from ...contracts.errors import EngineFailed, TritandemError, told
from ...grammar import Grammar, Matcher, Vocabulary, compile_grammar
from ..step import mask_words
from .spellings import Spellings
from .tables import Table, Walker, may_be_small, table_of
from .threads import mask_pool

COMPILING_THREADS = 2
KEPT_GRAMMARS = 512

log = logging.getLogger(__name__)
OpenVocabulary = Callable[[int], Vocabulary]  # of so many ids at least; raises ConfigError


@dataclass(frozen=True, slots=True)
class Prepared:
    """A structure at its beginning, or why there is none."""

    structure: Matcher | Walker | None
    error: TritandemError | None
    compile_ns: int  # 0: it was known


class Preparer:
    def __init__(self, open_vocabulary: OpenVocabulary, vocab_size: int) -> None:
        self._open, self._words = open_vocabulary, mask_words(vocab_size)
        self._pool = ThreadPoolExecutor(COMPILING_THREADS, thread_name_prefix="grammar")
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, Future[tuple[Matcher, int]]] = OrderedDict()  # the latest used last
        self._tabulating = ThreadPoolExecutor(1, thread_name_prefix="tables")
        self._reading = threading.Lock()
        self._vocabulary: Vocabulary | None = None
        self._spellings: Spellings | None = None
        self._tables: dict[str, Table] = {}  # of kept grammars

    def warm(self) -> None:
        """Read the vocabulary now, on a thread of the pool."""
        self._pool.submit(self._read)

    def prepare(self, grammar: Grammar, tell: Callable[[Prepared], None]) -> None:
        """`tell` is called once, with a structure of the caller's own or an error. The first answers of a
        small one have a matcher, those behind them its table."""
        key = grammar.key
        with self._lock:
            future = self._kept.get(key)
            known = future is not None and future.done()
            if future is None:
                future = self._kept[key] = self._pool.submit(self._compile, grammar)
                if len(self._kept) > KEPT_GRAMMARS:
                    self._tables.pop(self._kept.popitem(last=False)[0], None)
            self._kept.move_to_end(key)
        future.add_done_callback(lambda done: tell(self._outcome(key, done, known)))

    def close(self) -> None:
        """Whoever waits is told; compilations that run are let finish."""
        self._pool.shutdown(cancel_futures=True)
        self._tabulating.shutdown(cancel_futures=True)

    def _compile(self, grammar: Grammar) -> tuple[Matcher, int]:
        vocabulary, started_ns = self._read(), time.monotonic_ns()
        matcher = compile_grammar(vocabulary, grammar)
        taken_ns = time.monotonic_ns() - started_ns
        if may_be_small(grammar):
            with suppress(RuntimeError):  # the pool is closed
                self._tabulating.submit(self._tabulate, grammar, matcher.copy())  # no answer waits for it
        return matcher, taken_ns

    def _tabulate(self, grammar: Grammar, matcher: Matcher) -> None:
        try:
            self._spellings = self._spellings or Spellings(matcher.vocabulary.spellings())
            table = table_of(grammar, matcher, self._spellings)
        except Exception:
            log.exception("a grammar could not be tabulated")
            return
        with self._lock:
            if table is not None and grammar.key in self._kept:
                self._tables[grammar.key] = table

    def _read(self) -> Vocabulary:
        with self._reading:
            if self._vocabulary is None:
                mask_pool()  # its threads may run where this one may
                vocabulary = self._open(32 * self._words)
                if vocabulary.words != self._words:
                    raise EngineFailed("the tokenizer has ids that the model has no logits for")
                self._vocabulary = vocabulary
            return self._vocabulary

    def _outcome(self, key: str, done: Future[tuple[Matcher, int]], known: bool) -> Prepared:
        try:
            matcher, compile_ns = done.result()
            with self._lock:
                table = self._tables.get(key)
            structure = matcher.copy() if table is None else Walker(table, matcher.vocabulary)
            return Prepared(structure, None, 0 if known else compile_ns)
        except CancelledError:
            return Prepared(None, EngineFailed("the engine is shutting down"), 0)
        except Exception as error:
            with self._lock:
                self._kept.pop(key, None)
            if isinstance(error, TritandemError):
                return Prepared(None, error, 0)
            log.exception("a grammar could not be compiled")
            return Prepared(None, EngineFailed(f"its grammar: {told(error)}"), 0)
