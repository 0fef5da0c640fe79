"""What samples of the TensorRT-LLM backend send: the ensemble's tensors, the BLS model's, and the inner model's ids."""

import os
from queue import Queue

import numpy as np
import tritonclient.grpc as grpcclient

TYPES = {"O": "BYTES", "b": "BOOL", "i": "INT32", "u": "UINT64", "f": "FP32"}


def ask(model, arrays, outputs, **options):
    inputs = []
    for name, array in arrays.items():
        inputs.append(grpcclient.InferInput(name, array.shape, TYPES[array.dtype.kind]))
        inputs[-1].set_data_from_numpy(array)
    got = Queue()
    with grpcclient.InferenceServerClient(os.environ["GRPC"]) as client:
        client.start_stream(callback=lambda result, error: got.put((result, error)))
        wanted = [grpcclient.InferRequestedOutput(name) for name in outputs]
        client.async_stream_infer(model, inputs, outputs=wanted, enable_empty_final_response=True, **options)
        while True:
            result, error = got.get(timeout=120)
            if error is not None:
                raise error
            yield result
            if result.get_response().parameters["triton_final_response"].bool_param:
                return


def one(value, kind):
    return np.array([[value]], kind)


text = {
    "text_input": one(b"Machine learning is", np.object_), "max_tokens": one(16, np.int32),
    "bad_words": one(b"", np.object_), "stop_words": one(b"", np.object_), "stream": one(True, bool),
    "beam_width": one(1, np.int32), "temperature": one(1.0, np.float32), "repetition_penalty": one(1.0, np.float32),
    "top_k": one(1, np.int32), "top_p": one(0.0, np.float32), "length_penalty": one(1.0, np.float32),
    "return_log_probs": one(True, bool), "return_context_logits": one(False, bool),
    "return_generation_logits": one(False, bool), "return_perf_metrics": one(False, bool),
    "random_seed": one(1234, np.uint64), "end_id": one(2, np.int32), "pad_id": one(2, np.int32),
}  # fmt: skip
outputs = ("text_output", "cum_log_probs", "output_log_probs", "context_logits", "generation_logits", "sequence_index")
for model in ("ensemble", "tensorrt_llm_bls"):
    answer = b"".join(result.as_numpy("text_output").reshape(-1)[0] for result in ask(model, text, outputs))
    assert answer, model

ids = {
    "input_ids": np.array([[504, 3575, 282, 4649, 314]], np.int32), "input_lengths": one(5, np.int32),
    "request_output_len": one(16, np.int32), "beam_width": one(1, np.int32), "temperature": one(1.0, np.float32),
    "runtime_top_k": one(1, np.int32), "runtime_top_p": one(0.0, np.float32), "len_penalty": one(1.0, np.float32),
    "repetition_penalty": one(1.0, np.float32), "random_seed": one(0, np.uint64), "streaming": one(True, bool),
    "end_id": one(1048576, np.int32), "pad_id": one(2, np.int32), "return_log_probs": one(False, bool),
}  # fmt: skip
lengths = [
    int(r.as_numpy("sequence_length")[0, 0]) for r in ask("tensorrt_llm", ids, ("output_ids", "sequence_length"))
]
assert sum(lengths) == 16, lengths
stop = ids | {"stop": one(True, bool)}
list(ask("tensorrt_llm", stop, ("output_ids", "sequence_length"), request_id="9", parameters={"Streaming": True}))
print(f"text of ensemble and tensorrt_llm_bls, {sum(lengths)} ids of tensorrt_llm, a stop")
