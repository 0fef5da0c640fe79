"""Several answers to one request: each is a ticket of its own, and the client has one sink and one end.

Owns what the tickets have in common. Sender threads say what comes, of one request one at a time; a failure of one
answer is that of the request. Knows nothing about queues or engines.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from ..contracts.answers import Chunk, ResponseSink, Stamps
from ..contracts.errors import Outcome, TritandemError
from ..contracts.requests import GenerationRequest
from .lifecycle import Ending, ended_by_error
from .ticket import Ticket

SEEDS = 2**63


def parts(request: GenerationRequest) -> Iterator[GenerationRequest]:
    """What each of the `n` answers is asked with: draws of its own, by the seed after that of the one before. The
    prompt's tokens are scored for the first."""
    sampling = request.sampling
    for index in range(sampling.n):
        seed = (sampling.seed + index) % SEEDS
        scores = None if index else sampling.prompt_logprobs
        yield replace(request, sampling=replace(sampling, seed=seed, prompt_logprobs=scores))


class Choices:
    """`end(ticket, ending)` ends one of the tickets, and may be called from any thread."""

    def __init__(self, sink: ResponseSink, stream: bool, end: Callable[[Ticket, Ending], object]) -> None:
        self.engine = ""  # where the newest of its tickets was handed over
        self.tickets: list[Ticket] = []  # by index
        self._sink, self._stream, self._end = sink, stream, end
        self._lock = threading.Lock()  # held while a response goes out
        self._said: dict[int, Chunk] = {}  # last chunks, by index
        self._failure: Ending | None = None
        self._delivered = 0

    @property
    def ending(self) -> Ending:
        """Of the request, once all tickets have ended."""
        endings = [ticket.life.ending for ticket in self.tickets]
        stopped = [one for one in endings if one is not None and one.outcome is Outcome.STOPPED]
        ending = self._failure or (stopped or endings)[0]
        assert ending is not None
        return ending

    def say(self, index: int, chunk: Chunk, last: bool) -> None:
        """A chunk of one answer, perhaps its last."""
        with self._lock:
            if self._failure is not None:
                return
            chunk = replace(chunk, index=index)
            if not last:
                self._sink.send(chunk)
                return
            self._said[index] = chunk
            if len(self._said) < len(self.tickets):
                if self._stream:
                    self._sink.send(chunk)
            elif self._stream:
                self._sink.finish(chunk)
            else:
                self._sink.finish(_together([self._said[number] for number in range(len(self.tickets))]))

    def fail(self, error: TritandemError) -> None:
        """All of it ends."""
        with self._lock:
            if self._failure is not None:
                return
            self._failure = ended_by_error(error)
        try:
            self._sink.fail(error)  # nobody else reaches the sink any more
        finally:
            for ticket in list(self.tickets):
                self._end(ticket, self._failure)

    def cancelled(self, index: int) -> bool:
        """The first answer that has not ended asks for all."""
        first = next((number for number in range(len(self.tickets)) if number not in self._said), None)
        return index == first and self._sink.cancelled()

    def delivered(self) -> bool:
        """A sender is done with one of the tickets; True: with the last."""
        with self._lock:
            self._delivered += 1
            return self._delivered == len(self.tickets)


class ChoiceSink:
    """Where the chunks of one of the answers go: a ResponseSink."""

    def __init__(self, choices: Choices, index: int) -> None:
        self._choices, self._index = choices, index

    def send(self, chunk: Chunk) -> None:
        self._choices.say(self._index, chunk, last=False)

    def finish(self, chunk: Chunk) -> None:
        self._choices.say(self._index, chunk, last=True)

    def fail(self, error: TritandemError) -> None:
        self._choices.fail(error)

    def cancelled(self) -> bool:
        return self._choices.cancelled(self._index)


def stamps_of(stamps: Sequence[Stamps]) -> Stamps:
    """Of the request: its first answer's, first and last tokens being those of all."""
    firsts = [one.first_token_ns for one in stamps if one.first_token_ns]
    sent = [one.first_sent_ns for one in stamps if one.first_sent_ns]
    return replace(
        stamps[0],
        first_token_ns=min(firsts, default=0),
        last_token_ns=max(one.last_token_ns for one in stamps),
        first_sent_ns=min(sent, default=0),
    )


def _together(said: Sequence[Chunk]) -> Chunk:
    """One response of all answers."""
    stopped = any(one.outcome is Outcome.STOPPED for one in said)
    return replace(
        said[0],
        index=None,
        choices=tuple(said),
        num_output_tokens=sum(one.num_output_tokens for one in said),
        outcome=Outcome.STOPPED if stopped else said[0].outcome,
        stamps=stamps_of([one.stamps for one in said if one.stamps is not None]),
    )
