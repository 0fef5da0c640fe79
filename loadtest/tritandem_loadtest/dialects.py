"""What the tensors of each Triton LLM deployment are called: data, not code.

A dialect says under which name, type and shape a request's options travel and how they are read back. Adding a
deployment is adding one entry to `DIALECTS`. Knows nothing about gRPC or HTTP.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Tensor:
    """One input tensor: Triton's name and datatype."""

    name: str
    datatype: str


@dataclass(frozen=True, slots=True)
class Dialect:
    """`tensors`: option -> its tensor; `sampling_keys`: option -> its key in the JSON tensor `sampling_tensor`.

    An option with neither is refused, so that no request silently runs with other parameters than asked for.
    `always` tensors are sent with every request. `ignore_eos` is the option that keeps a model from ending early
    ("": there is none). `stages`: name -> the two places between which that stage of the server lies, either in the
    INT64 output `stamps_output` or among the outputs `stamp_outputs` of one stamp each (ns of one clock, 0: not
    reached). With `messages_parameter` a chat travels as JSON in that request parameter, so that the server applies its
    own template.
    """

    model: str
    shape: tuple[int, ...]
    tensors: dict[str, Tensor]
    sampling_tensor: str = ""
    sampling_keys: dict[str, str] = field(default_factory=dict)
    always: dict[str, Any] = field(default_factory=dict)
    ignore_eos: tuple[str, Any] = ("", None)
    text_output: str = "text_output"
    count_output: str = ""  # output tensor that says how many tokens a response carries
    input_count_output: str = ""
    cached_count_output: str = ""
    stamps_output: str = ""
    stamp_outputs: tuple[str, ...] = ()
    stages: dict[str, tuple[int, int]] = field(default_factory=dict)
    messages_parameter: str = ""


WHOLE = "whole"  # the stage from a request's arrival in a model's process to its last response, made and not yet sent
_SAMPLING = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "min_tokens", "ignore_eos")
_FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")

_TRTLLM_ENSEMBLE = {
    "prompt": Tensor("text_input", "BYTES"),
    "max_tokens": Tensor("max_tokens", "INT32"),
    "stream": Tensor("stream", "BOOL"),
    "exclude_input": Tensor("exclude_input_in_output", "BOOL"),
    "top_k": Tensor("top_k", "INT32"),
    "end_id": Tensor("end_id", "INT32"),
    **{name: Tensor(name, "FP32") for name in _FLOATS if name != "min_p"},
}

DIALECTS: dict[str, Dialect] = {
    "tritandem": Dialect(
        model="ensemble",
        shape=(1, 1),
        tensors={
            "prompt": Tensor("text_input", "BYTES"),
            "max_tokens": Tensor("max_tokens", "INT32"),
            "stream": Tensor("stream", "BOOL"),
            "exclude_input": Tensor("exclude_input_in_output", "BOOL"),
            "count_input": Tensor("return_num_input_tokens", "BOOL"),
            "count_output": Tensor("return_num_output_tokens", "BOOL"),
        },
        sampling_tensor="sampling_parameters",
        sampling_keys={key: key for key in (*_SAMPLING[1:], *_FLOATS[3:], "structured_outputs")},
        always={"exclude_input": True, "count_input": True, "count_output": True},
        ignore_eos=("ignore_eos", True),
        count_output="num_output_tokens",
        input_count_output="num_input_tokens",
        cached_count_output="cached_tokens",
        stamps_output="stamps",
        # received 0, tokenized 1, dispatched 2, accepted 3, prefill start 4, first token 5, last token 6, first sent 7,
        # last response made 8
        stages={
            "tokenize": (0, 1),
            "queue": (1, 2),
            "engine queue": (2, 4),
            "prefill": (4, 5),
            "decode": (5, 6),
            "first send": (5, 7),
            "last wait": (6, 8),
            WHOLE: (0, 8),
        },
        messages_parameter="messages",
    ),
    # The ensemble of TensorRT-LLM, as its `config.pbtxt` has been since `seed` and `min_tokens` got these names.
    "trtllm": Dialect(
        model="ensemble",
        shape=(1, 1),
        tensors={
            **_TRTLLM_ENSEMBLE,
            "seed": Tensor("seed", "UINT64"),
            "min_tokens": Tensor("min_tokens", "INT32"),
            "count_input": Tensor("return_num_input_tokens", "BOOL"),
            "count_output": Tensor("return_num_output_tokens", "BOOL"),
            "perf_metrics": Tensor("return_perf_metrics", "BOOL"),  # asked for by `--sampling '{"perf_metrics": true}'`
        },
        always={"exclude_input": True, "count_input": True, "count_output": True},
        ignore_eos=("end_id", -1),
        count_output="num_output_tokens",
        input_count_output="num_input_tokens",
        stamp_outputs=("arrival_time_ns", "first_scheduled_time_ns", "first_token_time_ns", "last_token_time_ns"),
        stages={"queue": (0, 1), "prefill": (1, 2), "decode": (2, 3)},
    ),
    # The same in releases before that, which count no tokens.
    "trtllm-legacy": Dialect(
        model="ensemble",
        shape=(1, 1),
        tensors={
            **_TRTLLM_ENSEMBLE,
            "seed": Tensor("random_seed", "UINT64"),
            "min_tokens": Tensor("min_length", "INT32"),
        },
        ignore_eos=("end_id", -1),
    ),
    # TensorRT-LLM's Python model over its LLM API: no batch dimension, no way to ignore the end token. Each response
    # repeats the text so far; it is the responses that are counted.
    "trtllm-llmapi": Dialect(
        model="tensorrt_llm",
        shape=(1,),
        tensors={
            "prompt": Tensor("text_input", "BYTES"),
            "stream": Tensor("streaming", "BOOL"),
            "max_tokens": Tensor("sampling_param_max_tokens", "INT32"),
            "top_k": Tensor("sampling_param_top_k", "INT32"),
            "seed": Tensor("sampling_param_seed", "UINT64"),
            **{
                name: Tensor(f"sampling_param_{name}", "FP32")
                for name in ("temperature", "top_p", "presence_penalty", "frequency_penalty")
            },
        },
    ),
    "vllm": Dialect(
        model="vllm_model",
        shape=(1,),
        tensors={
            "prompt": Tensor("text_input", "BYTES"),
            "stream": Tensor("stream", "BOOL"),
            "exclude_input": Tensor("exclude_input_in_output", "BOOL"),
            "count_input": Tensor("return_num_input_tokens", "BOOL"),
            "count_output": Tensor("return_num_output_tokens", "BOOL"),
        },
        sampling_tensor="sampling_parameters",
        sampling_keys={key: key for key in (*_SAMPLING, *_FLOATS[3:], "structured_outputs")},
        always={"exclude_input": True, "count_input": True, "count_output": True},
        ignore_eos=("ignore_eos", True),
        count_output="num_output_tokens",
        input_count_output="num_input_tokens",
    ),
}
