"""The tokenizer's plug: one execute for many, each answered once, the short ones first."""

from __future__ import annotations

import json
from concurrent.futures import Future
from typing import Any

import numpy as np
from handed_over import one, received, text
from tritandem.contracts import InvalidRequest
from tritandem.tokenizer import Encoded
from tritandem.triton_io.tokenizer_plug import TokenizerPlug

LONG = 100


class SlowForLongTexts:
    """Ids are character codes; texts of LONG characters and more finish when the test says so."""

    def __init__(self, max_tokens: int | None = None) -> None:
        self.max_tokens = max_tokens
        self.order: list[str] = []
        self.unfinished: list[tuple[str, Future[Any]]] = []
        self.closed = False

    def submit(self, text: str, *, max_tokens: int | None) -> Future[Any]:
        assert max_tokens == self.max_tokens
        self.order.append(text)
        future: Future[Any] = Future()
        if len(text) >= LONG:
            self.unfinished.append((text, future))
        elif text == "refuse me":
            future.set_exception(InvalidRequest("text_input", text, "another text"))
        elif text == "break":
            future.set_exception(MemoryError("secret"))
        else:
            future.set_result(self.encoded(text))
        return future

    def submit_chat(self, messages: Any, *, max_tokens: int | None) -> Future[Any]:
        return self.submit("|".join(message["content"] for message in messages), max_tokens=max_tokens)

    def finish_long_texts(self) -> None:
        for text_, future in self.unfinished:
            future.set_result(self.encoded(text_))

    def close(self) -> None:
        self.closed = True

    @staticmethod
    def encoded(text_: str) -> Encoded:
        return Encoded(np.array([ord(char) for char in text_], np.int32), "whole")


def ids_of(sender: Any) -> list[int]:
    [response] = sender.wait_end()
    ids = response.arrays()["input_ids"]
    assert (ids.dtype, ids.shape[0]) == (np.int32, 1)
    return [int(i) for i in ids[0]]


def test_short_texts_are_answered_while_a_long_one_of_their_batch_runs() -> None:
    tokenizer = SlowForLongTexts()
    plug = TokenizerPlug(tokenizer)
    long, long_sender = received({"text_input": text("x" * LONG)})
    short, short_sender = received({"text_input": text("ab")})
    plug.execute([long, short])
    assert ids_of(short_sender) == [97, 98]
    assert not long_sender.responses
    tokenizer.finish_long_texts()
    assert len(ids_of(long_sender)) == LONG
    assert tokenizer.order == ["ab", "x" * LONG]


def test_a_refused_text_harms_no_other() -> None:
    plug = TokenizerPlug(SlowForLongTexts())
    requests = [received({"text_input": text(word)}) for word in ("a", "refuse me", "", "b")]
    plug.execute([request for request, _ in requests])
    assert ids_of(requests[0][1]) == [97]
    assert ids_of(requests[3][1]) == [98]
    for (_, sender), message in zip(requests[1:3], ("refuse me", "at least one character"), strict=True):
        [response] = sender.wait_end()
        assert response.error().code() == "INVALID_ARG"
        assert response.error().message().startswith("REJECTED_INVALID: text_input: ")
        assert message in response.error().message()


def test_what_cannot_be_read_harms_no_other() -> None:
    plug = TokenizerPlug(SlowForLongTexts())
    digits = json.dumps([{"role": "user", "content": 1}]).replace("1", "1" * 5000)
    bad, bad_sender = received({}, {"messages": digits})
    good, good_sender = received({"text_input": text("a")})
    plug.execute([bad, good])
    assert "messages: given 'an integer of 5000 digits'" in bad_sender.wait_end()[0].error().message()
    assert ids_of(good_sender) == [97]


def test_who_takes_refusals_gets_them_as_a_tensor_and_no_error() -> None:
    plug = TokenizerPlug(SlowForLongTexts(max_tokens=9), max_tokens=9)
    requests = [
        received({"text_input": text(word)}, outputs=["input_ids", "refusal"]) for word in ("a", "refuse me", "")
    ]
    plug.execute([request for request, _ in requests])
    refusals = [sender.wait_end()[0].arrays()["refusal"][0][0].decode() for _, sender in requests]
    assert refusals[0] == ""
    assert refusals[1] == "REJECTED_INVALID: text_input: given 'refuse me', allowed: another text"
    assert "at least one character" in refusals[2]


def test_one_text_too_many_is_told_when_to_come_back_and_holds_up_neither_stop_nor_ids() -> None:
    tokenizer = SlowForLongTexts()
    plug = TokenizerPlug(tokenizer, max_waiting=2)
    long = [received({"text_input": text("x" * LONG)}) for _ in range(3)]
    late, late_sender = received({"text_input": text("ab")}, outputs=["input_ids", "refusal"])
    ids, ids_sender = received({"input_ids": np.array([[4]], np.int32)})
    stop, stop_sender = received({"stop": one(True, np.bool_)})
    plug.execute([request for request, _ in long])
    plug.execute([late, ids, stop])
    words = "REJECTED_SATURATED: 2 texts are waiting for the tokenizer; retry after 1.0 s"
    assert long[2][1].wait_end()[0].error().message() == words
    assert late_sender.wait_end()[0].arrays()["refusal"][0][0].decode() == words
    assert (ids_of(ids_sender), ids_of(stop_sender)) == ([4], [0])
    tokenizer.finish_long_texts()
    assert len(ids_of(long[0][1])) == len(ids_of(long[1][1])) == LONG
    again, again_sender = received({"text_input": text("ab")})
    plug.execute([again])
    assert ids_of(again_sender) == [97, 98]


def test_an_unexpected_error_is_hidden_from_the_client_and_told_to_the_log() -> None:
    import triton_python_backend_utils as pb_utils

    request, sender = received({"text_input": text("break")})
    TokenizerPlug(SlowForLongTexts()).execute([request])
    [response] = sender.wait_end()
    assert response.error().message().startswith("FAILED: internal error (MemoryError)")
    assert "secret" not in response.error().message()
    [(level, logged)] = pb_utils.Logger.lines
    assert (level, "secret" in logged) == ("error", True)
    pb_utils.Logger.lines.clear()


def test_ids_pass_through_and_a_stop_has_none_of_its_own() -> None:
    plug = TokenizerPlug(SlowForLongTexts())
    request, sender = received({"input_ids": np.array([[4, 5, 6]], np.int32)})
    stop, stop_sender = received({"stop": one(True, np.bool_)})
    plug.execute([request, stop])
    assert ids_of(sender) == [4, 5, 6]
    assert ids_of(stop_sender) == [0]


def test_a_chat_arrives_as_a_parameter() -> None:
    messages = json.dumps([{"role": "user", "content": "a"}, {"role": "user", "content": "b"}])
    request, sender = received({"stream": one(True, np.bool_)}, {"messages": messages})
    TokenizerPlug(SlowForLongTexts()).execute([request])
    assert ids_of(sender) == [ord("a"), ord("|"), ord("b")]


def test_stamps_frame_the_encoding() -> None:
    request, sender = received({"text_input": text("a")})
    TokenizerPlug(SlowForLongTexts()).execute([request])
    [response] = sender.wait_end()
    [[arrived, ready]] = response.arrays()["tokenized_ns"]
    assert 0 < arrived <= ready
