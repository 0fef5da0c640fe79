"""JSON of clients: a document that would hold up others is refused before it does, a long text never is."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tritandem.contracts.errors import InvalidRequest
from tritandem.triton_io.request import client_json
from tritandem.triton_io.request.client_json import MAX_PARTS

MOST_CHARS = 1 << 24
TRICKY = '\\" \\\\" \\\\\\" [{,"'


def parse(text: str) -> Any:
    return client_json.parse("messages", text, MOST_CHARS, "a JSON list")


@pytest.mark.parametrize("part", ["[],", "{},", "1,", '"",', '{"a":1},', "[", "[[[,"])
def test_more_parts_than_anybody_needs_are_refused_in_a_fraction_of_their_parsing_time(part: str) -> None:
    begun_s = time.process_time()
    with pytest.raises(InvalidRequest, match="given 'more than 400000 quotes, brackets and commas'"):
        parse("[" + part * (MOST_CHARS // len(part) - 1))
    assert time.process_time() - begun_s < 1.0  # measured 0.05 to 0.1 s; parsing the worst of them took 1.8 s


@pytest.mark.parametrize("piece", [", {[", '"', "\\", '\\"', "\u00e9", "\n", TRICKY], ids=repr)
def test_what_stands_inside_a_text_is_no_part(piece: str) -> None:
    messages = [{"role": "user", "content": piece * (2 * MAX_PARTS // len(piece))}]
    assert parse(json.dumps(messages)) == messages


def test_as_many_messages_as_a_chat_may_have_are_parsed() -> None:
    part = {"type": "text", "text": f"hi, {TRICKY}"}
    messages = [{"role": "user", "content": [part, part]} for _ in range(10_000)]
    assert parse(json.dumps(messages)) == messages


@given(
    st.recursive(
        st.text('\\",[{a', max_size=8) | st.integers(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text('\\",[', max_size=4), inner),
    )
)
def test_parts_are_those_of_the_document_without_its_texts(value: Any) -> None:
    def parts(of: Any) -> int:
        if isinstance(of, str):
            return 2
        if isinstance(of, dict):
            return 1 + max(0, len(of) - 1) + sum(2 + parts(item) for item in of.values())
        return 1 + max(0, len(of) - 1) + sum(map(parts, of)) if isinstance(of, list) else 0

    text = json.dumps(value)
    assert not client_json._has_more_parts(text, parts(value))
    assert parts(value) == 0 or client_json._has_more_parts(text, parts(value) - 1)
