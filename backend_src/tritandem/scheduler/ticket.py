"""One request inside the scheduler, with the owner of every field.

`received` fields never change. `placement` belongs to the scheduling thread. Everything else is guarded by the
delivery desk's lock, except `text_state`, which the caller thread of the request's engine sets before the
engine knows the sequence and the reader thread of that engine uses after.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..contracts.answers import ResponseSink, Stamps, TokenLogprob
from ..contracts.arrays import Int64Array
from ..contracts.requests import GenerationRequest
from .lifecycle import Life
from .policy.waiting import Waiting

if TYPE_CHECKING:
    from .choices import Choices

NO_SEQUENCE = -1


class Ticket:
    """From `submit` to the observer's line."""

    __slots__ = (
        "__weakref__",
        "blank",
        "cached_tokens",
        "chars",
        "choices",
        "cumulative_logprob",
        "delivered_tokens",
        "dispatched_ns",
        "due_ns",
        "engine",
        "engine_name",
        "engine_stamps",
        "entry",
        "family",
        "first_sent_ns",
        "last_sent_ns",
        "life",
        "logprobs",
        "longest_pause_ns",
        "number",
        "prefilling_tokens",
        "prefix_hashes",
        "prefix_salt",
        "prompt_logprobs",
        "prompt_text",
        "prompt_tokens",
        "queued",
        "received_ns",
        "request",
        "responses",
        "sending",
        "seq_id",
        "sink",
        "stop_reason",
        "submissions",
        "taken_ns",
        "text_state",
        "texts",
        "tokens",
        "wants_logprobs",
    )

    def __init__(
        self,
        number: int,
        request: GenerationRequest,
        sink: ResponseSink,
        received_ns: int,
        choices: Choices | None = None,
        family: int = 0,
    ) -> None:
        # received
        self.number, self.request, self.sink = number, request, sink
        # Of one of several answers to a request: what they have in common, and a number that they have.
        self.choices, self.family = choices, family
        # That it costs: the other answers begin with the first one's prompt.
        self.prompt_tokens = 1 if choices is not None and choices.tickets else len(request.input_ids)
        self.received_ns = request.received_ns or received_ns
        output = request.output
        self.wants_logprobs = output.logprobs or output.cumulative_logprob
        # placement
        self.entry: Waiting | None = None  # set when it is admitted
        self.engine = ""  # whose book it stands in; "": nobody's
        self.submissions = 0
        self.dispatched_ns = 0
        self.prefilling_tokens = 0  # while handed over without a token: those its engine must compute
        self.prefix_hashes: list[int] = []
        self.prefix_salt = 0
        # desk
        self.life = Life()
        self.engine_name = ""
        self.queued = self.sending = False  # in a ready queue; in a sender's hands
        self.due_ns = self.taken_ns = 0  # when a sender may take it; when one last did
        self.first_sent_ns = self.last_sent_ns = 0
        self.longest_pause_ns = 0  # between two responses
        self.responses = self.delivered_tokens = 0
        self.text_state: Any = None
        self.prompt_text = "" if output.exclude_input else request.prompt_text or ""  # still to be sent
        self.reset_answer()

    def reset_answer(self) -> None:
        """Nothing of an answer yet; also when a request moves to another engine. Under the desk's lock."""
        self.seq_id = NO_SEQUENCE
        self.blank = True  # no token has arrived
        self.texts: list[str] = []  # not yet taken by a sender
        self.chars = 0
        self.tokens = 0
        self.logprobs: list[TokenLogprob] = []
        self.cumulative_logprob = 0.0
        self.prompt_logprobs: tuple[TokenLogprob, ...] | None = None  # still to be sent
        self.cached_tokens = 0
        self.stop_reason: str | int | None = None  # the stop word, or the id among the request's own, that ended it
        self.engine_stamps: Int64Array | None = None  # [4], see TokenBatch.stamps_ns

    def stamps(self, finished_ns: int) -> Stamps:
        engine = [0, 0, 0, 0] if self.engine_stamps is None else self.engine_stamps.tolist()
        accepted, prefill_start, first, last = engine
        return Stamps(
            received_ns=self.received_ns,
            tokenized_ns=self.request.tokenized_ns,
            dispatched_ns=self.dispatched_ns,
            accepted_ns=accepted,
            prefill_start_ns=prefill_start,
            first_token_ns=first,
            last_token_ns=last,
            first_sent_ns=self.first_sent_ns,
            finished_ns=finished_ns,
        )
