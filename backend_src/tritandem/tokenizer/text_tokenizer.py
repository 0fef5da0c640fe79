"""Text to ids for one model: keeps short texts ahead of long ones, renders chats, counts.

Owns the threads in which long texts wait for their engine. Knows nothing about requests or Triton. Every method
may be called from any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from ..config import TokenizerConfig
from ..contracts.errors import EngineFailed, InvalidRequest
from .chats.renderer import ChatRenderer
from .chats.segments import strings_in
from .decode.text_streams import TextStreams
from .encode.counters import Counters
from .encode.encoded import Encoded, Ids, TokenizerStats
from .encode.engines import Engines
from .encode.jobs import Job, run_job
from .encode.limits import longest_token_chars
from .encode.threads import cores_given, encode_threads
from .files.source import TokenizerSource

INLINE_MESSAGES = 64  # a template takes some 10 us for each
INLINE_IDS = 4096  # decoded in some 1 ms
Encode = Callable[[], Ids]


class TextTokenizer:
    """The tokenizer of one model. Ids are exactly those of `tokenizers` for the same text."""

    def __init__(self, source: TokenizerSource, config: TokenizerConfig) -> None:
        self._source = source
        self._config = config
        self._counters = Counters()
        self._engines = Engines(source, config, self._counters)
        self._beginning = self._engines.beginning(source)
        self._chat = ChatRenderer(source)
        # More than run at a time: a shorter text must not wait for a thread that a longer one pauses on.
        threads = 2 * encode_threads(config.threads, cores_given())
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="encode")
        self.json_text = source.json_text
        self.vocab_size = source.vocab_size
        self.end_ids = source.end_ids
        self.control_ids = {token.content: token.id for token in source.added_tokens if token.special}
        self.longest_token_chars = longest_token_chars(source)

    # -- text ------------------------------------------------------------------------------------

    def submit(
        self,
        text: str,
        *,
        add_special_tokens: bool = True,
        parse_special_tokens: bool = True,
        max_tokens: int | None = None,
        field: str = "text_input",
    ) -> Future[Encoded]:
        """A short text is encoded here, a long one in the pool.

        A text that begins with what `add_special_tokens` would put in front of it, BOS as a rule, gets no second one.
        With `parse_special_tokens` off, `<|im_end|>` and its like in a text are plain text. The future raises
        InvalidRequest naming `field` for a lone surrogate or more than `max_tokens` tokens, and EngineFailed when
        the tokenizer itself breaks; neither concerns any other text.
        """
        job = Job(text, field, max_tokens, self._counters)
        if add_special_tokens and parse_special_tokens and self._beginning:
            add_special_tokens = not text.startswith(self._beginning)
        if job.accepted(self.longest_token_chars):
            self._start(job, lambda: self._engines.encode(text, add_special_tokens, parse_special_tokens))
        return job.future

    def encode(self, text: str, **options: Any) -> Encoded:
        """As `submit`, waiting for the result. Raises InvalidRequest or EngineFailed."""
        return self.submit(text, **options).result()

    def encode_word(self, text: str) -> tuple[int, ...]:
        """The ids of a word by itself, without BOS or EOS (for bad words). Raises InvalidRequest."""
        return tuple(self.encode(text, add_special_tokens=False, field="bad_words").ids.tolist())

    def submit_ids(self, ids: Sequence[int]) -> Future[str]:
        """The text of ids, control tokens shown. A few are decoded here, many in the pool. Raises InvalidRequest."""
        for token in ids:
            if not 0 <= token < self.vocab_size:
                raise InvalidRequest("input_ids", token, f"ids in [0, {self.vocab_size})")
        future: Future[str] = Future()

        def run() -> None:
            try:
                # Of tokenizers itself: transformers' own would look for torch.
                future.set_result(self._source.renderer._tokenizer.decode(list(ids), skip_special_tokens=False))
            except Exception as error:  # the waiting request must hear of it
                future.set_exception(EngineFailed(f"the tokenizer could not decode: {type(error).__name__}"))

        if len(ids) <= INLINE_IDS:
            run()
        else:
            self._pool.submit(run)
        return future

    # -- chat ------------------------------------------------------------------------------------

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

        With `escape_special_tokens_in_chat` off, the ids equal `apply_chat_template(..., tokenize=True)` whatever
        the messages hold. Long conversations are rendered in the pool. The future raises InvalidRequest or
        EngineFailed.
        """
        here = self._renders_quickly(messages, tools)
        job = Job("", "messages", max_tokens, self._counters)

        def begin(start: Callable[[Job, Encode], None]) -> None:
            try:
                encode = self._render(job, messages, add_generation_prompt, tools, variables)
            except Exception as error:
                job.fail(error)
                return
            if job.accepted(self.longest_token_chars):
                start(job, encode)

        if here:
            begin(self._start)
        else:
            self._pool.submit(begin, run_job)
        return job.future

    # -- the rest --------------------------------------------------------------------------------

    def streams(self) -> TextStreams:
        """A detokenizer for this model's ids."""
        return TextStreams(self._source)

    def stats(self) -> TokenizerStats:
        """Counters for metrics."""
        return self._counters.snapshot(**self._engines.present())

    def close(self) -> None:
        """Wait for running texts, then stop every thread."""
        self._pool.shutdown(wait=True)
        self._engines.close()

    def _render(
        self, job: Job, messages: Any, add_generation_prompt: bool, tools: Any, variables: dict[str, Any]
    ) -> Encode:
        """Give the job its text; how that is encoded. Raises InvalidRequest."""
        if self._config.escape_special_tokens_in_chat:
            job.text, segments = self._chat.segments(messages, add_generation_prompt, tools, variables)
            if segments is not None:
                return lambda: self._engines.encode_segments(segments)
        else:
            job.text = self._chat.render(messages, add_generation_prompt, tools, variables)
        return lambda: self._engines.encode(job.text, False, True)

    def _renders_quickly(self, messages: Any, tools: Any) -> bool:
        """Whether rendering is no work to speak of; true also of what is no conversation at all."""
        if not isinstance(messages, (list, tuple)):
            return True
        chars = sum(map(len, strings_in([messages, tools])))
        return len(messages) <= INLINE_MESSAGES and chars <= self._config.inline_chars

    def _start(self, job: Job, encode: Encode) -> None:
        if len(job.text) > self._config.inline_chars:
            self._pool.submit(run_job, job, encode)
            return
        with self._engines.short_first.text(0):
            run_job(job, encode)
