"""One table of public tensors: Triton's configuration files say exactly the same."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

from google.protobuf import text_format
from tritandem.contracts.answers import Stamps
from tritandem.contracts.fields import SamplingParams
from tritandem.triton_io.request import schema
from tritandem.triton_io.request.dialects import PROMPTS
from tritonclient.grpc import model_config_pb2

from tools import repository

REPOSITORY = Path(__file__).resolve().parents[2] / "model_repository"


def config(model: str) -> Any:
    return text_format.Parse((REPOSITORY / model / "config.pbtxt").read_text(), model_config_pb2.ModelConfig())


def declared(tensors: Iterable[Any]) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {t.name: (model_config_pb2.DataType.Name(t.data_type), tuple(t.dims)) for t in tensors}


def table(tensors: Iterable[schema.PublicTensor]) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {t.name: ("TYPE_STRING" if t.dtype == "BYTES" else f"TYPE_{t.dtype}", t.dims) for t in tensors}


def test_the_ensemble_declares_the_table() -> None:
    parsed = config("ensemble")
    assert declared(parsed.input) == table(schema.INPUTS)
    assert declared(parsed.output) == table(schema.OUTPUTS)
    assert all(tensor.optional for tensor in parsed.input)


def test_the_scheduler_declares_the_table_and_what_the_tokenizer_adds() -> None:
    parsed = config("scheduler")
    inputs = (*schema.INPUTS, *schema.FACADE_INPUTS, schema.TOKENIZED_NS, schema.REFUSAL)
    assert declared(parsed.input) == table(inputs)
    assert declared(parsed.output) == table((*schema.OUTPUTS, *schema.FACADE_OUTPUTS))
    for tensor in parsed.input:
        assert tensor.optional
        assert tensor.allow_ragged_batch == (-1 in tensor.dims), tensor.name


def test_the_tokenizer_declares_rows_of_the_table() -> None:
    rows = table(schema.INPUTS)
    assert all(rows[name] == row for name, row in declared(config("tokenizer").input).items())
    added = table([schema.TOKENIZED_NS, schema.REFUSAL])
    assert added.items() <= declared(config("tokenizer").output).items()


def test_the_ensemble_hands_every_input_to_the_scheduler_and_takes_every_output() -> None:
    tokenizer, scheduler = config("ensemble").ensemble_scheduling.step
    internal = {"input_ids": "_ids", "tokenized_ns": "_tokenized_ns", "refusal": "_refusal"}
    wanted = {name: name for name in table(schema.INPUTS)} | internal
    assert dict(scheduler.input_map) == wanted
    assert dict(scheduler.output_map) == {name: name for name in table(schema.OUTPUTS)}
    assert set(tokenizer.input_map) == set(declared(config("tokenizer").input))
    assert dict(tokenizer.output_map) == internal


def test_every_step_takes_at_least_the_ensembles_batch() -> None:
    limit = config("ensemble").max_batch_size
    assert limit >= 1
    assert all(config(step.model_name).max_batch_size >= limit for step in config("ensemble").ensemble_scheduling.step)


def test_what_answers_more_than_once_is_decoupled() -> None:
    decoupled = {
        model for model in ("tokenizer", "scheduler", "engine") if config(model).model_transaction_policy.decoupled
    }
    assert decoupled == {"scheduler", "engine"}


def test_the_repository_is_what_the_table_makes_of_it() -> None:
    changed = [path for path, text in repository.texts().items() if path.read_text() != text]
    assert changed == [], "run `python -m tools.repository`"


def test_every_facade_is_declared_as_triton_reads_it_and_brings_one_dialect_a_prompt() -> None:
    for name, facade in repository.FACADES.items():
        parsed = config(name)
        assert parsed.name == name
        assert [tensor.name for tensor in parsed.input] == list(facade.inputs)
        assert set(facade.inputs.values()) & set(PROMPTS), name
        assert set(facade.inputs.values()) <= set(schema.INPUT_OF_NAME)


def test_names_are_unique_and_flags_lead_to_outputs() -> None:
    names = [tensor.name for tensor in schema.INPUTS]
    assert len(names) == len(set(names))
    outputs = {tensor.name for tensor in schema.OUTPUTS}
    assert set(schema.OUTPUTS_OF_FLAG) == {
        name for name in names if name.startswith("return_") and "logits" not in name
    }
    assert {name for group in schema.OUTPUTS_OF_FLAG.values() for name in group} <= outputs


def test_every_sampling_input_is_a_sampling_parameter() -> None:
    known = {field.name for field in fields(SamplingParams)}
    assert {tensor.name for tensor in schema.SAMPLING_INPUTS} <= known
    assert set(schema.ALIASES.values()) <= known


def test_the_stamps_tensor_holds_every_stamp() -> None:
    assert len(fields(Stamps)) == schema.STAMP_COUNT
