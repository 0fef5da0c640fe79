"""What samples of Triton's vLLM backend send: tensors without the batch dimension, numbers as texts, its flags."""

import json
import os
from queue import Queue

import numpy as np
import tritonclient.grpc as grpcclient

SAMPLING = {"temperature": "0.1", "top_p": "0.95", "max_tokens": "20"}
FLAGS = ("finish_reason", "cumulative_logprob", "logprobs", "num_input_tokens", "num_output_tokens")


def tensor(name, kind, value):
    made = grpcclient.InferInput(name, [1], kind)
    made.set_data_from_numpy(np.array([value], dtype=np.object_ if kind == "BYTES" else bool))
    return made


def ask(client, prompts, stream, flags):
    got = Queue()
    client.start_stream(callback=lambda result, error: got.put((result, error)))
    for number, prompt in enumerate(prompts):
        inputs = [
            tensor("text_input", "BYTES", prompt.encode()),
            tensor("stream", "BOOL", stream),
            tensor("sampling_parameters", "BYTES", json.dumps(SAMPLING).encode()),
            tensor("exclude_input_in_output", "BOOL", True),
            *(tensor(f"return_{flag}", "BOOL", True) for flag in flags),
        ]
        wanted = [grpcclient.InferRequestedOutput("text_output")]
        client.async_stream_infer(
            "vllm_model", inputs, request_id=str(number), outputs=None if flags else wanted, parameters=SAMPLING
        )
    open_, texts = len(prompts), {}
    while open_:
        result, error = got.get(timeout=120)
        if error is not None:
            raise error
        response = result.get_response()
        texts[response.id] = texts.get(response.id, b"") + result.as_numpy("text_output")[0]
        reason = result.as_numpy("finish_reason") if flags else None
        open_ -= (not stream) if reason is None else reason[0] != b"None"
        if stream and not flags and len(texts) == len(prompts) and all(texts.values()):
            break  # as the sample, which ends its stream when it has what it wants
    client.stop_stream()
    return texts


with grpcclient.InferenceServerClient(os.environ["GRPC"]) as client:
    prompts = ["Hello, my name is", "The most dangerous animal is", "The capital of France is", "The future of AI is"]
    for stream in (True, False):
        for flags in ((), FLAGS):
            texts = ask(client, prompts, stream, flags)
            assert len(texts) == len(prompts), texts
print(f"{len(prompts)} prompts, streamed and whole, with and without flags")
