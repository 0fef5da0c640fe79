"""OpenAI's package: chats, streams, tools, log-probabilities, several choices, Responses; embeddings are refused."""

import os

import openai

client = openai.OpenAI(base_url=os.environ["OPENAI"], api_key="none", max_retries=0)
model = client.models.list().data[0].id
question = [{"role": "user", "content": "What is the capital of France?"}]
weather = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}

whole = client.chat.completions.create(model=model, messages=question, temperature=0, max_completion_tokens=16)
assert "Paris" in whole.choices[0].message.content, whole
streamed = client.chat.completions.create(
    model=model, messages=question, temperature=0, max_tokens=16, stream=True, stream_options={"include_usage": True}
)
chunks = list(streamed)
text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
assert text == whole.choices[0].message.content, text
assert chunks[-1].usage == whole.usage or chunks[-1].usage.completion_tokens == whole.usage.completion_tokens

likely = client.chat.completions.create(
    model=model, messages=question, temperature=0, max_tokens=4, logprobs=True, top_logprobs=3
)
assert [len(one.top_logprobs) for one in likely.choices[0].logprobs.content] == [3] * 4, likely
several = client.chat.completions.create(model=model, messages=question, max_tokens=4, n=3, seed=1)
assert [choice.index for choice in several.choices] == [0, 1, 2], several
called = client.chat.completions.create(model=model, messages=question, tools=[weather], temperature=0, max_tokens=16)
assert called.choices[0].finish_reason in ("stop", "length", "tool_calls"), called
counted = client.completions.create(model=model, prompt=["1, 2, 3,", "4, 5, 6,"], max_tokens=8, temperature=0, stop=",")
assert [choice.text for choice in counted.choices] == [" 4", " 7"], counted
response = client.responses.create(model=model, input="What is the capital of France?", temperature=0)
assert "Paris" in response.output_text, response
try:
    client.embeddings.create(model=model, input="text")
except openai.NotFoundError:
    print(repr(text))
