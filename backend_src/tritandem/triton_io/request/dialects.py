"""What requests mean by what they leave out: our own way, and that of the servers whose clients call us.

A facade is an ensemble of one step, `scheduler`, whose config.pbtxt hands the prompt over under a name of its own: that
name tells the dialect, and costs nobody else anything. Pure. The shapes and names of facades stand in `facades`.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

from ...contracts.errors import ConfigError, InvalidRequest

EXCLUDE_INPUT = "exclude_input_in_output"  # an input, a parameter of config.pbtxt and a setting


@dataclass(frozen=True, slots=True)
class Dialect:
    """One set of defaults and of forms of the answer."""

    name: str
    max_tokens: int | None = None  # None: the server's setting
    temperature: float | None = None  # None: 0, or 1 where another field asks for draws
    lone_temperature_draws: bool = True  # False: it takes top_k, top_p or min_p as well
    exclude_input: str | None = None  # as the setting `scheduler.exclude_input_in_output`, None: that setting
    echoes_in_streams: bool = True  # False: no stream repeats the prompt, whatever the request says
    finish_reason: bool = True  # whether return_finish_reason is true by default
    finish_reason_always: bool = False  # on every response, the text "None" before the last
    null_logprobs: bool = False  # the text "null" where the sampling parameters ask for none
    one_stream: bool = False  # its outputs do not say which of several answers a text belongs to
    indices: bool = False  # batch_index and sequence_index on every response
    token_ids: bool = False  # output_ids and sequence_length on every response


OWN = Dialect("scheduler, ensemble")
VLLM = Dialect(
    "vllm_model",
    16,
    1.0,
    exclude_input="streams",
    finish_reason=False,
    finish_reason_always=True,
    null_logprobs=True,
    one_stream=True,
)
BLS = Dialect(
    "tensorrt_llm_bls", lone_temperature_draws=False, exclude_input="streams", echoes_in_streams=False, indices=True
)
LLM_API = Dialect(
    "tensorrt_llm, text_input", 32, lone_temperature_draws=False, exclude_input="all", finish_reason=False
)
TOKENS = Dialect(
    "tensorrt_llm, input_ids",
    lone_temperature_draws=False,
    exclude_input="streams",
    echoes_in_streams=False,
    indices=True,
    token_ids=True,
)

# Inputs of `scheduler` that only facades send: what dialect each brings, and the public input that it is.
PROMPTS = {
    "vllm_text": (VLLM, "text_input"),
    "bls_text": (BLS, "text_input"),
    "llm_api_text": (LLM_API, "text_input"),
    "trtllm_ids": (TOKENS, "input_ids"),
}


def take_dialect(arrays: MutableMapping[str, Any]) -> Dialect:
    """Of a request's tensors, which have their public names afterwards. Raises InvalidRequest for two of one name."""
    found = OWN
    for name, (dialect, public) in PROMPTS.items():
        if name in arrays:
            if public in arrays:
                raise InvalidRequest(public, "two prompts", "one")
            arrays[public], found = arrays.pop(name), dialect
    return found


def exclude_input(parameter: str, setting: str) -> str:
    """Which answers leave the prompt out: what config.pbtxt says goes before the setting. Raises ConfigError."""
    meant = {"": setting, "true": "all", "false": "none"}.get(parameter.strip().lower())
    if meant is None:
        raise ConfigError(f"config.pbtxt: {EXCLUDE_INPUT}: given {parameter!r}, allowed: true, false or nothing")
    return meant
