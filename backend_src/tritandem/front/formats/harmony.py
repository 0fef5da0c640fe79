"""gpt-oss: messages with a channel, <|channel|>analysis<|message|>...<|end|>, calls to functions.NAME. Pure.

Thoughts are the channel analysis. All marks are control tokens.
"""

from __future__ import annotations

import re

from .call_json import Known
from .text import Pass, Reading, Text

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
ENDS = ("<|end|>", "<|return|>", "<|call|>", START, CHANNEL)
RECIPIENT = re.compile(r"to=([^\s<]+)")


def harmony(text: Text, known: Known) -> Reading[None]:
    first = True
    while True:
        heads: list[str] = []
        if not (yield from text.until((MESSAGE,), heads.append)):
            if first:  # nothing of this form
                text.say("".join(heads))
            return
        head = "".join(heads)
        yield from text.until(ENDS, _meaning(text, head))
        first = False


def _meaning(text: Text, head: str) -> Pass:
    if recipient := RECIPIENT.search(head):
        text.call(recipient[1].removeprefix("functions."))
        return text.arguments
    return text.think if "analysis" in head else text.say
