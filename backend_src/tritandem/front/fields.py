"""The fields of a request's body: one table, from which reading, docs/openai.md and /openapi.json follow.

A field is honoured, or accepted without effect because none of its values changes the answer, or accepted only with
the values that change nothing. What stands in no table is named to the client and does not fail its request. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..contracts.errors import InvalidRequest
from ..contracts.fields import MAX_ALLOWED_TOKEN_IDS, MAX_LOGIT_BIAS, MAX_TOP_LOGPROBS, MOST_LOGIT_BIAS
from ..contracts.grammars import Grammar, Kind
from ..triton_io.request.chat_messages import MAX_TOOLS, check_tool
from ..triton_io.request.guides import GUIDED, Guide, read_guide
from .errors import ApiError, invalid, not_honoured

CHAT, COMPLETIONS = "chat", "completions"
BOTH = (CHAT, COMPLETIONS)
MAX_CHOICES = 128
_INT32_MAX = 2**31 - 1

REQUIRED = "required"

Reader = Callable[[str, Any], Any]


class Named(NamedTuple):
    """The function that must be called."""

    name: str


@dataclass(frozen=True, slots=True)
class Field:
    """`option`: of the client's, which gets the value as it is; `in_sampling`: it travels in `sampling_parameters`."""

    name: str
    schema: Mapping[str, Any]  # of JSON, for /openapi.json
    default: str
    doc: str
    read: Reader
    doors: tuple[str, ...] = BOTH
    option: str = ""
    in_sampling: bool = False


@dataclass(frozen=True, slots=True)
class Neutral:
    """A field that must not say anything: `values` are the ones that change nothing."""

    name: str
    values: tuple[Any, ...]
    doc: str


def whole(low: int = -_INT32_MAX - 1, high: int = _INT32_MAX) -> Reader:
    def read(name: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise invalid(name, value, f"a whole number in [{low}, {high}]")
        return value

    return read


def real(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise invalid(name, value, "a number")
    return value


def flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise invalid(name, value, "true or false")
    return value


def text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise invalid(name, value, "a string")
    return value


def words(name: str, value: Any) -> list[str]:
    listed = [value] if isinstance(value, str) else value
    if not isinstance(listed, list) or not all(isinstance(word, str) for word in listed):
        raise invalid(name, value, "a string or a list of strings")
    return [word for word in listed if word]


def ids(name: str, value: Any) -> list[int]:
    if not is_ids(value):
        raise invalid(name, value, "a list of token ids")
    listed: list[int] = value
    return listed


def biases(name: str, value: Any) -> dict[str, float]:
    if not isinstance(value, dict):
        raise invalid(name, value, 'an object such as {"42": -100}')
    return {token: real(f"{name}[{token}]", one) for token, one in value.items()}


def is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, int) and not isinstance(one, bool) for one in value)


def messages(name: str, value: Any) -> list[dict[str, Any]]:
    """Shape only; what roles and contents may be is the chat template's to say."""
    if not isinstance(value, list) or not value:
        raise invalid(name, value, "a list of at least one message")
    for index, message in enumerate(value):
        field = f"{name}[{index}]"
        if not isinstance(message, dict):
            raise invalid(field, message, "an object with role and content")
        if not isinstance(message.get("role"), str):
            raise invalid(f"{field}.role", message.get("role"), "a string")
        message.setdefault("content", None)
    return value


def tools(name: str, value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or len(value) > MAX_TOOLS:
        raise invalid(name, value, f"a list of at most {MAX_TOOLS} functions")
    for index, tool in enumerate(value):
        try:
            check_tool(f"{name}[{index}]", tool)
        except InvalidRequest as error:
            raise ApiError(400, str(error), param=error.field_name, code="invalid_value") from None
    return value


def tool_choice(name: str, value: Any) -> str | Named:
    if value in ("auto", "none", REQUIRED):
        chosen: str = value
        return chosen
    function = value.get("function") if isinstance(value, dict) and value.get("type") == "function" else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        allowed = 'auto, none, required, or an object such as {"type": "function", "function": {"name": "f"}}'
        raise not_honoured(name, value, allowed)
    return Named(function["name"])


def response_format(name: str, value: Any) -> Guide | None:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return Guide(name, Grammar(Kind.JSON_OBJECT))
    if kind == "structural_tag":
        return guide(f"{name}.structural_tag", value, Kind.STRUCTURAL_TAG)
    if kind != "json_schema":
        raise invalid(f"{name}.type", kind, "text, json_object, json_schema, structural_tag")
    inner, field = value.get("json_schema"), f"{name}.json_schema"
    if not isinstance(inner, dict):
        raise invalid(field, inner, "an object with name, schema and strict")
    if inner.get("strict") is not None:
        flag(f"{field}.strict", inner["strict"])  # either way: an answer that keeps to it is never wrong
    if not isinstance(inner.get("schema"), dict):
        raise invalid(f"{field}.schema", inner.get("schema"), "a JSON schema, an object")
    return guide(f"{field}.schema", inner["schema"], Kind.JSON_SCHEMA)


def guide(field: str, value: Any, kind: Kind) -> Guide:
    return Guide(field, Grammar(kind, json.dumps(value, separators=(",", ":"))))


def structure(name: str, value: Any) -> Guide | None:
    """As `sampling_parameters` has them."""
    try:
        return read_guide(name, value)
    except InvalidRequest as error:
        raise ApiError(400, str(error), param=error.field_name, code="invalid_value") from None


def prompts(name: str, value: Any) -> list[str] | list[list[int]]:
    """One prompt or several, as text or as token ids."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if is_ids(value):
            return [value]
        if all(isinstance(one, str) for one in value) or all(is_ids(one) and one for one in value):
            return value
    raise invalid(name, value, "a string, a list of strings, a list of token ids, or a list of such lists")


def stream_options(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise invalid(name, value, 'an object such as {"include_usage": true}')
    if value.get("include_usage") is not None:
        flag(f"{name}.include_usage", value["include_usage"])
    return value


_INTEGER, _NUMBER, _FLAG, _TEXT = ({"type": kind} for kind in ("integer", "number", "boolean", "string"))
_WORDS = {"oneOf": [_TEXT, {"type": "array", "items": _TEXT}]}
_IDS = {"type": "array", "items": _INTEGER}
_ONE_OF_PROMPTS = {"oneOf": [_TEXT, {"type": "array", "items": _TEXT}, _IDS, {"type": "array", "items": _IDS}]}
_MESSAGES = {"type": "array", "items": {"type": "object"}}


def _sampling(name: str, schema: Mapping[str, Any], default: str, doc: str, read: Reader = real, **more: Any) -> Field:
    return Field(name, schema, default, doc, read, option=more.pop("option", name), **more)


FIELDS: tuple[Field, ...] = (
    Field("model", _TEXT, "the server's model", "a name of `/v1/models`; any other is a 404", text),
    Field("messages", _MESSAGES, "", "the conversation; the model's chat template renders it", messages, (CHAT,)),
    Field("tools", _MESSAGES, "none", "functions that the model may call; its template shows them", tools, (CHAT,),
          "tools"),
    Field("tool_choice", {"oneOf": [_TEXT, {"type": "object"}]}, "auto",
          "`auto`; `none`: the model is shown no tools; `required`, or `{type: function, function: {name}}`: the "
          "answer is a call, and its arguments keep to the function's schema, as those of `strict` ones with `auto`",
          tool_choice, (CHAT,)),
    Field("parallel_tool_calls", _FLAG, "true", "false: further calls than the first are left out", flag, (CHAT,)),
    Field("prompt", _ONE_OF_PROMPTS, "", "text or token ids, one or several", prompts, (COMPLETIONS,)),
    _sampling(
        "max_tokens",
        _INTEGER,
        "chat: `default_max_tokens` of the settings; completions: 16",
        "tokens to generate at most",
        whole(),
    ),
    Field("max_completion_tokens", _INTEGER, "", "newer name of `max_tokens`", whole(), (CHAT,)),
    _sampling("min_tokens", _INTEGER, "0", "no end token before this many tokens", whole()),
    _sampling("temperature", _NUMBER, "1", "0 is greedy"),
    _sampling("top_p", _NUMBER, "1", "sample within this share of the probability"),
    _sampling("top_k", _INTEGER, "off", "sample among the k most likely tokens; 0 and -1 are off", whole()),
    _sampling("min_p", _NUMBER, "0", "drop tokens less likely than this share of the likeliest"),
    _sampling("seed", _INTEGER, "a random one", "fixes the random stream; choice i of n draws with seed + i",
              whole(0, 2**63 - 1)),
    _sampling("stop", _WORDS, "none", "texts that end the answer; not returned", words, option="stop_words"),
    _sampling("stop_token_ids", _IDS, "none", "token ids that end the answer", ids, in_sampling=True),
    _sampling("ignore_eos", _FLAG, "false", "the model's end tokens end nothing", flag, in_sampling=True),
    _sampling("skip_special_tokens", _FLAG, "true", "false: the text shows the model's control tokens", flag,
              in_sampling=True),
    _sampling("presence_penalty", _NUMBER, "0", "subtracted once from generated tokens' logits"),
    _sampling("frequency_penalty", _NUMBER, "0", "subtracted for each earlier occurrence"),
    _sampling("repetition_penalty", _NUMBER, "1", "divides the logits of tokens seen before"),
    _sampling("bad_words", _WORDS, "none", "texts that must not appear", words),
    _sampling("logit_bias", {"type": "object", "additionalProperties": _NUMBER}, "none",
              f"by token id, at most {MAX_LOGIT_BIAS}: added to its logit, in [-{MOST_LOGIT_BIAS:g}, "
              f"{MOST_LOGIT_BIAS:g}]; `logprobs` are the model's own", biases),
    _sampling("allowed_token_ids", _IDS, "all",
              f"no other token is chosen, at most {MAX_ALLOWED_TOKEN_IDS}; end tokens only if among them", ids),
    Field("response_format", {"type": "object"}, "text",
          "`text`, `json_object`, `json_schema`, `structural_tag`: see [structured output](structured-output.md)",
          response_format),
    Field("structured_outputs", {"type": "object"}, "none",
          "one of `json`, `json_object`, `regex`, `choice`, `grammar`, `structural_tag`", structure),
    *(
        Field(name, {}, "none", f"older name of `structured_outputs: {{{key}}}`", structure)
        for name, key in GUIDED.items()
    ),
    Field("n", _INTEGER, "1",
          f"choices for each prompt, which is computed once; {MAX_CHOICES} at most over all prompts, and no more than "
          "the engines take at once", whole(1, MAX_CHOICES)),
    Field("best_of", _INTEGER, "the value of `n`",
          "so many are made, and the `n` likeliest by the mean over their tokens are told; not streamed",
          whole(1, MAX_CHOICES), (COMPLETIONS,)),
    Field("logprobs", _FLAG, "false", "log-probability of each token", flag, (CHAT,)),
    Field("top_logprobs", _INTEGER, "0", f"alternatives with it, up to {MAX_TOP_LOGPROBS}; needs `logprobs`",
          whole(0, MAX_TOP_LOGPROBS), (CHAT,)),
    Field("logprobs", _INTEGER, "none", f"log-probabilities, with this many alternatives, up to {MAX_TOP_LOGPROBS}",
          whole(0, MAX_TOP_LOGPROBS), (COMPLETIONS,)),
    Field("echo", _FLAG, "false",
          "the prompt before the answer, with its tokens' `logprobs` where those are asked for; then `max_tokens` may "
          "be 0", flag, (COMPLETIONS,)),
    Field("prompt_logprobs", _INTEGER, "none",
          f"log-probabilities of the prompt's tokens as vLLM gives them, with up to {MAX_TOP_LOGPROBS} alternatives; "
          "not streamed", whole(0, MAX_TOP_LOGPROBS)),
    Field("stream", _FLAG, "false", "server-sent events, ended by `[DONE]`", flag),
    Field("stream_options", {"type": "object"}, "none", "`include_usage`: a last chunk with the usage",
          stream_options),
    Field("user", _TEXT, "none", "the tenant, unless the API key names one: fair share and cached prefixes go by it",
          text),
)  # fmt: skip

_ABSENT = "is not offered"
NEUTRAL: tuple[Neutral, ...] = (
    Neutral("tools", ([],), "of completions: chats alone have tools"),
    Neutral("tool_choice", ("none", "auto"), "of completions: there are no tools"),
    Neutral("functions", ([],), _ABSENT),
    Neutral("function_call", ("none", "auto"), "there are no functions"),
    Neutral("modalities", (["text"],), "text only"),
    Neutral("audio", (), _ABSENT),
    Neutral("web_search_options", (), _ABSENT),
    Neutral("reasoning_effort", (), _ABSENT),
    Neutral("verbosity", (), _ABSENT),
    Neutral("suffix", ("",), _ABSENT),
    Neutral("use_beam_search", (False,), _ABSENT),
    Neutral("length_penalty", (1, 1.0), "belongs to beam search"),
    Neutral("chat_template", (), "the model's own is used"),
    Neutral("chat_template_kwargs", ({},), _ABSENT),
    Neutral("add_generation_prompt", (True,), "an answer is always asked for"),
    Neutral("continue_final_message", (False,), _ABSENT),
    Neutral("include_stop_str_in_output", (False,), "stop texts are not returned"),
    Neutral("truncate_prompt_tokens", (), _ABSENT),
)
# Nothing that they say could change an answer here.
WITHOUT_EFFECT = frozenset(
    (
        "metadata",
        "parallel_tool_calls",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
    )
)
_NEUTRAL = {one.name: one for one in NEUTRAL}
_FIELDS = {door: {field.name: field for field in FIELDS if door in field.doors} for door in BOTH}


def read_fields(door: str, document: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """(value of each honoured field that says something, names that nobody knows). Null says nothing.

    Raises ApiError for a wrong type, and for a field that would change the answer and cannot be honoured.
    """
    known, values, unknown = _FIELDS[door], {}, []
    for name, value in document.items():
        if value is None:
            continue
        if (field := known.get(name)) is not None:
            values[name] = field.read(name, value)
        elif (neutral := _NEUTRAL.get(name)) is not None:
            if not any(value == one and type(value) is type(one) for one in neutral.values):
                shown = " or ".join(map(_json_like, neutral.values))
                raise not_honoured(name, value, f"{shown or 'nothing'} ({neutral.doc})")
        elif name not in WITHOUT_EFFECT:
            unknown.append(name)
    return values, tuple(unknown)


def sampling_options(door: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The client's options that fields carry as they are."""
    options: dict[str, Any] = {}
    sampling: dict[str, Any] = {}
    for name, value in values.items():
        field = _FIELDS[door][name]
        if field.option:
            (sampling if field.in_sampling else options)[field.option] = value
    if sampling:
        options["sampling_parameters"] = sampling
    return options


def _json_like(value: Any) -> str:
    return {True: "true", False: "false"}.get(value, str(value)) if isinstance(value, bool) else repr(value)
