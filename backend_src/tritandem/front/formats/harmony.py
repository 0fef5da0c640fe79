"""gpt-oss: messages with a channel, <|channel|>analysis<|message|>...<|end|>, calls to functions.NAME. Pure.

Thoughts are the channel analysis. All marks are control tokens.
"""

from __future__ import annotations

import re

from .call_json import Known
from .structure import ANY_TEXT, Calls, Part, either, schema, sequence, tag, text
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


def structure(calls: Calls, several: bool, other: Part | None) -> Part:
    """One call, or `other` as the last message; thoughts may come before. The end token follows by itself."""
    called = [
        tag(f"{CHANNEL}commentary to=functions.{name} <|constrain|>json{MESSAGE}", schema(one), "")
        for name, one in calls.items()
    ]
    said = [] if other is None else [tag(f"{CHANNEL}final{MESSAGE}", other, "")]
    thought = tag(f"{CHANNEL}analysis{MESSAGE}", ANY_TEXT, f"<|end|>{START}assistant")
    return sequence(either(thought, text("")), either(*called, *said))
