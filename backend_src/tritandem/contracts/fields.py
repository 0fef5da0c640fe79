"""The table of sampling fields: what a request may say about how its tokens are chosen, each field in one place.

`SamplingParams` is the table: a field's name, type and default, and beside them its range, its public tensor, its
documentation, its word in a device row and the feature of the sampler that it asks for. What else knows the fields
(public schema, wire to the engine, layout of rows, graph variants) is derived from here; config.pbtxt and the client,
which cannot import it, are compared by tests. Tier 0. Limits of lists that go with a request stand here too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from .errors import InvalidRequest

MAX_ANSWERS = 128
MAX_TOP_LOGPROBS = 20
MAX_STOP_TOKEN_IDS = 16
MAX_STOP_WORDS = 64
MAX_BAD_WORDS = 64
MAX_BAD_WORD_TOKENS = 8
MAX_STOP_WORD_CHARS = 1024
MAX_LOGIT_BIAS = 300
MOST_LOGIT_BIAS = 100.0  # its size
MAX_ALLOWED_TOKEN_IDS = 1024
_INT32_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True)
class FieldFacts:
    """What the table says of one field beside name, type and default."""

    low: float
    high: float
    allowed: str  # in the words of an error
    tensor: str = ""  # type of the public input tensor; "": by name in `sampling_parameters` only
    shown: str = ""  # the default as the table of tensors shows it
    range: str = ""
    doc: str = ""
    aliases: tuple[str, ...] = ()  # older names of the public input
    row: str = ""  # struct's code of its word in a device row: i int32, f float32, q int64; "": the device needs it not
    feature: str = ""  # of `engine/sampling`, which a value other than the default asks for
    draws: Callable[[float], bool] | None = None  # it concerns draws alone; whether a value by itself asks for one
    llm_api: bool = False  # TensorRT-LLM's LLM API model has it, as `sampling_param_NAME`
    off: tuple[float, ...] = ()  # what clients write besides the default, and mean it


def _field(default: Any, low: float, high: float, allowed: str, **more: Any) -> Any:
    return dataclasses.field(default=default, metadata={"facts": FieldFacts(low, high, allowed, **more)})


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen. Greedy unless `temperature` > 0; defaults change nothing.

    `seed` fixes the random stream of one request: token i depends on (seed, i) only, never on the batch. A request
    that samples without one gets a random one where it is decoded, and keeps it.
    `logprobs` is the number of alternatives reported per token (0: only the chosen one's, None: none);
    `prompt_logprobs` likewise for each token of the prompt behind the first, given those before it.
    """

    max_tokens: int = _field(
        256, 1, _INT32_MAX, "a whole number of at least 1",
        tensor="INT32", shown="256 or what the context leaves", range="1..what the context leaves",
        doc="tokens to generate", llm_api=True,
    )  # fmt: skip
    min_tokens: int = _field(
        0, 0, _INT32_MAX, "a whole number of at least 0, at most max_tokens",
        tensor="INT32", shown="0", range="0..max_tokens", doc="no end token before this many tokens",
        aliases=("min_length",), row="i",
    )  # fmt: skip
    temperature: float = _field(
        0.0, 0.0, 100.0, "a number in [0, 100]; 0 is greedy",
        tensor="FP32", shown="0, or 1 with top_k > 1, top_p < 1, min_p or seed", range="0..100", doc="0 is greedy",
        row="f", feature="sampled", llm_api=True,
    )  # fmt: skip
    top_k: int = _field(
        0, 0, _INT32_MAX, "a whole number of at least 0; 0 is off",
        tensor="INT32", shown="0", range="at least 0; 0 and -1 are off", doc="sample among the k most likely tokens",
        row="i", feature="filtered", draws=lambda k: k > 1, off=(-1,), llm_api=True,
    )  # fmt: skip
    top_p: float = _field(
        1.0, 0.0, 1.0, "a number in [0, 1]; 0 and 1 are off",
        tensor="FP32", shown="1", range="0..1; 0 and 1 are off", doc="sample within this share of the probability",
        row="f", feature="filtered", draws=lambda p: p < 1, off=(0,), llm_api=True,
    )  # fmt: skip
    min_p: float = _field(
        0.0, 0.0, 1.0, "a number in [0, 1]",
        tensor="FP32", shown="0", range="0..1", doc="drop tokens less likely than this share of the likeliest",
        row="f", feature="filtered", draws=lambda p: p > 0,
    )  # fmt: skip
    repetition_penalty: float = _field(
        1.0, 0.01, 100.0, "a number in [0.01, 100]; 1 is off",
        tensor="FP32", shown="1", range="0.01..100", doc="divides the logits of tokens seen before; 1 is off",
        row="f", feature="penalised",
    )  # fmt: skip
    presence_penalty: float = _field(
        0.0, -2.0, 2.0, "a number in [-2, 2]",
        tensor="FP32", shown="0", range="-2..2", doc="subtracted once from generated tokens' logits", row="f",
        feature="penalised", llm_api=True,
    )  # fmt: skip
    frequency_penalty: float = _field(
        0.0, -2.0, 2.0, "a number in [-2, 2]",
        tensor="FP32", shown="0", range="-2..2", doc="subtracted for each earlier occurrence", row="f",
        feature="penalised", llm_api=True,
    )  # fmt: skip
    seed: int = _field(
        0, 0, 2**63 - 1, "a whole number in [0, 2^63 - 1]",
        tensor="UINT64", shown="a random one", range="0..2^63 - 1",
        doc="fixes the random stream; greedy requests draw nothing", aliases=("random_seed",), row="q",
        draws=lambda _: True, llm_api=True,
    )  # fmt: skip
    n: int = _field(
        1, 1, MAX_ANSWERS, f"a whole number in [1, {MAX_ANSWERS}]",
        tensor="INT32", shown="1", range=f"1..{MAX_ANSWERS}, at most the sequences that engines take at once",
        doc="answers to the prompt, which is computed once; the i-th draws with seed + i",
        aliases=("num_return_sequences",),
    )  # fmt: skip
    logprobs: int | None = _field(None, 0, MAX_TOP_LOGPROBS, f"a whole number in [0, {MAX_TOP_LOGPROBS}]")
    prompt_logprobs: int | None = _field(None, 0, MAX_TOP_LOGPROBS, f"a whole number in [0, {MAX_TOP_LOGPROBS}]")

    def __post_init__(self) -> None:
        """Raises InvalidRequest naming the first field out of range."""
        for name, facts in FIELDS.items():
            value = getattr(self, name)
            if value is None:
                continue
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not (number and facts.low <= value <= facts.high):  # a NaN lies in no range
                raise InvalidRequest(name, value, facts.allowed)
        if self.top_p == 0.0:
            raise InvalidRequest("top_p", self.top_p, FIELDS["top_p"].allowed)
        if self.min_tokens > self.max_tokens:
            raise InvalidRequest("min_tokens", self.min_tokens, f"0..max_tokens ({self.max_tokens})")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def features(self) -> frozenset[str]:
        """What of `engine/sampling` changes this request's choices; nothing: the best token, as the model gave it."""
        return frozenset(
            facts.feature
            for name, facts in FIELDS.items()
            if facts.feature and getattr(self, name) != _DEFAULTS[name] and not (facts.draws and self.greedy)
        )


# By name, in the table's order.
FIELDS: Mapping[str, FieldFacts] = MappingProxyType(
    {f.name: f.metadata["facts"] for f in dataclasses.fields(SamplingParams)}
)
_DEFAULTS = {f.name: f.default for f in dataclasses.fields(SamplingParams)}
_TYPE_OF_WORD: dict[str, type] = {"int": int, "int | None": int, "float": float}
TYPES: Mapping[str, type] = MappingProxyType(
    {f.name: _TYPE_OF_WORD[str(f.type)] for f in dataclasses.fields(SamplingParams)}
)
