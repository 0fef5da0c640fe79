"""From responses to chunks and, at the end, to one result.

Owns the reading of output tensors and the state of one answer. Knows nothing about transports. One
answer is fed by one thread or task.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tritandem_client.errors import TritandemClientError
from tritandem_client.results import Choice, Chunk, Result, Timings, TokenLogprob

Outputs = Mapping[str, list[Any]]  # output tensors by name, as flat lists of Python objects

# For deployments that have no `outcome` output; every other finish reason is COMPLETED.
_OUTCOME_OF_REASON = {"cancelled": "STOPPED", "error": "FAILED"}

# The elements of the output `stamps`, in order.
STAMPS = (
    "received_ns",
    "tokenized_ns",
    "dispatched_ns",
    "accepted_ns",
    "prefill_start_ns",
    "first_token_ns",
    "last_token_ns",
    "first_sent_ns",
    "finished_ns",
)


class Answer:
    """Collects the responses of one request; ends exactly once: `complete`, `cancel` or `fail`."""

    def __init__(self, request_id: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.request_id = request_id
        self.ended = False
        self._result: Result | None = None
        self._clock = clock
        self._sent_s = clock()
        self._first_s = self._last_s = 0.0
        self._first_tokens = 0
        self._parts = [_Part()]  # of each of the answers, by index
        self._prompt_logprobs: tuple[TokenLogprob, ...] = ()
        self._latest: dict[str, list[Any]] = {}  # newest value of each output
        self._output_tokens = self._cached_tokens = 0

    @property
    def text(self) -> str:
        """What has been received so far, of the first answer if there are several."""
        return "".join(self._parts[0].texts)

    @property
    def started(self) -> bool:
        return self._first_s > 0.0

    def final(self) -> Result:
        """Raises RuntimeError before the end and after a failure."""
        if self._result is None:
            raise RuntimeError("no result: the stream has " + ("failed" if self.ended else "not ended yet"))
        return self._result

    def add(self, outputs: Outputs) -> Chunk | None:
        """Take one response in. None when it carries nothing for the caller: it is empty, or comes after the end."""
        if not outputs or self.ended:
            return None
        count = len(outputs.get("text_output", ()))
        chunks = [self._take(outputs, at) for at in range(max(1, count))]
        self._last_s = self._clock()
        tokens = sum(chunk.num_output_tokens for chunk in chunks)
        if not self.started and (tokens or any(chunk.text for chunk in chunks)):
            self._first_s, self._first_tokens = self._last_s, tokens
        self._output_tokens += tokens
        self._latest |= outputs
        return chunks[0]

    def _take(self, outputs: Outputs, at: int) -> Chunk:
        """One answer's of a response: of one response for all answers, the element `at` of what each has its own of."""
        chunk = Chunk(
            text=_at(outputs, "text_output", at, ""),
            num_output_tokens=int(_at(outputs, "num_output_tokens", at, 0)),
            finish_reason=_at(outputs, "finish_reason", at, None) or None,
            cumulative_logprob=_at(outputs, "cumulative_logprob", at, None),
            logprobs=_logprobs(_at(outputs, "logprobs", at, None)),
            prompt_logprobs=_logprobs(_first(outputs, "prompt_logprobs", None)) if at == 0 else (),
            stop_reason=_stop_reason(_at(outputs, "stop_reason", at, None)),
            index=int(_at(outputs, "sequence_index", at, 0)) or at,
        )
        self._prompt_logprobs = self._prompt_logprobs or chunk.prompt_logprobs
        if not chunk.index:  # the others find all of the prompt that the first has computed
            self._cached_tokens = int(_at(outputs, "cached_tokens", 0, self._cached_tokens))
        while len(self._parts) <= chunk.index:
            self._parts.append(_Part())
        self._parts[chunk.index].add(chunk, _at(outputs, "used_seed", at, None))
        return chunk

    def complete(self) -> None:
        """The server closed the answer in good order."""
        reason = self._parts[0].finish_reason
        outcome = _first(self._latest, "outcome", None) or _OUTCOME_OF_REASON.get(reason or "", "COMPLETED")
        self._end(reason, outcome)

    def cancel(self) -> None:
        """The caller did not want the rest."""
        self._end("cancelled", "CANCELLED")

    def fail(self, error: TritandemClientError) -> TritandemClientError:
        """No result; the error learns whose it is and what had arrived."""
        self.ended = True
        error.request_id, error.partial_text = self.request_id, self.text
        return error

    def _end(self, finish_reason: str | None, outcome: str) -> None:
        if self.ended:  # closed by another thread while the last response was under way
            return
        self.ended = True
        choices = tuple(part.choice() for part in self._parts)
        first = choices[0]
        self._result = Result(
            text=self.text,
            finish_reason=finish_reason,
            outcome=outcome,
            request_id=self.request_id,
            num_input_tokens=int(_first(self._latest, "num_input_tokens", 0)),
            num_output_tokens=self._output_tokens,
            cached_tokens=self._cached_tokens,
            cumulative_logprob=first.cumulative_logprob,
            logprobs=first.logprobs,
            prompt_logprobs=self._prompt_logprobs,
            seed=first.seed,
            stop_reason=first.stop_reason,
            choices=choices if len(choices) > 1 else (),
            timings=self._timings(),
        )

    def _timings(self) -> Timings:
        if not self.started:
            return Timings(total_s=self._clock() - self._sent_s)
        after_first = self._output_tokens - self._first_tokens
        decode_s = self._last_s - self._first_s
        return Timings(
            ttft_s=self._first_s - self._sent_s,
            total_s=self._last_s - self._sent_s,
            tokens_per_s=after_first / decode_s if decode_s > 0 else 0.0,
            server=dict(zip(STAMPS, self._latest.get("stamps", ()), strict=False)),
        )


@dataclass(slots=True)
class _Part:
    """One of the answers, as far as it came."""

    texts: list[str] = field(default_factory=list)
    tokens: int = 0
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    cumulative_logprob: float | None = None
    seed: int | None = None
    stop_reason: str | int | None = None

    def add(self, chunk: Chunk, seed: int | None) -> None:
        self.texts.append(chunk.text)
        self.tokens += chunk.num_output_tokens
        self.logprobs += chunk.logprobs
        self.finish_reason = chunk.finish_reason or self.finish_reason
        self.stop_reason = chunk.stop_reason if self.stop_reason is None else self.stop_reason
        if chunk.cumulative_logprob is not None:
            self.cumulative_logprob = chunk.cumulative_logprob
        self.seed = self.seed if seed is None else seed

    def choice(self) -> Choice:
        text, logprobs = "".join(self.texts), tuple(self.logprobs)
        counts = (self.tokens, self.cumulative_logprob, logprobs, self.seed, self.stop_reason)
        return Choice(text, self.finish_reason, *counts)


def _first(outputs: Outputs, name: str, default: Any) -> Any:
    return _at(outputs, name, 0, default)


def _at(outputs: Outputs, name: str, at: int, default: Any) -> Any:
    """Where a response says less, the default."""
    values = outputs.get(name, ())
    return values[at] if at < len(values) else default


def _stop_reason(text: str | None) -> str | int | None:
    """JSON: a stop word, a stop id or null."""
    return json.loads(text) if text else None


def _logprobs(text: Any) -> tuple[TokenLogprob, ...]:
    """A JSON list, one object a token: {token id: {"logprob", "decoded_token"}}, the chosen or given token first."""
    if not text:
        return ()
    tokens = []
    for entry in json.loads(text):
        said = [(int(token_id), one["logprob"], one.get("decoded_token") or "") for token_id, one in entry.items()]
        chosen_id, logprob, chosen_text = said[0]
        if logprob is None:
            tokens.append(TokenLogprob(chosen_id, None, chosen_text))
            continue
        said.sort(key=_by_logprob)
        top = tuple((token_id, logprob) for token_id, logprob, _ in said)
        tokens.append(TokenLogprob(chosen_id, logprob, chosen_text, top, tuple(text for _, _, text in said)))
    return tuple(tokens)


def _by_logprob(candidate: tuple[int, float, str]) -> float:
    return -candidate[1]
