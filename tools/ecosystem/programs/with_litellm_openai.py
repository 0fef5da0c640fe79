"""LiteLLM's provider `openai/`: a chat, its stream, tools, a completion, Anthropic's shape."""

import os

import litellm

at = {"model": f"openai/{os.environ['MODEL']}", "api_base": os.environ["OPENAI"], "api_key": "none", "num_retries": 0}
asked = [{"role": "user", "content": "What is the capital of France?"}]
parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
tools = [{"type": "function", "function": {"name": "get_weather", "description": "", "parameters": parameters}}]

whole = litellm.completion(messages=asked, temperature=0, max_tokens=16, **at).choices[0].message.content
chunks = litellm.completion(messages=asked, temperature=0, max_tokens=16, stream=True, **at)
assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole
assert litellm.completion(messages=asked, tools=tools, tool_choice="auto", max_tokens=8, **at).choices
likely = litellm.completion(messages=asked, max_tokens=2, logprobs=True, top_logprobs=2, **at).choices[0]
assert len(likely.logprobs.content) == 2, likely
assert litellm.text_completion(prompt="1, 2, 3,", max_tokens=4, **at).choices[0].text
print(repr(whole))
