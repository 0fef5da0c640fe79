"""The dialects of other deployments speak in the tensors that those publish, and a whole run against them counts."""

from __future__ import annotations

import json

import pytest
from tritandem_loadtest import LoadTestError, RunConfig, run
from tritandem_loadtest.dialects import DIALECTS

from tests.fakes.published_tensors import PUBLISHED, PublishedServer


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_tensor_of_a_dialect_is_published_with_that_type_and_shape(name: str) -> None:
    dialect, published = DIALECTS[name], PUBLISHED[name]
    assert (dialect.model, list(dialect.shape)) == (published.model, published.shape)
    for tensor in dialect.tensors.values():
        assert published.inputs[tensor.name] == tensor.datatype
    for output in (dialect.text_output, dialect.count_output, dialect.input_count_output, *dialect.stamp_outputs):
        assert not output or output in published.outputs
    assert not dialect.sampling_tensor or published.inputs[dialect.sampling_tensor] == "BYTES"
    assert set(published.required) <= {tensor.name for tensor in dialect.tensors.values()}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_run_against_the_published_tensors_counts_every_token(name: str) -> None:
    sampling = {"temperature": 0.5, "top_k": 40, "top_p": 0.9, "seed": 7, "presence_penalty": 0.25}
    can_go_on = bool(DIALECTS[name].ignore_eos[0])
    with PublishedServer(PUBLISHED[name]) as server:
        config = {"workload": "words", "prompt_words": "20", "output_tokens": "6", "sampling": sampling}
        report = run(RunConfig(url=server.url, dialect=name, rps=20, duration_s=0.5, ignore_eos=can_go_on, **config))  # type: ignore[arg-type]
    summary = report.summary
    assert (summary["completed"], summary["failures"]) == (10, {})
    assert summary["output_tokens"] == 10 * 6
    assert summary["input_tokens"] == (10 * 20 if DIALECTS[name].input_count_output else 0)
    assert summary["ttft_ms_p50"] > 0
    sent = server.requests[0]
    given = {**sent, **json.loads(sent.get("sampling_parameters", "{}"))}
    for option, value in sampling.items():
        tensor = DIALECTS[name].tensors.get(option)
        assert given[tensor.name if tensor else option] == pytest.approx(value)


def test_the_ensembles_own_stamps_become_stages_when_asked_for() -> None:
    with PublishedServer(PUBLISHED["trtllm"]) as server:
        report = run(
            RunConfig(url=server.url, dialect="trtllm", rps=10, duration_s=0.3, sampling={"perf_metrics": True})
        )
    stages = {name: figures["p50"] for name, figures in report.summary["server_ms"].items()}
    assert stages == {"queue": 2.0, "prefill": 10.0, "decode": 40.0}


def test_asking_for_what_a_deployment_lacks_is_an_error_before_anything_is_sent() -> None:
    with PublishedServer(PUBLISHED["trtllm-llmapi"]) as server:
        with pytest.raises(LoadTestError, match="end token"):
            run(RunConfig(url=server.url, dialect="trtllm-llmapi", ignore_eos=True, duration_s=0.3))
        assert server.requests == []


def test_the_wrong_dialect_fails_with_the_deployments_own_words() -> None:
    with PublishedServer(PUBLISHED["trtllm-legacy"]) as server:
        report = run(RunConfig(url=server.url, dialect="trtllm", rps=10, duration_s=0.3))
    assert report.summary["completed"] == 0
    assert "return_num_input_tokens" in report.records[0].error
