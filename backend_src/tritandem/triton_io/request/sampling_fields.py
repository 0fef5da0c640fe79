"""Typed tensors, `sampling_parameters` JSON and request parameters -> one set of sampling fields.

Pure. A field may come from several sources as long as they agree; what is not understood is refused by
name. Numbers may be written as JSON strings ("0.1"), as Triton's vLLM samples do.
"""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np

from ...contracts.errors import InvalidRequest
from ...contracts.fields import (
    FIELDS,
    MAX_BAD_WORDS,
    MAX_STOP_TOKEN_IDS,
    MAX_STOP_WORD_CHARS,
    MAX_STOP_WORDS,
    SamplingParams,
)
from . import client_json
from .client_numbers import read_real, read_whole
from .dialects import OWN, Dialect
from .guides import GUIDE, GUIDE_NAMES, GUIDE_TYPE, Guide, leaves_choices, read_guide, read_typed_guide
from .schema import (
    ALIASES,
    FACADE_NEUTRAL_INPUTS,
    FACADE_REFUSED_INPUTS,
    NEUTRAL_INPUTS,
    PREFIX,
    REFUSED_INPUTS,
    SAMPLING_INPUTS,
    PublicTensor,
    by_name,
)
from .tensor_values import Array, Inputs

MAX_JSON_CHARS = 1 << 20
_NOT_SAMPLED = ("ignore_eos", "skip_special_tokens")  # what they say concerns the end and the text
_OFF = {name: facts.off for name, facts in FIELDS.items() if facts.off}
SEED_BITS = 53  # of a random seed: what every reader of JSON keeps, so that it can be sent back


@dataclass(frozen=True, slots=True)
class SamplingFields:
    """What the client asked for; `numbers` are keyword arguments of SamplingParams, absent: default."""

    numbers: dict[str, Any] = field(default_factory=dict)
    stop_words: tuple[str, ...] = ()
    bad_words: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    stop_id_words: tuple[tuple[int, ...], ...] = ()  # of two tokens and more
    bad_id_words: tuple[tuple[int, ...], ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    end_id: int | None = None
    guide: Guide | None = None  # what the answer must be

    @property
    def ignore_eos(self) -> bool:
        """Whether the model's own end tokens end nothing."""
        return bool(self.numbers.get("ignore_eos", False))

    @property
    def control_tokens(self) -> bool:
        """Whether they are shown in the text."""
        return not self.numbers.get("skip_special_tokens", True)

    def sampling(
        self,
        max_tokens: int,
        logprobs: int | None,
        dialect: Dialect = OWN,
        of_authors: Mapping[str, float] = MappingProxyType({}),
    ) -> SamplingParams:
        """Apply the defaults: first `of_authors`, of the model, then the dialect's; our own are greedy unless sampling
        was asked for, with a random seed for who samples without one. What a request turns off stays off.

        Raises InvalidRequest.
        """
        numbers = {n: v for n, v in self.numbers.items() if n not in _NOT_SAMPLED and v not in _OFF.get(n, ())}
        for name, value in of_authors.items():
            if name not in self.numbers:
                numbers[name] = value
        numbers.setdefault("max_tokens", max_tokens)
        if dialect.temperature is not None:
            numbers.setdefault("temperature", dialect.temperature)
        elif dialect.lone_temperature_draws or "temperature" in of_authors:
            numbers.setdefault("temperature", 1.0 if _asks_for_sampling(numbers) else 0.0)
        else:
            asked = _asks_for_sampling({name: value for name, value in numbers.items() if name != "seed"})
            numbers["temperature"] = numbers.get("temperature", 1.0) if asked else 0.0
        if numbers.get("logprobs") is None:
            numbers["logprobs"] = logprobs
        if numbers["temperature"]:
            numbers.setdefault("seed", secrets.randbits(SEED_BITS))
        return SamplingParams(**numbers)


def _asks_for_sampling(numbers: Mapping[str, Any]) -> bool:
    return any(facts.draws(numbers[name]) for name, facts in FIELDS.items() if facts.draws and name in numbers)


# --------------------------------------------------------------------------------------------------
# One JSON value -> one Python value
# --------------------------------------------------------------------------------------------------


def _flag(name: str, value: object) -> bool:
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    if not isinstance(value, bool):
        raise InvalidRequest(name, value, "true or false")
    return value


def _words(name: str, value: object) -> tuple[str, ...]:
    listed = [value] if isinstance(value, str) else value
    if not isinstance(listed, list) or not all(isinstance(word, str) for word in listed):
        raise InvalidRequest(name, value, "a text or a list of texts")
    return tuple(word for word in listed if word)


def _whole_list(name: str, value: object) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise InvalidRequest(name, value, "a list of whole numbers")
    return tuple(read_whole(name, one) for one in value)


def _bias(name: str, value: object) -> tuple[tuple[int, float], ...]:
    """By id; a bias of 0 says nothing. As a tensor or parameter it is JSON text."""
    given = parse_json_object(name, value) if isinstance(value, str) else value
    if not isinstance(given, dict):
        raise InvalidRequest(name, value, 'a JSON object such as {"42": -100}')
    read = {read_whole(name, token): read_real(f"{name}[{token}]", one) for token, one in given.items()}
    if len(read) != len(given):
        raise InvalidRequest(name, "an id twice", "each id once")
    return tuple(sorted((token, one) for token, one in read.items() if one))


_NEWER_BUDGET = "max_completion_tokens"  # clients send it beside a default max_tokens of theirs: it goes before that
_READERS: dict[str, Callable[[str, object], Any]] = {
    **{t.name: (read_real if t.dtype == "FP32" else read_whole) for t in SAMPLING_INPUTS},
    _NEWER_BUDGET: read_whole,
    "best_of": read_whole,
    "logprobs": read_whole,
    "prompt_logprobs": read_whole,
    "ignore_eos": _flag,
    "skip_special_tokens": _flag,
    "end_id": read_whole,
    "stop_words": _words,
    "bad_words": _words,
    "stop_token_ids": _whole_list,
    "logit_bias": _bias,
    "allowed_token_ids": _whole_list,
}

_ID_WORDS = {"stop_words_list": MAX_STOP_WORDS, "bad_words_list": MAX_BAD_WORDS}
_LISTS = frozenset({"stop_words", "bad_words", "stop_token_ids", "allowed_token_ids"})
_OTHER_NAMES = {"stop": "stop_words", "max_new_tokens": "max_tokens"}
_JSON_ALIASES = {**{alias: name for alias, name in ALIASES.items() if not alias.startswith(PREFIX)}, **_OTHER_NAMES}

_NUMBERS = {
    name: ALIASES.get(name, name) for name in (*(tensor.name for tensor in SAMPLING_INPUTS), *ALIASES, "end_id")
}
_WORDS = {"stop_words": "stop_words", "bad_words": "bad_words", f"{PREFIX}stop": "stop_words"}
_NEUTRAL_INPUTS, _REFUSED_INPUTS = (
    by_name((*NEUTRAL_INPUTS, *FACADE_NEUTRAL_INPUTS)),
    by_name((*REFUSED_INPUTS, *FACADE_REFUSED_INPUTS)),
)

# Names that existing clients send with a value that changes nothing here.
_NEUTRAL: dict[str, tuple[Callable[[str, object], Any], object]] = {
    "beam_width": (read_whole, 1),
    "length_penalty": (read_real, 1.0),
    "use_beam_search": (_flag, False),
    "early_stopping": (_flag, False),
    "detokenize": (_flag, True),
    "spaces_between_special_tokens": (_flag, True),
    "include_stop_str_in_output": (_flag, False),
}

KNOWN_NAMES = sorted({*_READERS, *_JSON_ALIASES, *_NEUTRAL, *GUIDE_NAMES})


def is_sampling_name(name: str) -> bool:
    return name in _READERS or name in _JSON_ALIASES or name in _NEUTRAL or name in GUIDE_NAMES


# --------------------------------------------------------------------------------------------------
# Merging
# --------------------------------------------------------------------------------------------------


def parse_json_object(name: str, text: str) -> dict[str, Any]:
    """Raises InvalidRequest unless `text` is a JSON object without repeated keys."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        built = dict(pairs)
        if len(built) != len(pairs):
            raise InvalidRequest(name, "a repeated key", "each key once")
        return built

    value = client_json.parse(name, text, MAX_JSON_CHARS, "a JSON object", once)
    if not isinstance(value, dict):
        raise InvalidRequest(name, type(value).__name__, "a JSON object")
    return value


def merge(inputs: Inputs, parameters: Mapping[str, Any]) -> SamplingFields:
    """All sources of sampling fields of one request. Raises InvalidRequest.

    `parameters` are the request's custom parameters that `is_sampling_name` accepts.
    """
    found: dict[str, Any] = {}
    for name in inputs:
        if name in _NUMBERS:
            _put(found, _NUMBERS[name], inputs.number(name))
        elif name in _WORDS:
            _put(found, _WORDS[name], inputs.words(name))
        elif name == "logit_bias":
            _put(found, name, _bias(name, inputs.text(name)) if inputs.text(name) else None)
        elif name == "allowed_token_ids":
            _put(found, name, tuple(np.asarray(inputs.ids(name)).tolist()))
        elif name in _ID_WORDS:
            _put(found, name, _id_words(name, inputs[name]))
        elif name in _NEUTRAL_INPUTS:
            _refuse_unless_neutral(_NEUTRAL_INPUTS[name], inputs)
        elif name in _REFUSED_INPUTS and not inputs.is_empty(name):
            raise InvalidRequest(name, "an input of another server", f"nothing: {_REFUSED_INPUTS[name].doc}")
    _put_guide(found, read_typed_guide(inputs.text(GUIDE_TYPE), inputs.text(GUIDE)))
    text = inputs.text("sampling_parameters")
    if text:
        for name, value in parse_json_object("sampling_parameters", text).items():
            _put_json(found, name, value)
    for name, value in parameters.items():
        _put_json(found, name, _list_in_text(name, value))
    return _checked(found)


def _id_words(name: str, array: Array) -> tuple[tuple[int, ...], ...]:
    """int32 [1, 2, n]: ids of all words in a row, and where each ends; -1 where no word is left."""
    allowed = f"at most {_ID_WORDS[name]} words: their ids in the first row, their ends in the second, then -1"
    if array.dtype != np.int32 or array.ndim != 3 or array.shape[:2] != (1, 2):
        raise InvalidRequest(name, f"{array.dtype} {list(array.shape)}", allowed)
    ids, ends = array[0].tolist()
    ends = ends[: ends.index(-1)] if -1 in ends else ends
    starts = [0, *ends][: len(ends)]
    if len(ends) > _ID_WORDS[name] or any(not 0 <= a < b <= len(ids) for a, b in zip(starts, ends, strict=True)):
        raise InvalidRequest(name, ends, allowed)
    return tuple(tuple(ids[a:b]) for a, b in zip(starts, ends, strict=True))


def _list_in_text(name: str, value: object) -> object:
    """Parameters are numbers, flags and texts: a list comes as its JSON text."""
    if not isinstance(value, str) or not value.startswith("[") or _JSON_ALIASES.get(name, name) not in _LISTS:
        return value
    try:
        return client_json.parse(name, value, MAX_JSON_CHARS, "a JSON list, or one text")
    except InvalidRequest:
        return value


def _refuse_unless_neutral(tensor: PublicTensor, inputs: Inputs) -> None:
    value = inputs.number(tensor.name)
    if value is not None and tensor.allowed != "any" and float(value) != _neutral_number(tensor.allowed):
        raise InvalidRequest(tensor.name, value, f"{tensor.allowed} ({tensor.doc})")


def _neutral_number(allowed: str) -> float:
    return {"1": 1.0, "false": 0.0}[allowed]


def _put_json(found: dict[str, Any], name: str, value: object) -> None:
    if value is None:  # vLLM's clients send null for "default"
        return
    if name in _NEUTRAL:
        read, neutral = _NEUTRAL[name]
        if read(name, value) != neutral:
            raise InvalidRequest(name, value, f"{json.dumps(neutral)} (nothing else is offered)")
        return
    if name in GUIDE_NAMES:
        _put_guide(found, read_guide(name, value))
        return
    target = _JSON_ALIASES.get(name, name)
    if target not in _READERS:
        raise InvalidRequest(name, "an unknown key of sampling_parameters", f"one of {', '.join(KNOWN_NAMES)}")
    _put(found, target, _READERS[target](name, value))


def _put(found: dict[str, Any], name: str, value: Any) -> None:
    """Keep the first source's value; a later one must agree with it (in float32, as tensors carry it)."""
    if value is None:
        return
    if name not in found:
        found[name] = value
        return
    first = found[name]
    numeric = isinstance(first, float) or isinstance(value, float)
    agree = bool(np.float32(first) == np.float32(value)) if numeric else first == value
    if not agree:
        raise InvalidRequest(name, f"{first!r} and {value!r}", "one value, or the same one in every place")


def _put_guide(found: dict[str, Any], guide: Guide | None) -> None:
    if guide is None:
        return
    first = found.setdefault("guide", guide)
    if first.grammar != guide.grammar:
        raise InvalidRequest(guide.field, f"a structure beside {first.field}", "one structure")


def _checked(found: dict[str, Any]) -> SamplingFields:
    stop_words = _bounded_words("stop_words", found.pop("stop_words", ()), MAX_STOP_WORDS)
    bad_words = _bounded_words("bad_words", found.pop("bad_words", ()), MAX_BAD_WORDS)
    stop_token_ids = found.pop("stop_token_ids", ())
    if len(stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidRequest("stop_token_ids", f"{len(stop_token_ids)} ids", f"at most {MAX_STOP_TOKEN_IDS}")
    if _NEWER_BUDGET in found:
        found["max_tokens"] = found.pop(_NEWER_BUDGET)
    end_id = found.pop("end_id", None)
    if end_id is not None and not -(2**31) <= end_id < 2**31:
        raise InvalidRequest("end_id", end_id, "an id; -1 or beyond the vocabulary: none")
    if (best_of := found.pop("best_of", 1)) not in (1, n := found.get("n", 1)):
        raise InvalidRequest("best_of", best_of, f"{n}, the value of n: the OpenAI API alone has more")
    for name, value in found.items():
        if isinstance(value, float) and math.isnan(value):
            raise InvalidRequest(name, value, "a number")
    stop_ids, bad_ids = found.pop("stop_words_list", ()), found.pop("bad_words_list", ())
    stop_token_ids = (*stop_token_ids, *(word[0] for word in stop_ids if len(word) == 1))
    longer = tuple(word for word in stop_ids if len(word) > 1)
    bias, allowed = found.pop("logit_bias", ()), tuple(dict.fromkeys(found.pop("allowed_token_ids", ())))
    guide = found.pop("guide", None)
    if guide is not None and allowed:
        raise InvalidRequest("allowed_token_ids", list(allowed), f"nothing beside {guide.field}")
    if guide is not None and bad_words and not leaves_choices(guide.grammar, bad_words):
        raise InvalidRequest("bad_words", list(bad_words), f"words that leave one of the texts of {guide.field}")
    return SamplingFields(found, stop_words, bad_words, stop_token_ids, longer, bad_ids, bias, allowed, end_id, guide)


def _bounded_words(name: str, words: tuple[str, ...], limit: int) -> tuple[str, ...]:
    if len(words) > limit:
        raise InvalidRequest(name, f"{len(words)} words", f"at most {limit}")
    for word in words:
        if len(word) > MAX_STOP_WORD_CHARS:
            raise InvalidRequest(name, word, f"words of at most {MAX_STOP_WORD_CHARS} characters")
        if any("\ud800" <= char <= "\udfff" for char in word):  # JSON can write half a character
            raise InvalidRequest(name, word, "text that UTF-8 can express")
    return words
