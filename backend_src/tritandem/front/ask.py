"""What a request asks for, once its body is read: questions for the model, options, and how to answer. Pure.

The body is bounded before it is parsed; JSON that would hold up others while it is parsed is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypedDict

from ..contracts.errors import InvalidRequest
from ..triton_io.request import client_json
from ..triton_io.request.guides import Guide
from .errors import ApiError, invalid, not_honoured
from .fields import CHAT, MAX_CHOICES, REQUIRED, Named, read_fields, sampling_options

MAX_BODY_BYTES = 32 << 20
MAX_DEPTH = 64  # of brackets: more than any request needs, and far from what Python's parser takes
COMPLETION_TOKENS = 16  # OpenAI's default at /v1/completions
OPENAI_TEMPERATURE = 1.0


class Question(TypedDict, total=False):
    """Keyword arguments of the client: one of the three."""

    prompt: str
    input_ids: list[int]
    messages: list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. Each of the `questions` gets `n` answers; choice `q * n + i` is the i-th to question q."""

    door: str
    model: str | None
    questions: tuple[Question, ...]
    n: int
    options: dict[str, Any]
    stream: bool
    include_usage: bool
    logprobs: int | None  # alternatives beside each token; None: no log-probabilities
    echo: bool  # the prompt goes before the answer
    answered: bool  # False: the prompt alone is wanted, whatever token came after it
    scored_prompt: bool  # as a list of its own
    user: str | None
    unknown: tuple[str, ...]  # names of fields that nobody knows
    tools: tuple[str, ...]  # names of functions that the model may call
    parallel_calls: bool
    names: dict[str, str]  # what the client called fields that have two names
    guide: Guide | None  # what the answer must be
    must_call: tuple[str, ...]  # functions of which one must be called; (): none must


def parse_body(body: bytes) -> dict[str, Any]:
    """Raises ApiError for what is no JSON object of a sound size and depth."""
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        raise invalid("body", f"invalid UTF-8 at byte {error.start}", "UTF-8") from None
    try:
        document = client_json.parse("body", text, MAX_BODY_BYTES, "a JSON object")
    except InvalidRequest as error:
        raise invalid("body", error.given, error.allowed, "invalid_json") from None
    if not isinstance(document, dict):
        raise invalid("body", document, "a JSON object")
    halves = "\\ud" in text or "\\uD" in text  # JSON can write half a character, as an escape
    for name, value in document.items():
        if isinstance(value, (dict, list)) and client_json.deeper_than(value, MAX_DEPTH):
            raise invalid(name, f"more than {MAX_DEPTH} levels", "fewer")
        if halves:
            _refuse_half_characters(name, value)
    return document


def _refuse_half_characters(name: str, value: Any) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise invalid(name, f"half a character at {error.start}", "text that UTF-8 can express") from None


def read_ask(door: str, document: Mapping[str, Any], temperature: float | None = OPENAI_TEMPERATURE) -> Ask:
    """`temperature`: of who names none. Raises ApiError."""
    values, unknown = read_fields(door, document)
    options = sampling_options(door, values)
    if temperature is not None:
        options.setdefault("temperature", temperature)
    names: dict[str, str] = {}
    _one_budget(values, options, names)
    if door != CHAT:
        options.setdefault("max_tokens", COMPLETION_TOKENS)
    logprobs = _logprobs(door, values)
    if logprobs is not None:
        options["logprobs"] = logprobs
    names["logprobs"] = "top_logprobs" if door == CHAT else "logprobs"
    questions = _questions(door, values)
    answered = _ask_for_prompt(values, options, logprobs)
    choice = values.get("tool_choice", "auto")
    n = values.get("n", 1)
    made = _answers(values, options, n)
    if made > 1:
        options["n"] = made
    if made > n:
        names["n"] = "best_of"
    if made * len(questions) > MAX_CHOICES:
        raise invalid(
            names.get("n", "n"), f"{made} for each of {len(questions)} prompts", f"{MAX_CHOICES} choices in all"
        )
    return Ask(
        door=door,
        model=values.get("model"),
        questions=questions,
        n=n,
        options=options,
        stream=values.get("stream", False),
        include_usage=values.get("stream_options", {}).get("include_usage") or False,
        logprobs=logprobs,
        echo=values.get("echo", False),
        answered=answered,
        scored_prompt="prompt_logprobs" in values,
        user=values.get("user"),
        unknown=unknown,
        tools=(tools := _tools(values, options)),
        parallel_calls=values.get("parallel_tool_calls", True) and not isinstance(choice, Named),
        names=names,
        guide=_guide(values),
        must_call=_must_call(choice, tools),
    )


def _tools(values: Mapping[str, Any], options: dict[str, Any]) -> tuple[str, ...]:
    """Tools that must not be called are not shown."""
    if values.get("tool_choice") == "none" or not options.get("tools"):
        options.pop("tools", None)
    return tuple(tool["function"]["name"] for tool in options.get("tools", ()))


def _guide(values: Mapping[str, Any]) -> Guide | None:
    """The one structure of the answer's text, whatever it is called. Raises ApiError."""
    given = [guide for guide in values.values() if isinstance(guide, Guide)]
    for guide in given[1:]:
        if guide.grammar != given[0].grammar:
            raise invalid(guide.field, f"a structure beside {given[0].field}", "one structure")
    return given[0] if given else None


def _must_call(choice: str | Named, tools: tuple[str, ...]) -> tuple[str, ...]:
    if isinstance(choice, Named):
        if choice.name not in tools:
            raise invalid("tool_choice", choice.name, f"one of tools: {', '.join(tools) or 'there are none'}")
        return (choice.name,)
    if choice != REQUIRED:
        return ()
    if not tools:
        raise invalid("tool_choice", choice, "auto or none without tools")
    return tools


def _one_budget(values: Mapping[str, Any], options: dict[str, Any], names: dict[str, str]) -> None:
    newer, older = values.get("max_completion_tokens"), values.get("max_tokens")
    if newer is None:
        return
    if older is not None and older != newer:
        raise invalid("max_tokens", f"{older}, and max_completion_tokens {newer}", "one of them, or the same twice")
    options["max_tokens"], names["max_tokens"] = newer, "max_completion_tokens"


def _logprobs(door: str, values: Mapping[str, Any]) -> int | None:
    if door != CHAT:
        count: int | None = values.get("logprobs")
        return count
    wanted, top = values.get("logprobs", False), values.get("top_logprobs")
    if top and not wanted:
        raise invalid("top_logprobs", top, "nothing without logprobs: true")
    return (top or 0) if wanted else None


def _questions(door: str, values: Mapping[str, Any]) -> tuple[Question, ...]:
    name = "messages" if door == CHAT else "prompt"
    if name not in values:
        raise invalid(name, "nothing", "it must be given", "missing_required_parameter")
    if door == CHAT:
        return (Question(messages=values[name]),)
    return tuple(Question(prompt=one) if isinstance(one, str) else Question(input_ids=one) for one in values[name])


def _answers(values: Mapping[str, Any], options: dict[str, Any], n: int) -> int:
    """How many answers the model makes to each question: more than n, where the best are wanted."""
    best_of: int = values.get("best_of", n)
    if best_of < n:
        raise invalid("best_of", best_of, f"at least n ({n})")
    if best_of > n:
        if values.get("stream"):
            raise not_honoured("best_of", best_of, f"{n}, the value of n, with stream: the best are known at the end")
        options.setdefault("logprobs", 0)
    return best_of


def _ask_for_prompt(values: Mapping[str, Any], options: dict[str, Any], logprobs: int | None) -> bool:
    """What the model must say of the prompt. False: it alone is wanted; the model then says one token for nobody."""
    scored: int | None = values.get("prompt_logprobs")
    if scored is not None and values.get("stream"):
        raise not_honoured("prompt_logprobs", scored, "nothing with stream; logprobs with echo are streamed")
    if values.get("echo") and logprobs is not None:
        scored = max(logprobs, scored or 0)
    if scored is not None:
        options["prompt_logprobs"] = scored
    if values.get("echo") and options["max_tokens"] == 0:
        options["max_tokens"] = 1
        return False
    return True


def refuse_other_models(ask: Ask, models: tuple[str, ...]) -> None:
    """Raises ApiError unless the model that was asked for is served here."""
    if ask.model is not None and ask.model not in models:
        raise no_model(ask.model, models)


def no_model(name: str, models: tuple[str, ...]) -> ApiError:
    error = invalid("model", name, ", ".join(models), "model_not_found")
    error.status = 404
    return error
