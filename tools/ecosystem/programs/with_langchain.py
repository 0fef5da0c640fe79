"""LangChain's ChatOpenAI: an answer, a stream, tools bound, log-probabilities."""

import os

from langchain_core.messages import AIMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

QUESTION = "What is the capital of France?"


@tool
def get_weather(city: str) -> str:
    """The weather of a city."""
    return f"sunny in {city}"


model = ChatOpenAI(
    base_url=os.environ["OPENAI"],
    api_key="none",
    model=os.environ["MODEL"],
    temperature=0,
    max_tokens=16,
    max_retries=0,
)
answer = model.invoke(QUESTION)
assert "Paris" in answer.content, answer
assert answer.usage_metadata["output_tokens"] > 0, answer
streamed = "".join(chunk.content for chunk in model.stream(QUESTION))
assert streamed == answer.content, streamed
likely = model.bind(logprobs=True, top_logprobs=2).invoke(QUESTION)
assert likely.response_metadata["logprobs"]["content"], likely
bound = model.bind_tools([get_weather])
assert isinstance(bound.invoke(QUESTION), AIMessage)
print(repr(streamed))
