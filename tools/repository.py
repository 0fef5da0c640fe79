"""Tensors of model_repository/ that follow from the table of tensors: `python -m tools.repository` writes them.

A test compares. The rest of each config.pbtxt, comments among it, is written by hand; facades are made whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from tritandem.triton_io.request import schema
from tritandem.triton_io.request.schema import PREFIX, PublicTensor

REPOSITORY = Path(__file__).resolve().parents[1] / "model_repository"


@dataclass(frozen=True, slots=True)
class Facade:
    """An ensemble of one step, `scheduler`: which of its inputs have which names here, and which outputs there are."""

    about: str
    inputs: Mapping[str, str]  # name here -> name at the scheduler
    outputs: tuple[str, ...]
    max_batch_size: int = 1


_SAMPLING = (*(t.name for t in schema.SAMPLING_INPUTS if t.name != "min_p"), *schema.FIELD_ALIASES)
_REFUSED = tuple(tensor.name for tensor in schema.REFUSED_INPUTS)
_OF_TRTLLM = (
    "cum_log_probs",
    "output_log_probs",
    "batch_index",
    "sequence_index",
    "num_input_tokens",
    "num_output_tokens",
)
_TIMES = schema.OUTPUTS_OF_FLAG["return_perf_metrics"]
_UNSERVED = tuple(tensor.name for tensor in schema.OUTPUTS if tensor.doc.startswith("never"))


_PERF = (*_OF_TRTLLM, *_TIMES, *_UNSERVED)


def _same(*names: str) -> dict[str, str]:
    return {name: name for name in names}


_FLAGS = ("return_log_probs", "return_context_logits", "return_generation_logits", "return_perf_metrics",
          "return_num_input_tokens", "return_num_output_tokens")  # fmt: skip
_GUIDES = ("guided_decoding_guide_type", "guided_decoding_guide")
_NEUTRAL = ("use_draft_logits", "pad_id", "length_penalty", "beam_width", "num_return_sequences")

FACADES = {
    "vllm_model": Facade(
        "for clients of Triton's vLLM backend, without the batch dimension",
        {"text_input": "vllm_text"}
        | _same("stream", "sampling_parameters", "exclude_input_in_output", "return_finish_reason")
        | _same("return_cumulative_logprob", "return_logprobs", "return_num_input_tokens", "return_num_output_tokens")
        | _same("image", "embedding_request"),
        ("text_output", "finish_reason", "cumulative_logprob", "logprobs", "num_input_tokens", "num_output_tokens"),
        max_batch_size=0,
    ),
    "tensorrt_llm_bls": Facade(
        "for clients of the TensorRT-LLM backend",
        {"text_input": "bls_text"}
        | _same(*_SAMPLING, "bad_words", "stop_words", "end_id", "stream", "exclude_input_in_output", *_NEUTRAL)
        | _same(*_FLAGS, "stop", *_GUIDES, *_REFUSED),
        ("text_output", *_PERF),
    ),
    "tensorrt_llm": Facade(
        "for clients of the TensorRT-LLM backend, with ids, or text and sampling_param_*",
        {"input_ids": "trtllm_ids", "text_input": "llm_api_text", "request_output_len": "max_tokens"}
        | {"streaming": "stream", "runtime_top_k": "top_k", "runtime_top_p": "top_p", "len_penalty": "length_penalty"}
        | _same(*(name for name in _SAMPLING if name not in ("max_tokens", "top_k", "top_p")), "end_id")
        | _same(
            "exclude_input_in_output", "return_finish_reason", "return_stop_reason", "return_cumulative_logprob", "stop"
        )
        | _same("pad_id", "beam_width", "num_return_sequences", *_FLAGS, *_REFUSED)
        | _same(*(t.name for t in schema.FACADE_INPUTS if t.name.startswith(PREFIX)))
        | _same("input_lengths", "stop_words_list", "bad_words_list", *_GUIDES)
        | _same(*(t.name for t in (*schema.FACADE_NEUTRAL_INPUTS, *schema.FACADE_REFUSED_INPUTS))),
        ("text_output", "output_ids", "sequence_length", "finish_reason", "stop_reason", "cumulative_logprob", *_PERF),
    ),
}


def tensor_lines(tensors: Iterable[PublicTensor], *, optional: bool = False, ragged: bool = False) -> str:
    def line(tensor: PublicTensor) -> str:
        kind = "STRING" if tensor.dtype == "BYTES" else tensor.dtype
        more = (" optional: true" if optional else "") + (
            " allow_ragged_batch: true" if ragged and -1 in tensor.dims else ""
        )
        dims = ", ".join(map(str, tensor.dims))
        return f'  {{ name: "{tensor.name}" data_type: TYPE_{kind} dims: [ {dims} ]{more} }}'

    return ",\n".join(map(line, tensors))


def maps(kind: str, names: Mapping[str, str]) -> str:
    """Of an ensemble's step: its own names -> the ensemble's."""
    return "".join(f'      {kind}_map {{ key: "{key}" value: "{value}" }}\n' for key, value in names.items())


def facade_text(name: str, facade: Facade) -> str:
    """The whole config.pbtxt."""
    known_inputs, known_outputs = schema.INPUT_OF_NAME, schema.by_name((*schema.OUTPUTS, *schema.FACADE_OUTPUTS))
    inputs = [replace(known_inputs[inner], name=here) for here, inner in facade.inputs.items()]
    return f"""# Another face of `scheduler`: {facade.about}.
# Made by `python -m tools.repository`; the prompt's name at the scheduler tells it the dialect.
name: "{name}"
platform: "ensemble"
max_batch_size: {facade.max_batch_size}
input [
{tensor_lines(inputs, optional=True)}
]
output [
{tensor_lines(known_outputs[name] for name in facade.outputs)}
]
ensemble_scheduling {{
  step [
    {{
      model_name: "scheduler"
      model_version: -1
{maps("input", {inner: here for here, inner in facade.inputs.items()})}{maps("output", _same(*facade.outputs))}    }}
  ]
}}
"""


def _with_tensors(text: str, inputs: str, outputs: str) -> str:
    text = re.sub(r"^input \[\n.*?\n\]\n", lambda _: f"input [\n{inputs}\n]\n", text, count=1, flags=re.M | re.S)
    return re.sub(r"^output \[\n.*?\n\]\n", lambda _: f"output [\n{outputs}\n]\n", text, count=1, flags=re.M | re.S)


def scheduler_text(text: str) -> str:
    inputs = (*schema.INPUTS, *schema.FACADE_INPUTS, schema.TOKENIZED_NS, schema.REFUSAL)
    outputs = (*schema.OUTPUTS, *schema.FACADE_OUTPUTS)
    return _with_tensors(text, tensor_lines(inputs, optional=True, ragged=True), tensor_lines(outputs))


def ensemble_text(text: str) -> str:
    text = _with_tensors(text, tensor_lines(schema.INPUTS, optional=True), tensor_lines(schema.OUTPUTS))
    head, step, last = text.rpartition('      model_name: "scheduler"\n      model_version: -1\n')
    internal = {"input_ids": "_ids", "tokenized_ns": "_tokenized_ns", "refusal": "_refusal"}
    inputs = {tensor.name: tensor.name for tensor in schema.INPUTS} | internal
    made = maps("input", inputs) + maps("output", {tensor.name: tensor.name for tensor in schema.OUTPUTS})
    return head + step + made + last[last.index("    }\n") :]


def texts() -> dict[Path, str]:
    """What each file is to hold."""
    files = {name: REPOSITORY / name / "config.pbtxt" for name in ("scheduler", "ensemble", *FACADES)}
    made = {files[name]: facade_text(name, facade) for name, facade in FACADES.items()}
    made[files["scheduler"]] = scheduler_text(files["scheduler"].read_text())
    made[files["ensemble"]] = ensemble_text(files["ensemble"].read_text())
    return made


if __name__ == "__main__":
    for path, text in texts().items():
        (path.parent / "1").mkdir(parents=True, exist_ok=True)
        path.write_text(text)
