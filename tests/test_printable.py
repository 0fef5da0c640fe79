"""What strangers wrote, in messages and logs: short, one line, nothing hidden, and cheap however long it was."""

from __future__ import annotations

import json
import time

import pytest
from tritandem.contracts.errors import EngineFailed, InvalidRequest
from tritandem.contracts.printable import MAX_TEXT_CHARS, Shown, printable, shown

HIDDEN = "\x00\x1b\x7f\x80\x85\x9b\x9f\u2028\u202e\u2066\ud800"


def test_hidden_characters_are_shown_as_json_would_write_them() -> None:
    written = printable(f"a{HIDDEN}\nž")
    assert written.isprintable()
    assert json.loads(f'"{written}"') == f"a{HIDDEN}\nž"


def test_a_traceback_keeps_its_lines() -> None:
    assert printable("one\ntwo\x9b", lines=True) == "one\ntwo\\u009b"


@pytest.mark.parametrize(
    "value", ["x" * 10_000_000, b"x" * 10_000_000, ["x" * 100] * 1_000_000, {"a": "b" * 99}, HIDDEN]
)
def test_what_was_given_is_shown_short_and_in_no_time(value: object) -> None:
    begun_s = time.thread_time()
    error = InvalidRequest("x\x9b" * 1_000_000, value, "less")
    assert time.thread_time() - begun_s < 0.1
    assert error.public_message().isprintable()
    assert len(error.public_message()) < 2000
    assert len(error.given) < 150


def test_what_is_in_words_already_stays_as_it_is() -> None:
    assert shown(shown("a" * 100)) == shown("a" * 100) == Shown(f"'{'a' * 76}... (100 characters)")
    assert str(InvalidRequest("a", shown("b"), "c")) == "a: given 'b', allowed: c"


def test_no_message_is_longer_than_a_screen() -> None:
    message = EngineFailed("y" * 10_000_000).public_message()
    assert len(message) < MAX_TEXT_CHARS + 40
    assert message.endswith("characters)")
