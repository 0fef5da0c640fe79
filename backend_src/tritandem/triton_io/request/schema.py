"""The public tensors: one table from which decoding, docs/tensors.md and the configuration test derive.

Owns names, dtypes, shapes, defaults and ranges of everything a client may send to `ensemble` or `scheduler`
and get back. The names are the union of what clients of the TensorRT-LLM ensemble and of Triton's vLLM
backend send. Knows nothing about how a value is used. No thread, no Triton import.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ...contracts.fields import FIELDS, MAX_BAD_WORDS, MAX_STOP_WORD_CHARS, MAX_STOP_WORDS


@dataclass(frozen=True, slots=True)
class PublicTensor:
    """One row. `dims` leave out the batch dimension, which is 1 in every input; -1 is any length."""

    name: str
    dtype: str  # as clients write it: BYTES, BOOL, INT32, INT64, UINT32, UINT64, FP32
    dims: tuple[int, ...]
    default: str
    allowed: str
    doc: str


def _one(name: str, dtype: str, default: str, allowed: str, doc: str) -> PublicTensor:
    return PublicTensor(name, dtype, (1,), default, allowed, doc)


def _many(name: str, dtype: str, default: str, allowed: str, doc: str) -> PublicTensor:
    return PublicTensor(name, dtype, (-1,), default, allowed, doc)


_WORD = f"each 1..{MAX_STOP_WORD_CHARS} characters; empty ones are dropped"

PROMPT_INPUTS = (
    _one("text_input", "BYTES", "", "UTF-8, at least one character", "the prompt"),
    _many("input_ids", "INT32", "", "ids of the model's vocabulary", "the prompt as token ids, instead of text_input"),
    _one("stop", "BOOL", "false", "true, false", "true: end the running request that has this request's id"),
)

SAMPLING_INPUTS = tuple(
    _one(name, facts.tensor, facts.shown, facts.range, facts.doc) for name, facts in FIELDS.items() if facts.tensor
)

WORD_INPUTS = (
    _many("stop_words", "BYTES", "", f"at most {MAX_STOP_WORDS}, {_WORD}", "texts that end the answer; not returned"),
    _many("bad_words", "BYTES", "", f"at most {MAX_BAD_WORDS}, {_WORD}", "texts that must not appear"),
    _one("end_id", "INT32", "the model's", "an id of the vocabulary; -1: none", "replaces the model's end tokens"),
)

OUTPUT_INPUTS = (
    _one("stream", "BOOL", "false", "true, false", "many responses or one"),
    _one(
        "exclude_input_in_output",
        "BOOL",
        "the value of stream; true without text_input",
        "true, false",
        "leave the prompt out of text_output",
    ),
    _one("return_finish_reason", "BOOL", "true", "true, false", "finish_reason on the last response"),
    _one("return_num_input_tokens", "BOOL", "false", "true, false", "num_input_tokens on each response"),
    _one("return_num_output_tokens", "BOOL", "false", "true, false", "num_output_tokens on each response"),
    _one("return_cumulative_logprob", "BOOL", "false", "true, false", "cumulative_logprob on each response"),
    _one("return_logprobs", "BOOL", "false", "true, false", "logprobs on each response"),
    _one("return_log_probs", "BOOL", "false", "true, false", "cum_log_probs and output_log_probs on each response"),
    _one("return_seed", "BOOL", "false", "true, false", "used_seed on the last response"),
)

SERVICE_INPUTS = (
    _one("sampling_parameters", "BYTES", "", "a JSON object", "any sampling input by name, and the vLLM names"),
    _one("priority", "BYTES", "normal", "interactive, normal, batch", "the class; lower classes wait"),
    _one("deadline_ms", "INT64", "none", "1..86400000", "from arrival; later the request ends as EXPIRED"),
)

# Sent by existing clients, with one value that changes nothing; any other value is refused by name.
NEUTRAL_INPUTS = (
    _one("beam_width", "INT32", "1", "1", "beam search is not offered"),
    _one("num_return_sequences", "INT32", "1", "1", "one answer a request"),
    _one("length_penalty", "FP32", "1", "1", "belongs to beam search"),
    _one("return_context_logits", "BOOL", "false", "false", "logits are not returned"),
    _one("return_generation_logits", "BOOL", "false", "false", "logits are not returned"),
    _one("pad_id", "INT32", "", "any", "without effect: nothing is padded"),
)

# Older names of the same thing; giving both with different values is refused.
ALIASES = {alias: name for name, facts in FIELDS.items() for alias in facts.aliases}
ALIAS_INPUTS = tuple(
    _one(alias, FIELDS[name].tensor, FIELDS[name].shown, f"as {name}", f"older name of {name}")
    for alias, name in ALIASES.items()
)

INPUTS: tuple[PublicTensor, ...] = (
    *PROMPT_INPUTS,
    *SAMPLING_INPUTS,
    *WORD_INPUTS,
    *OUTPUT_INPUTS,
    *SERVICE_INPUTS,
    *NEUTRAL_INPUTS,
    *ALIAS_INPUTS,
)

STAMP_COUNT = 9  # fields of contracts.Stamps, in order

OUTPUTS: tuple[PublicTensor, ...] = (
    _one("text_output", "BYTES", "", "UTF-8", "the text since the last response"),
    _one("finish_reason", "BYTES", "", "stop, length, cancelled", "last response"),
    _one("num_input_tokens", "UINT32", "", "", "when asked: tokens of the prompt"),
    _one("num_output_tokens", "UINT32", "", "", "when asked: tokens in this response; their sum is the answer's"),
    _one("cumulative_logprob", "FP32", "", "", "when asked: sum over all tokens so far"),
    _one("logprobs", "BYTES", "", "JSON list", "when asked: per token {id: {logprob, rank, decoded_token}}"),
    _one("cum_log_probs", "FP32", "", "", "with return_log_probs: as cumulative_logprob"),
    PublicTensor("output_log_probs", "FP32", (1, -1), "", "", "with return_log_probs: of this response's tokens"),
    _one("used_seed", "UINT64", "", "", "with return_seed: what as the input seed repeats this answer"),
    _one("outcome", "BYTES", "", "COMPLETED, STOPPED", "last response; other outcomes are error responses"),
    _one("cached_tokens", "UINT32", "", "", "last response: prompt tokens found in the prefix cache"),
    PublicTensor("stamps", "INT64", (STAMP_COUNT,), "", "", "last response: monotonic ns of each stage, or 0"),
)

# Outputs that are sent only when their input flag says so.
OUTPUTS_OF_FLAG = {
    "return_finish_reason": ("finish_reason",),
    "return_num_input_tokens": ("num_input_tokens",),
    "return_num_output_tokens": ("num_output_tokens",),
    "return_cumulative_logprob": ("cumulative_logprob",),
    "return_logprobs": ("logprobs",),
    "return_log_probs": ("cum_log_probs", "output_log_probs"),
    "return_seed": ("used_seed",),
}

# Custom request parameters. Triton keeps `priority` and `timeout` for itself: they never arrive here.
PARAMETERS = {
    "messages": "JSON list of {role, content}: a chat, instead of text_input",
    "priority_class": "as the input priority",
    "deadline_ms": "as the input deadline_ms",
    "tenant": "whose fair share this counts against and whose cached prefixes it shares, at most 128 characters",
    "traceparent": "W3C trace context of the caller's span; the request's spans are put below it",
    "request_id": "the request's id where the protocol carries none (HTTP), at most 256 characters",
    "id": "as request_id: what Triton makes of the key `id` of an HTTP body",
}

# Of the launcher's own request to drain; not public.
DRAIN_KEY, DRAIN_TIMEOUT_MS = "drain_key", "drain_timeout_ms"

# Tensors between tokenizer and scheduler, beside the public ones.
TOKENIZED_NS = PublicTensor("tokenized_ns", "INT64", (5,), "", "", "text came, ids were ready, a number, the seal")
REFUSAL = PublicTensor("refusal", "BYTES", (1,), "", "", "why there are no ids; empty when there are")


def by_name(tensors: Iterable[PublicTensor]) -> dict[str, PublicTensor]:
    return {tensor.name: tensor for tensor in tensors}


INPUT_OF_NAME = by_name(INPUTS)
