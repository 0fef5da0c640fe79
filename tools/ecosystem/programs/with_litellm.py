"""LiteLLM's provider `triton`."""

import os

import litellm

for model in ("ensemble", "vllm_model"):
    address = f"http://{os.environ['HTTP']}/v2/models/{model}/generate"
    asked = [{"role": "user", "content": "1, 2, 3,"}]
    for budget in ({"max_tokens": 5}, {"max_completion_tokens": 5}):
        answer = litellm.completion(model=f"triton/{model}", messages=asked, api_base=address, **budget)
        assert answer.choices[0].message.content, answer
print(repr(answer.choices[0].message.content))
