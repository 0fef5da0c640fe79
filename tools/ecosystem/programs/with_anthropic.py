"""Anthropic's package: a whole message, a streamed one, a count of tokens."""

import os

import anthropic

client = anthropic.Anthropic(base_url=os.environ["OPENAI"].removesuffix("/v1"), api_key="none", max_retries=0)
asked = {"model": os.environ["MODEL"], "messages": [{"role": "user", "content": "What is the capital of France?"}]}
greedy = {"max_tokens": 16, "extra_body": {"temperature": 0}}
whole = client.messages.create(**greedy, **asked)
with client.messages.stream(**greedy, **asked) as stream:
    text = "".join(stream.text_stream)
    assert stream.get_final_message().stop_reason == whole.stop_reason
assert text == whole.content[0].text, text
said = whole.usage
tokens = client.messages.count_tokens(**asked).input_tokens
assert tokens == said.input_tokens + said.cache_read_input_tokens, (tokens, said)
print(repr(text), tokens, "tokens asked")
