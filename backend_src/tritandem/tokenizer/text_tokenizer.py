"""Text to ids: chooses an engine for every text, keeps short texts ahead of long ones, counts.

Owns the thread pool for long texts and the order in which engines are tried. Knows nothing about requests or
Triton. Every method may be called from any thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from ..config import TokenizerConfig
from ..contracts import InvalidRequest
from .chat import ChatRenderer
from .counters import Counters
from .encoded import Encoded, TokenizerStats
from .engines import Engines
from .limits import check_text, check_tokens, longest_token_chars
from .placement import cores_given, encode_threads
from .source import TokenizerSource
from .text_streams import TextStreams


class TextTokenizer:
    """The tokenizer of one model. Ids are exactly those of `tokenizers` for the same text."""

    def __init__(self, source: TokenizerSource, config: TokenizerConfig) -> None:
        self._source = source
        self._config = config
        self._counters = Counters()
        self._engines = Engines(source, config, self._counters)
        self._chat = ChatRenderer(source)
        self._threads = encode_threads(config.threads, cores_given())
        self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="encode")
        tokenizer = self._engines.reference
        self.vocab_size = tokenizer.get_vocab_size(with_added_tokens=True)
        self.end_ids = source.end_ids
        self.bos_id = source.bos_id
        self.special_ids = frozenset(token.id for token in source.added_tokens if token.special)
        self.longest_token_chars = longest_token_chars(source)

    # -- text ------------------------------------------------------------------------------------

    def submit(
        self,
        text: str,
        *,
        add_special_tokens: bool = True,
        max_tokens: int | None = None,
        parse_special_tokens: bool = True,
        field: str = "text_input",
    ) -> Future[Encoded]:
        """Encode one text; short ones are done when this returns, long ones run in the pool.

        With `parse_special_tokens` off, `<|im_end|>` and its like in the text are plain text. The future raises
        InvalidRequest naming `field` for lone surrogates and for more than `max_tokens` tokens.
        """

        def encode(queued_ns: int) -> Encoded:
            ids, engine, cached = self._engines.encode(text, add_special_tokens, parse_special_tokens)
            check_tokens(field, len(ids), max_tokens)
            return Encoded(ids, engine, cached, queued_ns)

        def check() -> None:
            check_text(field, text, max_tokens, self.longest_token_chars)

        return self._start(check, encode, long=len(text) > self._config.inline_chars)

    def submit_batch(self, texts: Sequence[str], **options: Any) -> list[Future[Encoded]]:
        """`submit` for each text, the long ones handed to the pool last, so that they delay no short one."""
        futures: dict[int, Future[Encoded]] = {}
        for index in sorted(range(len(texts)), key=lambda index: len(texts[index])):
            futures[index] = self.submit(texts[index], **options)
        return [futures[index] for index in range(len(texts))]

    def encode(self, text: str, **options: Any) -> Encoded:
        """As `submit`, waiting for the result. Raises InvalidRequest."""
        return self.submit(text, **options).result()

    def encode_batch(self, texts: Sequence[str], **options: Any) -> list[Encoded | InvalidRequest]:
        """One entry a text, in order; a text that is refused harms no other."""
        results: list[Encoded | InvalidRequest] = []
        for future in self.submit_batch(texts, **options):
            try:
                results.append(future.result())
            except InvalidRequest as error:
                results.append(error)
        return results

    def encode_word(self, text: str) -> tuple[int, ...]:
        """The ids of a word by itself, without BOS or EOS (for bad words). Raises InvalidRequest."""
        return tuple(self.encode(text, add_special_tokens=False, field="bad_words").ids.tolist())

    # -- chat ------------------------------------------------------------------------------------

    def render_chat(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[dict[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The prompt as `transformers` renders it. Raises InvalidRequest naming the message that is wrong.

        Text that a user wrote cannot be told from the template's any more: encode chats with `encode_chat`.
        """
        return self._chat.render(messages, add_generation_prompt, tools, variables)

    def submit_chat(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[dict[str, Any]] | None = None,
        max_tokens: int | None = None,
        **variables: Any,
    ) -> Future[Encoded]:
        """Render and encode a conversation; the template's control tokens are tokens, those in messages plain text.

        With `escape_special_tokens_in_chat` off, the ids equal `apply_chat_template(..., tokenize=True)` whatever the
        messages hold. The future raises InvalidRequest.
        """
        if not self._config.escape_special_tokens_in_chat:
            try:
                text = self._chat.render(messages, add_generation_prompt, tools, variables)
            except InvalidRequest as error:
                return _failed(error)
            return self.submit(text, add_special_tokens=False, max_tokens=max_tokens, field="messages")
        try:
            text, segments = self._chat.segments(messages, add_generation_prompt, tools, variables)
        except InvalidRequest as error:
            return _failed(error)
        if segments is None:
            return self.submit(text, add_special_tokens=False, max_tokens=max_tokens, field="messages")

        def encode(queued_ns: int) -> Encoded:
            ids, engine = self._engines.encode_segments(segments)
            check_tokens("messages", len(ids), max_tokens)
            return Encoded(ids, engine, 0, queued_ns)

        def check() -> None:
            check_text("messages", text, max_tokens, self.longest_token_chars)

        return self._start(check, encode, long=len(text) > self._config.inline_chars)

    def encode_chat(self, messages: Sequence[dict[str, Any]], **options: Any) -> Encoded:
        """As `submit_chat`, waiting for the result. Raises InvalidRequest."""
        return self.submit_chat(messages, **options).result()

    # -- the rest --------------------------------------------------------------------------------

    def streams(self) -> TextStreams:
        """A detokenizer for this model's ids."""
        return TextStreams(self._source)

    def stats(self) -> TokenizerStats:
        return self._counters.snapshot(**self._engines.present())

    def close(self) -> None:
        """Wait for running texts, then stop every thread."""
        self._pool.shutdown(wait=True)
        self._engines.close()

    def _start(self, check: Callable[[], None], encode: Callable[[int], Encoded], long: bool) -> Future[Encoded]:
        """Run `check` and then `encode(ns it waited)`: here when short, in the pool when long."""
        future: Future[Encoded] = Future()
        submitted_ns = time.monotonic_ns()
        self._counters.entered()

        def run() -> None:
            try:
                begun_ns = time.monotonic_ns()
                result = encode(begun_ns - submitted_ns)
                result = replace(result, encode_ns=time.monotonic_ns() - begun_ns)
            except BaseException as error:
                self._counters.refused()
                future.set_exception(error)
            else:
                self._counters.encoded(result)
                future.set_result(result)

        try:
            check()
        except InvalidRequest as error:
            self._counters.refused()
            future.set_exception(error)
            return future
        if long:
            self._pool.submit(run)
        else:
            run()
        return future


def _failed(error: InvalidRequest) -> Future[Encoded]:
    future: Future[Encoded] = Future()
    future.set_exception(error)
    return future
