"""llama-index's class for Triton, with its own defaults."""

import os

from llama_index.llms.nvidia_triton import NvidiaTriton

for model in ("ensemble", "tensorrt_llm_bls"):
    answer = NvidiaTriton(server_url=os.environ["GRPC"], model=model).complete("1, 2, 3,")
    assert answer.text, answer
print(repr(answer.text[:60]))
