"""Llama 3.1 and later: the whole answer is {"name": ..., "parameters": {...}}, or several with ; between. Pure.

An object that names no function of the request is an answer in JSON.
"""

from __future__ import annotations

from .call_json import Known, read_call
from .text import Reading, Text, drop

TAG = "<|python_tag|>"


def llama_json(text: Text, known: Known) -> Reading[None]:
    before: list[str] = []
    yield from text.blank(before.append)
    yield from text.literal(TAG)
    while True:
        yield from text.blank(before.append)
        if (yield from text.peek()) != "{":
            break
        if (told := (yield from read_call(text, known))) is not None:
            before.append(told)
            break
        before.clear()
        yield from text.blank(drop)
        yield from text.literal(";", ",")
    text.say("".join(before))
    yield from text.rest(text.say)
