"""One text on its way through the tokenizer: checked, encoded, answered exactly once.

Owns the life of a job and where it is counted. Knows nothing about engines. A job is settled by one thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future

from ...contracts.errors import EngineFailed, InvalidRequest, told
from .counters import Counters
from .encoded import Encoded, Ids
from .limits import check_text, check_tokens
from .plain import ControlTokenSpelled

log = logging.getLogger(__name__)


class Job:
    """A text, the limits it must keep and the future of its ids."""

    def __init__(self, text: str, field: str, max_tokens: int | None, counters: Counters) -> None:
        self.text = text
        self.future: Future[Encoded] = Future()
        self._field = field
        self._max_tokens = max_tokens
        self._counters = counters
        self._submitted_ns = time.monotonic_ns()
        counters.entered()

    def accepted(self, longest_token_chars: int) -> bool:
        """Whether it may be encoded; a refusal is answered here."""
        try:
            check_text(self._field, self.text, self._max_tokens, longest_token_chars)
        except InvalidRequest as error:
            self.fail(error)
            return False
        return True

    def finish(self, found: Ids, begun_ns: int) -> None:
        """Answer with what an engine found, unless it is too long."""
        try:
            check_tokens(self._field, len(found.ids), self._max_tokens)
        except InvalidRequest as error:
            self.fail(error)
            return
        now_ns = time.monotonic_ns()
        result = Encoded(*found, queue_ns=begun_ns - self._submitted_ns, encode_ns=now_ns - begun_ns)
        self._counters.encoded(result)
        self.future.set_result(result)

    def fail(self, error: Exception) -> None:
        """Answer with the error, as one that a client may see."""
        if isinstance(error, ControlTokenSpelled):
            error = InvalidRequest(self._field, str(error), "text this vocabulary can write without control tokens")
        elif not isinstance(error, InvalidRequest):
            log.error("a text could not be encoded", exc_info=error)
            error = EngineFailed(f"the tokenizer failed: {told(error)}")
        self._counters.refused()
        self.future.set_exception(error)


def run_job(job: Job, encode: Callable[[], Ids]) -> None:
    """Encode the job's text and answer it."""
    begun_ns = time.monotonic_ns()
    try:
        found = encode()
    except Exception as error:  # of whatever class an engine raises
        job.fail(error)
    else:
        job.finish(found, begun_ns)
