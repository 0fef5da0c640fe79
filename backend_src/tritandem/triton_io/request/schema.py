"""The public tensors: one table from which decoding, docs/tensors.md and the configuration test derive.

Owns names, dtypes, shapes, defaults and ranges of everything a client may send to `ensemble` or `scheduler`
and get back. The names are the union of what clients of the TensorRT-LLM ensemble and of Triton's vLLM
backend send. Knows nothing about how a value is used. No thread, no Triton import.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ...contracts.fields import (
    FIELDS,
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_STOP_WORD_CHARS,
    MAX_STOP_WORDS,
    MOST_LOGIT_BIAS,
)
from .dialects import PROMPTS
from .guides import GUIDE, GUIDE_TYPE, GUIDE_TYPES


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
    _one("add_special_tokens", "BOOL", "true", "true, false", "text_input gets what the tokenizer adds; never twice"),
    _one("stop", "BOOL", "false", "true, false", "true: end the running request that has this request's id"),
)

SAMPLING_INPUTS = tuple(
    _one(name, facts.tensor, facts.shown, facts.range, facts.doc) for name, facts in FIELDS.items() if facts.tensor
)

WORD_INPUTS = (
    _many("stop_words", "BYTES", "", f"at most {MAX_STOP_WORDS}, {_WORD}", "texts that end the answer; not returned"),
    _many("bad_words", "BYTES", "", f"at most {MAX_BAD_WORDS}, {_WORD}", "texts that must not appear"),
    _one(
        "logit_bias",
        "BYTES",
        "",
        f"a JSON object of at most {MAX_LOGIT_BIAS} ids and numbers in -{MOST_LOGIT_BIAS:g}..{MOST_LOGIT_BIAS:g}",
        "added to the logits of these ids",
    ),
    _many(
        "allowed_token_ids",
        "INT32",
        "",
        f"at most {MAX_ALLOWED_TOKEN_IDS} ids of the vocabulary; none: all",
        "no other token is chosen; end tokens only if among them",
    ),
    _one(
        "end_id", "INT32", "the model's", "an id; -1 or beyond the vocabulary: none", "replaces the model's end tokens"
    ),
    _one(GUIDE_TYPE, "BYTES", "", ", ".join(GUIDE_TYPES), "what kind of structure the answer must have"),
    _one(GUIDE, "BYTES", "", "its schema, expression, grammar or tags; nothing with json", "and which"),
)

OUTPUT_INPUTS = (
    _one("stream", "BOOL", "false", "true, false", "many responses or one"),
    _one(
        "exclude_input_in_output",
        "BOOL",
        "the setting, else the value of stream; true without text_input",
        "true, false",
        "leave the prompt out of text_output",
    ),
    _one("return_finish_reason", "BOOL", "true", "true, false", "finish_reason on the last response"),
    _one("return_stop_reason", "BOOL", "false", "true, false", "stop_reason on the last response"),
    _one("return_num_input_tokens", "BOOL", "false", "true, false", "num_input_tokens on each response"),
    _one("return_num_output_tokens", "BOOL", "false", "true, false", "num_output_tokens on each response"),
    _one("return_cumulative_logprob", "BOOL", "false", "true, false", "cumulative_logprob on each response"),
    _one("return_logprobs", "BOOL", "false", "true, false", "logprobs on each response"),
    _one(
        "return_prompt_logprobs",
        "BOOL",
        "false",
        "true, false",
        "prompt_logprobs on the first response; the prompt takes nothing from the prefix cache",
    ),
    _one("return_log_probs", "BOOL", "false", "true, false", "cum_log_probs and output_log_probs on each response"),
    _one(
        "return_perf_metrics", "BOOL", "false", "true, false", "times and KV blocks of the answer on the last response"
    ),
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
    _one("length_penalty", "FP32", "1", "1", "belongs to beam search"),
    _one("return_context_logits", "BOOL", "false", "false", "logits are not returned"),
    _one("return_generation_logits", "BOOL", "false", "false", "logits are not returned"),
    _one("use_draft_logits", "BOOL", "false", "false", "no speculative decoding"),
    _one("pad_id", "INT32", "", "any", "without effect: nothing is padded"),
)

_NO_LORA, _TEXT_ONLY, _NO_TABLE = "no adapters", "text only", "no prompt tuning"

# Sent by existing clients for what is not served: empty texts and lists are taken for nothing, all else is refused.
REFUSED_INPUTS = (
    _one("decoder_text_input", "BYTES", "", "nothing", "no encoder-decoder models"),
    PublicTensor("prompt_embedding_table", "FP16", (-1, -1), "", "nothing", _NO_TABLE),
    _one("prompt_table_extra_id", "UINT64", "", "nothing", _NO_TABLE),
    _one("prompt_vocab_size", "INT32", "", "nothing", _NO_TABLE),
    _many("embedding_bias_words", "BYTES", "", "nothing", "no bias of tokens"),
    _many("embedding_bias_weights", "FP32", "", "nothing", "no bias of tokens"),
    _one("lora_task_id", "UINT64", "", "nothing", _NO_LORA),
    PublicTensor("lora_weights", "FP16", (-1, -1), "", "nothing", _NO_LORA),
    PublicTensor("lora_config", "INT32", (-1, 3), "", "nothing", _NO_LORA),
    _many("image", "BYTES", "", "nothing", _TEXT_ONLY),
    _one("image_url_input", "BYTES", "", "nothing", _TEXT_ONLY),
    PublicTensor("image_input", "FP16", (-1, 3, -1, -1), "", "nothing", _TEXT_ONLY),
    PublicTensor("image_bytes_input", "UINT8", (-1, -1, -1, -1), "", "nothing", _TEXT_ONLY),
    PublicTensor("video_bytes_input", "UINT8", (-1, -1, -1, -1), "", "nothing", _TEXT_ONLY),
    _one("embedding_request", "BYTES", "", "nothing", "no embeddings"),
    _one("num_draft_tokens", "INT32", "", "nothing", "no speculative decoding"),
)

# Older names of the same thing; giving both with different values is refused.
FIELD_ALIASES = {alias: name for name, facts in FIELDS.items() for alias in facts.aliases}
ALIAS_INPUTS = tuple(
    _one(alias, FIELDS[name].tensor, FIELDS[name].shown, f"as {name}", f"older name of {name}")
    for alias, name in FIELD_ALIASES.items()
)

INPUTS: tuple[PublicTensor, ...] = (
    *PROMPT_INPUTS,
    *SAMPLING_INPUTS,
    *WORD_INPUTS,
    *OUTPUT_INPUTS,
    *SERVICE_INPUTS,
    *NEUTRAL_INPUTS,
    *ALIAS_INPUTS,
    *REFUSED_INPUTS,
)

# As the last two tables, of the TensorRT-LLM backend's inner model.
FACADE_NEUTRAL_INPUTS = (
    _one("early_stopping", "BOOL", "false", "false", "belongs to beam search"),
    _one("sampling_param_best_of", "INT32", "1", "1", "one answer a request"),
    _one("sampling_param_return_perf_metrics", "BOOL", "", "any", "see return_perf_metrics"),
)
FACADE_REFUSED_INPUTS = (
    _many("draft_input_ids", "INT32", "", "nothing", "no speculative decoding"),
    PublicTensor("draft_logits", "FP32", (-1, -1), "", "nothing", "no speculative decoding"),
    _one("draft_acceptance_threshold", "FP32", "", "nothing", "no speculative decoding"),
    *(
        _one(f"lookahead_{what}_size", "INT32", "", "nothing", "no speculative decoding")
        for what in ("window", "ngram", "verification_set")
    ),
    _many("decoder_input_ids", "INT32", "", "nothing", "no encoder-decoder models"),
    _one("decoder_input_lengths", "INT32", "", "nothing", "no encoder-decoder models"),
    PublicTensor("encoder_input_features", "FP16", (-1, -1), "", "nothing", "no encoder-decoder models"),
    _one("encoder_output_lengths", "INT32", "", "nothing", "no encoder-decoder models"),
    PublicTensor("cross_attention_mask", "BOOL", (-1, -1), "", "nothing", _TEXT_ONLY),
    _one("skip_cross_attn_blocks", "BOOL", "", "nothing", _TEXT_ONLY),
    _many("mrope_rotary_cos_sin", "FP32", "", "nothing", _TEXT_ONLY),
    _one("mrope_position_deltas", "INT64", "", "nothing", _TEXT_ONLY),
    _many("prompt_table_extra_ids", "UINT64", "", "nothing", _NO_TABLE),
    _many("embedding_bias", "FP32", "", "nothing", "no bias of tokens"),
    _one("runtime_top_p_min", "FP32", "", "nothing", "top_p stays as it is"),
    _one("runtime_top_p_decay", "FP32", "", "nothing", "top_p stays as it is"),
    _one("runtime_top_p_reset_ids", "INT32", "", "nothing", "top_p stays as it is"),
    _one("beam_search_diversity_rate", "FP32", "", "nothing", "beam search is not offered"),
    _many("context_phase_params", "UINT8", "", "nothing", "prefill and decode are not parted"),
    *(
        _many(f"retention_token_range_{what}", "INT32", "", "nothing", "the prefix cache keeps what was used last")
        for what in ("starts", "ends", "priorities", "durations_ms")
    ),
    *(
        _one(f"retention_decode_{what}", "INT32", "", "nothing", "the prefix cache keeps what was used last")
        for what in ("priority", "duration_ms")
    ),
    _one("lora_id", "UINT64", "", "nothing", _NO_LORA),
    *(_one(f"lora_{what}", "BYTES", "", "nothing", _NO_LORA) for what in ("name", "path", "ckpt_source")),
    _many("image_url", "BYTES", "", "nothing", _TEXT_ONLY),
)

# Inputs of `scheduler` that facades alone send. `sampling_param_NAME` is NAME.
PREFIX = "sampling_param_"
LLM_API_FIELDS = tuple(name for name, facts in FIELDS.items() if facts.llm_api)
ALIASES = FIELD_ALIASES | {f"{PREFIX}{name}": name for name in LLM_API_FIELDS}
FACADE_INPUTS = (
    *(
        PublicTensor(
            name,
            "BYTES" if public == "text_input" else "INT32",
            (1 if public == "text_input" else -1,),
            "",
            "",
            f"{public} of {dialect.name}",
        )
        for name, (dialect, public) in PROMPTS.items()
    ),
    *(
        _one(f"{PREFIX}{name}", FIELDS[name].tensor, FIELDS[name].shown, FIELDS[name].range, FIELDS[name].doc)
        for name in LLM_API_FIELDS
    ),
    _many(f"{PREFIX}stop", "BYTES", "", "", "stop_words"),
    _one(f"{PREFIX}exclude_input_from_output", "BOOL", "", "", "exclude_input_in_output"),
    _one("input_lengths", "INT32", "", "the number of input_ids", "how many ids there are"),
    PublicTensor("stop_words_list", "INT32", (2, -1), "", "ids, ends padded with -1", "stop words as ids"),
    PublicTensor("bad_words_list", "INT32", (2, -1), "", "ids, ends padded with -1", "bad words as ids"),
    *FACADE_NEUTRAL_INPUTS,
    *FACADE_REFUSED_INPUTS,
)

# Outputs that existing clients may name, so that Triton knows them.
_UNSERVED = (
    ("context_logits", "FP32", (-1, -1)),
    ("generation_logits", "FP32", (-1, -1, -1)),
)
_PERF = "last response, with return_perf_metrics"
PERF_OUTPUTS = {
    **{
        f"{what}_time_ns": f"{_PERF}: of `stamps`"
        for what in ("arrival", "first_scheduled", "first_token", "last_token")
    },
    "kv_cache_reused_blocks": f"{_PERF}: cached_tokens in whole KV blocks",
    "kv_cache_alloc_new_blocks": f"{_PERF}: KV blocks beside those",
    "kv_cache_alloc_total_blocks": f"{_PERF}: KV blocks of prompt and answer",
    "acceptance_rate": f"{_PERF}: 0, nothing is speculative",
    "total_accepted_draft_tokens": f"{_PERF}: 0",
    "total_draft_tokens": f"{_PERF}: 0",
}

STAMP_COUNT = 9  # fields of contracts.Stamps, in order

OUTPUTS: tuple[PublicTensor, ...] = (
    _many("text_output", "BYTES", "", "UTF-8", "the text since the last response; with n in one response, n of them"),
    _many("finish_reason", "BYTES", "", "stop, length, cancelled", "last response, of each of n; n in one response"),
    _many(
        "stop_reason",
        "BYTES",
        "",
        "JSON",
        "when asked: the stop word or id that ended it, else null; as finish_reason",
    ),
    _one("num_input_tokens", "UINT32", "", "", "when asked: tokens of the prompt"),
    _many(
        "num_output_tokens",
        "UINT32",
        "",
        "",
        "when asked: tokens in this response; their sum is the answer's; as finish_reason",
    ),
    _many("cumulative_logprob", "FP32", "", "", "when asked: sum over all tokens so far; as finish_reason"),
    _many(
        "logprobs",
        "BYTES",
        "",
        "JSON list",
        "when asked: per token {id: {logprob, rank, decoded_token}}; as finish_reason",
    ),
    _one(
        "prompt_logprobs",
        "BYTES",
        "",
        "JSON list",
        "when asked: as logprobs, of the prompt's tokens; the first has null for them",
    ),
    _many("cum_log_probs", "FP32", "", "", "with return_log_probs: as cumulative_logprob"),
    PublicTensor("output_log_probs", "FP32", (-1, -1), "", "", "with return_log_probs: of this response's tokens"),
    _many(
        "used_seed", "UINT64", "", "", "with return_seed: what as the input seed repeats this answer; as finish_reason"
    ),
    _one("outcome", "BYTES", "", "COMPLETED, STOPPED", "last response; other outcomes are error responses"),
    _one("cached_tokens", "UINT32", "", "", "last response: prompt tokens found in the prefix cache"),
    PublicTensor("stamps", "INT64", (STAMP_COUNT,), "", "", "last response: monotonic ns of each stage, or 0"),
    *(
        _one(name, "FP32" if name == "acceptance_rate" else "INT64" if name.endswith("_ns") else "INT32", "", "", doc)
        for name, doc in PERF_OUTPUTS.items()
    ),
    _one("batch_index", "INT32", "", "0", "when named among the requested outputs"),
    _many(
        "sequence_index",
        "INT32",
        "",
        "0..n - 1",
        "with n above 1, or when named among the requested outputs: whose text",
    ),
    *(PublicTensor(name, dtype, dims, "", "", "never sent; may be requested") for name, dtype, dims in _UNSERVED),
)

# Outputs of `scheduler` that facades alone get.
FACADE_OUTPUTS = (
    PublicTensor("output_ids", "INT32", (-1, -1), "", "", "this response's tokens; the prompt's before them if asked"),
    _many("sequence_length", "INT32", "", "", "how many those are"),
)

# Outputs that are sent only when their input flag says so.
OUTPUTS_OF_FLAG = {
    "return_finish_reason": ("finish_reason",),
    "return_stop_reason": ("stop_reason",),
    "return_num_input_tokens": ("num_input_tokens",),
    "return_num_output_tokens": ("num_output_tokens",),
    "return_cumulative_logprob": ("cumulative_logprob",),
    "return_logprobs": ("logprobs",),
    "return_prompt_logprobs": ("prompt_logprobs",),
    "return_log_probs": ("cum_log_probs", "output_log_probs"),
    "return_perf_metrics": tuple(PERF_OUTPUTS),
    "return_seed": ("used_seed",),
}

# Custom request parameters. Triton keeps `priority` and `timeout` for itself: they never arrive here.
PARAMETERS = {
    "messages": "JSON list of {role, content}: a chat, instead of text_input",
    "tools": "JSON list of {type: function, function: {name, parameters, ...}}: what a chat may call",
    "priority_class": "as the input priority",
    "deadline_ms": "as the input deadline_ms",
    "tenant": "whose fair share this counts against and whose cached prefixes it shares, at most 128 characters",
    "traceparent": "W3C trace context of the caller's span; the request's spans are put below it",
    "request_id": "the request's id where the protocol carries none (HTTP), at most 256 characters",
    "id": "as request_id: what Triton makes of the key `id` of an HTTP body",
}

# Sent by existing clients, without effect here: every response is the text since the last; a `stop` is one response.
IGNORED_PARAMETERS = frozenset({"accumulate_tokens", "Streaming"})

# Of the launcher's own request to drain; not public.
DRAIN_KEY, DRAIN_TIMEOUT_MS = "drain_key", "drain_timeout_ms"

# From the scheduler to the tokenizer: a grammar to be tried, [field, grammar] as JSON; not public.
GRAMMAR = "grammar"

# Tensors between tokenizer and scheduler, beside the public ones.
TOKENIZED_NS = PublicTensor("tokenized_ns", "INT64", (5,), "", "", "text came, ids were ready, a number, the seal")
REFUSAL = PublicTensor("refusal", "BYTES", (1,), "", "", "why there are no ids; empty when there are")


def by_name(tensors: Iterable[PublicTensor]) -> dict[str, PublicTensor]:
    return {tensor.name: tensor for tensor in tensors}


INPUT_OF_NAME = by_name((*INPUTS, *FACADE_INPUTS))
