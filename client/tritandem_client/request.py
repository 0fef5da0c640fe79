"""From a caller's arguments to a request that any transport can send.

Owns the translation of options to tensors and parameters. Knows nothing about gRPC, HTTP or answers.
Pure, apart from the random request id.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Union, get_args

from tritandem_client.errors import InvalidRequest
from tritandem_client.tensors import INPUT_TYPES, InputTensor, input_tensor

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Priority = Literal["interactive", "normal", "batch"]
PRIORITIES: tuple[str, ...] = get_args(Priority)
TokenIds = Union[Sequence[int], "NDArray[np.integer[Any]]"]
Message = Mapping[str, Any]


class Options(TypedDict, total=False):
    """Everything that `generate`, `stream`, `chat` and `chat_stream` accept by keyword. What is not given is not sent.

    `tools`: of a chat, functions that the model may call, in OpenAI's form; the call is text in the model's own form.
    `n`: answers to the prompt, which is computed once. `logprobs`: number of alternatives per token (0: the chosen
    token's only), `prompt_logprobs` likewise of the prompt's tokens. `traceparent`: W3C trace context of the caller's
    span. `extra`: more request parameters, passed through as they are. `timeout_s` overrides the client's own.
    """

    max_tokens: int
    min_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    stop_words: Sequence[str] | str
    bad_words: Sequence[str] | str
    logit_bias: Mapping[int, float] | Mapping[str, float]
    allowed_token_ids: Sequence[int]
    end_id: int
    n: int
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logprobs: int
    prompt_logprobs: int
    exclude_input: bool
    sampling_parameters: Mapping[str, Any]
    priority: Priority
    deadline_ms: int
    tenant: str
    traceparent: str
    request_id: str
    timeout_s: float | None
    tools: Sequence[Mapping[str, Any]]
    extra: Mapping[str, str | int | bool]


@dataclass(frozen=True, slots=True)
class WireRequest:
    """One request, independent of the transport. `parameters` travel beside the tensors."""

    model: str
    request_id: str
    tensors: tuple[InputTensor, ...]
    parameters: dict[str, str | int | bool]
    stream: bool


_KNOWN = frozenset(Options.__annotations__)
# Options that travel as they are. Into `sampling_parameters` other options may go, too.
_PLAIN_TENSORS = tuple(name for name in INPUT_TYPES if name in _KNOWN - {"sampling_parameters"})


def build_request(
    model: str,
    options: Options,
    *,
    prompt: str | None = None,
    input_ids: TokenIds | None = None,
    messages: Sequence[Message] | None = None,
    stream: bool,
    report: Sequence[str] = (),
) -> WireRequest:
    """The request for one answer to exactly one of prompt, token ids or chat messages.

    `report` names what the server shall say beside the text ("finish_reason", ...): each becomes the
    tensor `return_<name>`. Raises InvalidRequest, TypeError for an unknown option.
    """
    unknown = sorted(set(options) - _KNOWN)
    if unknown:
        raise TypeError(f"unknown option {unknown[0]!r}; known: {', '.join(sorted(_KNOWN))}")
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    if "logit_bias" in given:
        given["logit_bias"] = json.dumps(dict(given["logit_bias"]))
    tensors, parameters = _question(prompt, input_ids, messages)
    tensors += [input_tensor(name, given[name]) for name in _PLAIN_TENSORS if _is_set(given, name)]
    if stream:
        tensors.append(input_tensor("stream", True))
    # Servers repeat the prompt in an answer of one piece unless told otherwise; streams never carry it.
    if "exclude_input" in given or (prompt is not None and not stream):
        tensors.append(input_tensor("exclude_input_in_output", given.get("exclude_input", True)))
    sampling = dict(options.get("sampling_parameters") or {})
    if "logprobs" in given:
        sampling["logprobs"] = given["logprobs"]
        report = (*report, "logprobs", "cumulative_logprob")
    if "prompt_logprobs" in given:
        sampling["prompt_logprobs"] = given["prompt_logprobs"]
        report = (*report, "prompt_logprobs")
    if sampling:
        tensors.append(input_tensor("sampling_parameters", json.dumps(sampling)))
    tensors += [input_tensor(f"return_{name}", True) for name in report]
    parameters |= _parameters(given)
    return WireRequest(model, options.get("request_id") or uuid.uuid4().hex, tuple(tensors), parameters, stream)


def build_stop(model: str, request_id: str) -> WireRequest:
    """The request that asks the server to end the running request `request_id` early."""
    return WireRequest(model, request_id, (input_tensor("stop", True),), {}, False)


def _question(
    prompt: str | None, input_ids: TokenIds | None, messages: Sequence[Message] | None
) -> tuple[list[InputTensor], dict[str, str | int | bool]]:
    if sum(source is not None for source in (prompt, input_ids, messages)) != 1:
        raise InvalidRequest("text_input", prompt, "exactly one of prompt, input_ids and messages")
    if prompt is not None:
        return [input_tensor("text_input", prompt)], {}
    if input_ids is not None:
        return [input_tensor("input_ids", input_ids)], {}
    return [], {"messages": json.dumps(_checked_messages(messages or ()), ensure_ascii=False)}


def _checked_messages(messages: Sequence[Message]) -> list[Message]:
    allowed = 'a non-empty list of {"role": text, "content": text}'
    if isinstance(messages, (str, Mapping)) or not messages:
        raise InvalidRequest("messages", messages, allowed)
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or "content" not in message:
            raise InvalidRequest("messages", message, allowed)
    return [dict(message) for message in messages]


def _parameters(given: Mapping[str, Any]) -> dict[str, str | int | bool]:
    parameters: dict[str, str | int | bool] = dict(given.get("extra") or {})
    if "priority" in given:
        if given["priority"] not in PRIORITIES:
            raise InvalidRequest("priority", given["priority"], f"one of {', '.join(PRIORITIES)}")
        parameters["priority_class"] = given["priority"]
    if "deadline_ms" in given:
        if isinstance(given["deadline_ms"], bool) or not isinstance(given["deadline_ms"], int):
            raise InvalidRequest("deadline_ms", given["deadline_ms"], "a whole number of milliseconds")
        parameters["deadline_ms"] = given["deadline_ms"]
    if given.get("tools"):
        parameters["tools"] = json.dumps(given["tools"], ensure_ascii=False)
    for name in ("tenant", "traceparent"):
        if name in given:
            parameters[name] = str(given[name])
    return parameters


def _is_set(given: Mapping[str, Any], name: str) -> bool:
    return name in given and given[name] not in ((), [])
