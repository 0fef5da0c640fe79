"""What callers get: chunks of an answer, the finished answer, the server's health.

Owns these value types. Knows nothing about requests, tensors or transports. Immutable, shared freely.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token; `top` holds (token id, logprob) of it and the alternatives, most likely first, and `top_texts` what
    each of them reads. A prompt's first token has no `logprob` and no `top`."""

    token_id: int
    logprob: float | None
    text: str = ""
    top: tuple[tuple[int, float], ...] = ()
    top_texts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds as this side measured them, from sending.

    `server`: when the server reached each stage, monotonic ns of its host, 0: not reached; empty if not sent.
    `ttft_s`: until the first chunk with text. `tokens_per_s`: tokens after the first chunk, per second (0.0
    for an answer that came in one piece).
    """

    ttft_s: float = 0.0
    total_s: float = 0.0
    tokens_per_s: float = 0.0
    server: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Chunk:
    """One response of a stream: the text since the last one. A fast answer brings several tokens in one chunk."""

    text: str
    num_output_tokens: int = 0  # of this chunk; 0 when the deployment does not say
    finish_reason: str | None = None  # on the last chunk
    cumulative_logprob: float | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # on the first chunk, where asked for
    stop_reason: str | int | None = None  # on the last chunk, as a Result has it
    index: int = 0  # of the answer that it belongs to, of `n`


@dataclass(frozen=True, slots=True)
class Choice:
    """One of several answers to a prompt."""

    text: str
    finish_reason: str | None
    num_output_tokens: int = 0
    cumulative_logprob: float | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    seed: int | None = None
    stop_reason: str | int | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """A whole answer. `outcome` is COMPLETED, STOPPED (by id) or CANCELLED (the stream was closed early).

    With `n` above 1 it is the first one; `choices` are all of them by index, and `num_output_tokens` those of all.
    `stop_reason`: which of the request's stop words or stop ids ended it, where the client's `report` asks for it.
    `seed`: sent with the same request, it repeats the answer; None where the client's `report` does not ask for it.
    """

    text: str
    finish_reason: str | None
    outcome: str
    request_id: str
    num_input_tokens: int = 0
    num_output_tokens: int = 0
    cached_tokens: int = 0
    cumulative_logprob: float | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    seed: int | None = None
    stop_reason: str | int | None = None
    choices: tuple[Choice, ...] = ()
    timings: Timings = field(default_factory=Timings)

    def to_dict(self) -> dict[str, Any]:
        """Plain types only, ready for JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Health:
    """`models`: "READY" or the server's reason by name; of all models where the server's repository index is open
    to clients, else of the client's own at most. An unreachable server is `live=False`, no error.
    """

    live: bool
    ready: bool  # the server is, and the client's own model is
    models: dict[str, str] = field(default_factory=dict)
    reason: str = ""

    def __bool__(self) -> bool:
        return self.ready


def health_of(*, server_ready: bool, model: str, model_ready: bool, index: Sequence[tuple[str, str, str]]) -> Health:
    """`index`: (name, state, reason) of every version in the model repository, as far as the server tells."""
    models = {name: reason or state or "UNAVAILABLE" for name, state, reason in index}
    models |= {name: "READY" for name, state, _ in index if state == "READY"}
    if model_ready:
        models[model] = "READY"
    why = "" if model_ready else f"model {model}: {models.get(model, 'not ready, or not in the model repository')}"
    reason = why if server_ready else "the server is not ready"
    return Health(live=True, ready=server_ready and model_ready, models=models, reason=reason)
