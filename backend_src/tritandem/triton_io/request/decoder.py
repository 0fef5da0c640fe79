"""Tensors and parameters of one request -> a validated GenerationRequest.

Two steps, because on the direct path the text becomes ids in between: `decode` reads everything that does
not need ids, `complete` adds them and checks the limits of model and engine. Pure; no Triton, no thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...contracts.arrays import Int32Array
from ...contracts.errors import InvalidRequest
from ...contracts.fields import MAX_BAD_WORD_TOKENS, MAX_STOP_TOKEN_IDS
from ...contracts.requests import GenerationRequest, OutputOptions, PriorityClass
from ...contracts.token_rules import check_token_rules
from ...scheduler.admission import too_many_choices
from .client_numbers import read_whole
from .dialects import OWN, Dialect
from .guides import STRUCTURES
from .incoming import check_id
from .prompt_source import PromptSource, read_prompt, read_tenant
from .sampling_fields import SamplingFields, is_sampling_name, merge
from .schema import GRAMMAR, OUTPUTS_OF_FLAG, PREFIX
from .tensor_values import Inputs

MAX_DEADLINE_MS = 86_400_000


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What a request is checked against."""

    max_context_tokens: int
    vocab_size: int
    end_ids: tuple[int, ...]
    default_max_tokens: int
    default_priority: PriorityClass
    default_deadline_s: float  # 0: none
    encode_word: Callable[[str], Sequence[int]]
    spell: Callable[[Sequence[int]], str]  # the text of ids
    control_ids: Mapping[str, int]  # tokens that no text shows, by their spelling
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)  # the authors', where they apply
    max_sequences: int = 0  # at once; 0: not known, admission decides when it is


@dataclass(frozen=True, slots=True)
class ReturnOptions:
    """What the scheduler must gather (`output`), the names of the outputs that were asked for by flags, and their form.
    `null_logprobs`: the text "null" stands for those that the sampling parameters do not ask for. `echoed_ids`: to be
    put in front of output_ids."""

    output: OutputOptions
    names: frozenset[str] = frozenset()
    dialect: Dialect = OWN
    null_logprobs: bool = False
    echoed_ids: Int32Array | None = None


@dataclass(frozen=True, slots=True)
class Draft:
    """A request without its ids."""

    request_id: str
    prompt: PromptSource
    fields: SamplingFields
    returns: ReturnOptions
    priority: PriorityClass | None
    tenant: str
    deadline_ms: int | None
    received_ns: int
    trace_parent: str = ""


def decode(
    request_id: str,
    inputs: Inputs,
    parameters: Mapping[str, Any],
    received_ns: int,
    trace_parent: str = "",
    dialect: Dialect = OWN,
    exclude_input: str = "streams",
) -> Draft:
    """Read one request. `parameters` come from `prompt_source.read_parameters`, `exclude_input` is the setting
    `exclude_input_in_output`. Raises InvalidRequest."""
    if GRAMMAR in parameters:
        raise InvalidRequest(GRAMMAR, "a parameter", f"{STRUCTURES}: {{grammar}}")
    prompt = read_prompt(inputs, parameters)
    sampling_parameters = {name: value for name, value in parameters.items() if is_sampling_name(name)}
    return Draft(
        request_id=read_request_id(request_id, parameters),
        prompt=prompt,
        fields=(fields := merge(inputs, sampling_parameters)),
        returns=_read_returns(inputs, prompt, fields, dialect, dialect.exclude_input or exclude_input),
        priority=_read_priority(inputs.text("priority"), parameters.get("priority_class")),
        tenant=read_tenant(parameters),
        deadline_ms=_read_deadline(inputs.number("deadline_ms"), parameters.get("deadline_ms")),
        received_ns=received_ns,
        trace_parent=trace_parent,
    )


def read_request_id(request_id: str, parameters: Mapping[str, Any]) -> str:
    """The id that the protocol carried, else the one among the parameters; "": none. Raises InvalidRequest."""
    for name in ("request_id", "id"):
        given = check_id(name, parameters.get(name, ""))
        request_id = request_id or given
    return request_id


def deadline_ns(draft: Draft, limits: ModelLimits) -> int | None:
    """The client's own, or the server's default; None: none."""
    deadline_s = limits.default_deadline_s if draft.deadline_ms is None else draft.deadline_ms / 1e3
    return draft.received_ns + int(deadline_s * 1e9) if deadline_s else None


def complete(draft: Draft, input_ids: Int32Array, tokenized_ns: int, limits: ModelLimits) -> GenerationRequest:
    """Add the prompt's ids and check what depends on model and engine. Raises InvalidRequest."""
    _check_ids(draft.prompt, input_ids, limits)
    room = limits.max_context_tokens - len(input_ids)
    if room < 1:
        allowed = f"at most {limits.max_context_tokens - 1} tokens (context {limits.max_context_tokens})"
        raise InvalidRequest(draft.prompt.field_name, f"{len(input_ids)} tokens", allowed)
    output = draft.returns.output
    wants_logprobs = output.logprobs or output.cumulative_logprob
    dialect = draft.returns.dialect
    most = min(dialect.max_tokens or limits.default_max_tokens, room)
    sampling = draft.fields.sampling(most, 0 if wants_logprobs else None, dialect, limits.sampling_defaults)
    if output.prompt_logprobs and sampling.prompt_logprobs is None:
        sampling = replace(sampling, prompt_logprobs=0)
    if sampling.n > 1 and output.stream and dialect.one_stream:
        allowed = "1 in a stream of this model; scheduler and ensemble say whose text it is"
        raise InvalidRequest("n", sampling.n, allowed)
    if 0 < limits.max_sequences < sampling.n:
        raise too_many_choices(sampling.n, limits.max_sequences)
    if sampling.max_tokens > room:
        allowed = f"1..{room} (context {limits.max_context_tokens}, prompt {len(input_ids)})"
        raise InvalidRequest("max_tokens", sampling.max_tokens, allowed)
    request = GenerationRequest(
        request_id=draft.request_id,
        input_ids=input_ids,
        sampling=sampling,
        prompt_text=None if output.exclude_input else draft.prompt.text,
        stop_words=_stop_words(draft.fields, limits),
        named_stops=(named := _named_stops(draft.fields, limits)),
        stop_ids=_stop_ids(draft.fields, limits, named),
        bad_words=_bad_words(draft.fields, limits),
        logit_bias=draft.fields.logit_bias,
        allowed_token_ids=draft.fields.allowed_token_ids,
        grammar=draft.fields.guide and draft.fields.guide.grammar,
        output=output,
        priority=limits.default_priority if draft.priority is None else draft.priority,
        tenant=draft.tenant,
        deadline_ns=deadline_ns(draft, limits),
        received_ns=draft.received_ns,
        tokenized_ns=tokenized_ns,
        trace_parent=draft.trace_parent,
    )
    check_token_rules(request, limits.vocab_size)
    return request


# --------------------------------------------------------------------------------------------------
# Parts that need no ids
# --------------------------------------------------------------------------------------------------


def _read_returns(
    inputs: Inputs, prompt: PromptSource, fields: SamplingFields, dialect: Dialect, without_prompt: str
) -> ReturnOptions:
    stream = bool(inputs.flag("stream"))
    exclude = inputs.flag("exclude_input_in_output")
    if exclude is None:
        exclude = inputs.flag(f"{PREFIX}exclude_input_from_output")
    echo_ids = dialect.token_ids and prompt.input_ids is not None
    if prompt.text is None and exclude is False and not prompt.stop and not echo_ids:
        raise InvalidRequest("exclude_input_in_output", False, "true without text_input")
    if exclude is None:
        exclude = (prompt.text is None and not echo_ids) or {"all": True, "none": False}.get(without_prompt, stream)
    exclude = exclude or (stream and not dialect.echoes_in_streams)
    names = _asked_for(inputs, dialect)
    if "prompt_logprobs" in fields.numbers:
        names |= {"prompt_logprobs"}
    return ReturnOptions(
        OutputOptions(
            stream=stream,
            exclude_input=exclude,
            finish_reason="finish_reason" in names,
            num_input_tokens="num_input_tokens" in names,
            num_output_tokens="num_output_tokens" in names,
            cumulative_logprob="cumulative_logprob" in names or "cum_log_probs" in names,
            logprobs="logprobs" in names or "output_log_probs" in names or dialect.token_ids,
            prompt_logprobs="prompt_logprobs" in names,
            control_tokens=fields.control_tokens,
        ),
        names,
        dialect,
        dialect.null_logprobs and "logprobs" not in fields.numbers,
        prompt.input_ids if echo_ids and not exclude else None,
    )


def _asked_for(inputs: Inputs, dialect: Dialect) -> frozenset[str]:
    names = {"finish_reason"} if dialect.finish_reason and inputs.flag("return_finish_reason") is not False else set()
    for flag in inputs:
        if flag in OUTPUTS_OF_FLAG and inputs.flag(flag):
            names.update(OUTPUTS_OF_FLAG[flag])
    return frozenset(names)


def _read_priority(tensor: str | None, parameter: object) -> PriorityClass | None:
    names = {given for given in (tensor, parameter) if given is not None}
    if not names:
        return None
    allowed = ", ".join(one.name.lower() for one in PriorityClass)
    if len(names) > 1:
        raise InvalidRequest("priority", f"{tensor!r} and {parameter!r}", f"one of {allowed}")
    name = names.pop()
    if not isinstance(name, str) or name.upper() not in PriorityClass.__members__:
        raise InvalidRequest("priority", name, f"one of {allowed}")
    return PriorityClass[name.upper()]


def _read_deadline(tensor: int | float | None, parameter: object) -> int | None:
    allowed = f"a whole number of milliseconds in 1..{MAX_DEADLINE_MS}"
    if tensor is not None and parameter is not None and tensor != parameter:
        raise InvalidRequest("deadline_ms", f"{tensor!r} and {parameter!r}", allowed)
    value = parameter if tensor is None else tensor
    if value is None:
        return None
    milliseconds = read_whole("deadline_ms", value, allowed)
    if not 1 <= milliseconds <= MAX_DEADLINE_MS:
        raise InvalidRequest("deadline_ms", value, allowed)
    return milliseconds


# --------------------------------------------------------------------------------------------------
# Parts that need the model's limits
# --------------------------------------------------------------------------------------------------


def _check_ids(prompt: PromptSource, input_ids: Int32Array, limits: ModelLimits) -> None:
    if not len(input_ids):
        raise InvalidRequest(prompt.field_name, "a prompt without tokens", "at least one token")
    low, high = int(input_ids.min()), int(input_ids.max())
    if low < 0 or high >= limits.vocab_size:
        raise InvalidRequest("input_ids", low if low < 0 else high, f"ids in 0..{limits.vocab_size - 1}")


def _end_ids(fields: SamplingFields, limits: ModelLimits) -> tuple[int, ...]:
    if fields.ignore_eos or (fields.end_id is not None and not 0 <= fields.end_id < limits.vocab_size):
        return ()  # an end token that no token is
    return limits.end_ids if fields.end_id is None else (fields.end_id,)


def _named_stops(fields: SamplingFields, limits: ModelLimits) -> tuple[tuple[int, str | int], ...]:
    """Ids that the client asked for, each with its name there, beside the end tokens."""
    named: dict[int, str | int] = {token: token for token in fields.stop_token_ids}
    named |= {limits.control_ids[word]: word for word in fields.stop_words if word in limits.control_ids}
    ends = _end_ids(fields, limits) if named else ()
    return tuple((token, name) for token, name in named.items() if token not in ends)


def _stop_ids(fields: SamplingFields, limits: ModelLimits, named: tuple[tuple[int, str | int], ...]) -> tuple[int, ...]:
    stop_ids = (*_end_ids(fields, limits), *(token for token, _ in named))
    _check_range("stop_token_ids", fields.stop_token_ids, limits)
    if len(stop_ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidRequest("stop_token_ids", f"{len(stop_ids)} with the end tokens", f"at most {MAX_STOP_TOKEN_IDS}")
    return stop_ids


def _stop_words(fields: SamplingFields, limits: ModelLimits) -> tuple[str, ...]:
    """Those that text shows; of the others the ids stop."""
    for ids in fields.stop_id_words:
        _check_range("stop_words_list", ids, limits)
    spelled = (limits.spell(ids) for ids in fields.stop_id_words)
    return tuple(word for word in (*fields.stop_words, *spelled) if word and word not in limits.control_ids)


def _bad_words(fields: SamplingFields, limits: ModelLimits) -> tuple[tuple[int, ...], ...]:
    for ids in fields.bad_id_words:
        _check_range("bad_words_list", ids, limits)
        if len(ids) > MAX_BAD_WORD_TOKENS:
            raise InvalidRequest("bad_words_list", ids, f"words of 1..{MAX_BAD_WORD_TOKENS} tokens")
    return (*(_bad_word(word, limits) for word in fields.bad_words), *fields.bad_id_words)


def _check_range(name: str, ids: Sequence[int], limits: ModelLimits) -> None:
    for token_id in ids:
        if not 0 <= token_id < limits.vocab_size:
            raise InvalidRequest(name, token_id, f"ids in 0..{limits.vocab_size - 1}")


def _bad_word(word: str, limits: ModelLimits) -> tuple[int, ...]:
    ids = tuple(limits.encode_word(word))
    if not 1 <= len(ids) <= MAX_BAD_WORD_TOKENS:
        raise InvalidRequest("bad_words", word, f"words of 1..{MAX_BAD_WORD_TOKENS} tokens ({len(ids)} here)")
    return ids
