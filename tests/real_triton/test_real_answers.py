"""The real server answers: over gRPC and HTTP, through the ensemble and directly, to other servers' clients."""

from __future__ import annotations

import json
import re
import urllib.request
from typing import Any

import jsonschema
import numpy as np
import pytest
from tritandem.server import TritonServer
from tritandem.triton_io.request import schema
from tritandem_client import Client
from tritonclient.utils import InferenceServerException

from tests.real_triton.raw_client import RawClient, in_background, number, text

pytestmark = pytest.mark.triton

QUESTION = "The capital of France is"
MODELS = pytest.mark.parametrize("model", ["ensemble", "scheduler"])


def post(server: TritonServer, model: str, call: str, body: dict[str, Any]) -> str:
    request = urllib.request.Request(
        f"http://{server.http_url}/v2/models/{model}/{call}", json.dumps(body).encode(), method="POST"
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return str(response.read().decode())


@MODELS
def test_a_grpc_stream_names_paris_token_by_token(client: RawClient, model: str) -> None:
    arrays = {
        "text_input": text(QUESTION),
        "max_tokens": number(12, np.int32),
        "stream": number(True, np.bool_),
        "return_num_output_tokens": number(True, np.bool_),
    }
    results = client.results(model, arrays, request_id="paris")
    assert "Paris" in "".join(result.as_numpy("text_output")[0].decode() for result in results)
    assert sum(int(result.as_numpy("num_output_tokens")[0]) for result in results) == 12
    assert len(results) > 1
    assert all(result.as_numpy("finish_reason") is None for result in results[:-1])
    last = results[-1]
    assert last.as_numpy("finish_reason")[0] == b"length"
    assert last.as_numpy("outcome")[0] == b"COMPLETED"
    stamps = dict(zip(("received", "tokenized", "dispatched", "accepted"), last.as_numpy("stamps"), strict=False))
    assert 0 < stamps["received"] <= stamps["tokenized"] <= stamps["dispatched"] <= stamps["accepted"]


@MODELS
def test_http_generate_gives_one_response_that_repeats_the_prompt(server: TritonServer, model: str) -> None:
    answer = json.loads(post(server, model, "generate", {"text_input": QUESTION, "max_tokens": 8}))
    assert answer["text_output"].startswith(f"{QUESTION} Paris")
    body = {"text_input": QUESTION, "max_tokens": 8, "exclude_input_in_output": True}
    assert json.loads(post(server, model, "generate", body))["text_output"].startswith(" Paris")


@MODELS
def test_http_generate_stream_sends_events(server: TritonServer, model: str) -> None:
    body = {"text_input": QUESTION, "max_tokens": 8, "stream": True}
    events = [line[5:] for line in post(server, model, "generate_stream", body).splitlines() if line]
    assert "Paris" in "".join(json.loads(event)["text_output"] for event in events)
    assert len(events) > 1


@MODELS
@pytest.mark.parametrize("key", ["request_id", "id"])
def test_an_id_in_an_http_body_names_the_request(server: TritonServer, model: str, key: str) -> None:
    endless = {"text_input": "1, 2, 3, 4,", "max_tokens": 2000, "sampling_parameters": '{"ignore_eos": true}'}
    running, outcome = in_background(post, server, model, "generate_stream", endless | {"stream": True, key: "mine"})
    while running.is_alive():  # until the request it names has arrived, a stop finds nobody
        stopped = json.loads(post(server, model, "generate", {"stop": True, key: "mine"}))
        assert stopped["outcome"] == "STOPPED"
        running.join(0.2)
    *_, last = (json.loads(line[5:]) for line in outcome[0].splitlines() if line)
    assert (last["outcome"], last["finish_reason"]) == ("STOPPED", "cancelled")


@MODELS
def test_bias_and_allowed_ids_choose_the_tokens(client: RawClient, model: str) -> None:
    """The answer is forced, banned, and held to the ids of its own tokens."""
    asked = {"text_input": text(QUESTION), "max_tokens": number(4, np.int32), "return_logprobs": number(True, np.bool_)}
    asked |= {"exclude_input_in_output": number(True, np.bool_)}

    def answer(**more: Any) -> list[str]:
        return [key for token in told(**more) for key in token]

    def told(**more: Any) -> list[dict[str, Any]]:
        [result] = client.results(model, asked | more)
        said: list[dict[str, Any]] = json.loads(result.as_numpy("logprobs")[0])
        return said

    paris, *rest = answer()
    assert answer(logit_bias=text(json.dumps({paris: 100}))) == [paris] * 4
    assert paris not in answer(logit_bias=text(json.dumps({paris: -100})))
    assert answer(sampling_parameters=text(json.dumps({"logit_bias": {paris: 100}}))) == [paris] * 4
    own = np.array([[int(token) for token in rest]], np.int32)
    held = answer(allowed_token_ids=own)
    assert set(held) <= set(rest)
    free, biased = (told(**more)[0][paris]["logprob"] for more in ({}, {"logit_bias": text(json.dumps({paris: 5}))}))
    assert biased == pytest.approx(free, abs=1e-3), "log-probabilities are the model's own"


@MODELS
def test_a_client_of_the_tensorrt_llm_ensemble_is_answered(client: RawClient, model: str) -> None:
    arrays = {
        "text_input": text(QUESTION),
        "max_tokens": number(12, np.int32),
        "stream": number(False, np.bool_),
        "beam_width": number(1, np.int32),
        "num_return_sequences": number(1, np.int32),
        "temperature": number(0.0, np.float32),
        "repetition_penalty": number(1.0, np.float32),
        "presence_penalty": number(0.0, np.float32),
        "frequency_penalty": number(0.0, np.float32),
        "stop_words": text("\n\n", "Lyon"),
        "bad_words": text("Marseille"),
        "end_id": number(2, np.int32),
        "pad_id": number(2, np.int32),
        "exclude_input_in_output": number(False, np.bool_),
        "return_log_probs": number(True, np.bool_),
    }
    outputs = ["text_output", "cum_log_probs", "output_log_probs"]
    [result] = client.results(model, arrays, request_id="1", outputs=outputs)
    assert result.as_numpy("text_output")[0].decode() == f"{QUESTION} Paris."
    log_probs = result.as_numpy("output_log_probs")
    assert log_probs.shape[:2] == (1, 1)
    assert log_probs.shape[2] >= 2
    assert (log_probs <= 0).all()
    assert result.as_numpy("finish_reason") is None, "it was not among the outputs asked for"


@MODELS
def test_a_client_of_the_vllm_backend_is_answered(client: RawClient, model: str) -> None:
    sampling = {"temperature": "0", "max_tokens": "8", "top_p": "1.0", "stop": ["\n"], "ignore_eos": "true", "n": 1}
    arrays = {
        "text_input": text(QUESTION),
        "stream": number(True, np.bool_),
        "sampling_parameters": text(json.dumps(sampling | {"logprobs": 2})),
        "exclude_input_in_output": number(True, np.bool_),
        "return_logprobs": number(True, np.bool_),
        "return_num_input_tokens": number(True, np.bool_),
    }
    parameters = {"temperature": "0", "max_tokens": "8"}
    results = client.results(model, arrays, request_id="0", parameters=parameters)
    assert "".join(result.as_numpy("text_output")[0].decode() for result in results) == " Paris."
    assert int(results[0].as_numpy("num_input_tokens")[0]) == 5
    first = json.loads(results[0].as_numpy("logprobs")[0])[0]
    chosen = next(iter(first.values()))
    assert chosen["decoded_token"] == " Paris"
    assert chosen["rank"] == 1
    assert len(first) == 2


@MODELS
def test_token_ids_are_taken_instead_of_text(client: RawClient, model: str) -> None:
    [encoded] = client.results("tokenizer", {"text_input": text(QUESTION)})
    arrays = {"input_ids": encoded.as_numpy("input_ids"), "max_tokens": number(4, np.int32)}
    assert client.answer(model, arrays).startswith(" Paris")


@MODELS
def test_chat_messages_are_taken_instead_of_text(server: TritonServer, model: str) -> None:
    with Client(f"grpc://{server.grpc_url}", model=model) as client:
        messages = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
        result = client.chat(messages, max_tokens=24)
    assert "Paris" in result.text
    assert result.outcome == "COMPLETED"


@MODELS
def test_eight_prompts_at_once_get_their_own_answers(client: RawClient, model: str) -> None:
    countries = {
        "France": "Paris", "Germany": "Berlin", "Italy": "Rome", "Spain": "Madrid",
        "Japan": "Tokyo", "Russia": "Moscow", "Greece": "Athens", "Egypt": "Cairo",
    }  # fmt: skip

    def ask(country: str) -> str:
        prompt = f"The capital of {country} is the city of"
        return client.answer(model, {"text_input": text(prompt), "max_tokens": number(6, np.int32)})

    alone = {country: ask(country) for country in countries}
    running = {country: in_background(ask, country) for country in countries}
    for country, (thread, outcome) in running.items():
        thread.join()
        assert outcome == [alone[country]]
    assert sum(capital in alone[country] for country, capital in countries.items()) >= 6


def test_every_public_tensor_is_reported_by_the_server(server: TritonServer) -> None:
    for model in ("ensemble", "scheduler"):
        url = f"http://{server.http_url}/v2/models/{model}"
        with urllib.request.urlopen(url, timeout=10) as response:
            metadata = json.load(response)
        assert {t.name for t in schema.INPUTS} <= {t["name"] for t in metadata["inputs"]}
        more = schema.FACADE_OUTPUTS if model == "scheduler" else ()
        assert {t.name for t in (*schema.OUTPUTS, *more)} == {t["name"] for t in metadata["outputs"]}


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "born": {"type": "string", "format": "date"},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
        "height": {"type": "number", "minimum": 0, "maximum": 3},
    },
    "required": ["name", "born", "tags"],
    "additionalProperties": False,
}


@MODELS
def test_a_structured_answer_is_valid_by_construction(client: RawClient, model: str) -> None:
    """Drawn at temperature 1, in the words of vLLM and of TensorRT-LLM."""
    vllm = {"sampling_parameters": text(json.dumps({"structured_outputs": {"json": PERSON}}))}
    trtllm = {
        "guided_decoding_guide_type": text("json_schema"),
        "guided_decoding_guide": text(json.dumps(PERSON)),
    }
    for seed, guide in enumerate((vllm, trtllm) * 3):
        arrays = {
            "text_input": text("A person as JSON:"),
            "max_tokens": number(200, np.int32),
            "temperature": number(1.0, np.float32),
            "seed": number(seed, np.uint64),
            "stream": number(True, np.bool_),
            **guide,
        }
        results = client.results(model, arrays)
        assert results[-1].as_numpy("finish_reason")[0] == b"stop"
        made = json.loads("".join(result.as_numpy("text_output")[0].decode() for result in results))
        jsonschema.validate(made, PERSON, format_checker=jsonschema.FormatChecker())


@pytest.mark.parametrize(
    ("guide", "good"),
    [
        ({"regex": "[a-c]{3}-[0-9]{4}"}, re.compile("[a-c]{3}-[0-9]{4}")),
        ({"choice": ["größer", "gleich", "kleiner"]}, re.compile("größer|gleich|kleiner")),
        ({"grammar": 'start: "(" start ")" | /[xy]/'}, re.compile(r"\(*[xy]\)*")),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_expressions_choices_and_grammars_hold(client: RawClient, guide: dict[str, Any], good: re.Pattern[str]) -> None:
    said = text(json.dumps({"structured_outputs": guide, "temperature": 1, "seed": 5, "max_tokens": 60}))
    [result] = client.results("scheduler", {"text_input": text("Say:"), "sampling_parameters": said})
    answer = result.as_numpy("text_output")[0].decode().removeprefix("Say:")
    if result.as_numpy("finish_reason")[0] == b"stop":
        assert good.fullmatch(answer)


def test_a_structured_answer_that_was_cut_says_so_and_a_bad_grammar_is_refused_by_name(client: RawClient) -> None:
    arrays = {"text_input": text("A person:"), "max_tokens": number(5, np.int32)}
    said = {"sampling_parameters": text(json.dumps({"guided_json": PERSON}))}
    [result] = client.results("scheduler", arrays | said)
    assert result.as_numpy("finish_reason")[0] == b"length"
    with pytest.raises(InferenceServerException, match=r"guided_regex: given '\('"):
        client.results("scheduler", arrays | {"sampling_parameters": text('{"guided_regex": "("}')})
