"""The tokenizer's plug: one execute for many, each answered once, the short ones first."""

from __future__ import annotations

import json
import re
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
import triton_python_backend_utils as pb_utils
from tritandem.contracts.errors import InvalidRequest
from tritandem.tokenizer import Encoded
from tritandem.triton_io.hops import handover
from tritandem.triton_io.plugs.tokenizer import TokenizerPlug

from tests.triton_io.bad_requests import BAD, HI
from tests.triton_io.handed_over import KEY, one, received, text

LONG = 100


class SlowForLongTexts:
    """Ids are character codes; texts of LONG characters and more finish when the test says so."""

    def __init__(self, max_tokens: int | None = None) -> None:
        self.max_tokens = max_tokens
        self.order: list[str] = []
        self.unfinished: list[tuple[str, Future[Any]]] = []
        self.closed = False

    def submit(self, text: str, *, add_special_tokens: bool, max_tokens: int | None) -> Future[Any]:
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

    def submit_chat(self, messages: Any, *, tools: Any, max_tokens: int | None) -> Future[Any]:
        return self.submit(
            "|".join(message["content"] for message in messages), add_special_tokens=True, max_tokens=max_tokens
        )

    def finish_long_texts(self) -> None:
        for text_, future in self.unfinished:
            future.set_result(self.encoded(text_))

    def close(self) -> None:
        self.closed = True

    @staticmethod
    def encoded(text_: str) -> Encoded:
        return Encoded(np.array([ord(char) for char in text_], np.int32), "whole")

    def submit_ids(self, ids: list[int]) -> Future[str]:
        if max(ids) >= 128:
            raise InvalidRequest("input_ids", max(ids), "ids in [0, 128)")
        future: Future[str] = Future()
        future.set_result("".join(map(chr, ids)))
        return future


def ids_of(sender: Any) -> list[int]:
    [response] = sender.wait_end()
    ids = response.arrays()["input_ids"]
    assert (ids.dtype, ids.shape[0]) == (np.int32, 1)
    return [int(i) for i in ids[0]]


def test_short_texts_are_answered_while_a_long_one_of_their_batch_runs() -> None:
    tokenizer = SlowForLongTexts()
    plug = TokenizerPlug(tokenizer, KEY)
    long, long_sender = received({"text_input": text("x" * LONG)})
    short, short_sender = received({"text_input": text("ab")})
    plug.execute([long, short])
    assert ids_of(short_sender) == [97, 98]
    assert not long_sender.responses
    tokenizer.finish_long_texts()
    assert len(ids_of(long_sender)) == LONG
    assert tokenizer.order == ["ab", "x" * LONG]


def test_a_refused_text_harms_no_other() -> None:
    plug = TokenizerPlug(SlowForLongTexts(), KEY)
    requests = [received({"text_input": text(word)}) for word in ("a", "refuse me", "", "b")]
    plug.execute([request for request, _ in requests])
    assert ids_of(requests[0][1]) == [97]
    assert ids_of(requests[3][1]) == [98]
    for (_, sender), message in zip(requests[1:3], ("refuse me", "at least one character"), strict=True):
        [response] = sender.wait_end()
        assert response.error().code() == "INVALID_ARG"
        assert response.error().message().startswith("REJECTED_INVALID: text_input: ")
        assert message in response.error().message()


@pytest.mark.parametrize("name", BAD)
def test_no_request_harms_another_whatever_is_wrong_with_it(name: str) -> None:
    make, words = BAD[name]
    plug = TokenizerPlug(SlowForLongTexts(), KEY)
    (first, first_sender), (bad, bad_sender), (last, last_sender) = received(HI), make(), received(HI)
    plug.execute([first, bad, last])
    assert ids_of(first_sender) == ids_of(last_sender) == [ord("h"), ord("i")]
    [response] = bad_sender.wait_end()
    assert re.search(words, response.error().message())
    assert len(response.error().message()) < 3000
    assert not pb_utils.Logger.lines, "a client's mistake is no error of the server's"


def test_a_sender_that_takes_nothing_holds_up_no_other() -> None:
    plug = TokenizerPlug(SlowForLongTexts(), KEY)
    gone, sender = received(HI)
    sender.ended.set()
    next_one, next_sender = received(HI)
    plug.execute([gone, next_one])
    assert ids_of(next_sender) == [ord("h"), ord("i")]
    pb_utils.Logger.lines.clear()


def test_what_cannot_be_read_harms_no_other() -> None:
    plug = TokenizerPlug(SlowForLongTexts(), KEY)
    digits = json.dumps([{"role": "user", "content": 1}]).replace("1", "1" * 5000)
    bad, bad_sender = received({}, {"messages": digits})
    good, good_sender = received({"text_input": text("a")})
    plug.execute([bad, good])
    assert "messages: given 'an integer of 5000 digits'" in bad_sender.wait_end()[0].error().message()
    assert ids_of(good_sender) == [97]


@pytest.mark.parametrize("outputs", [handover.OUTPUTS, handover.CALL_OUTPUTS], ids=["ensemble", "call"])
def test_who_takes_refusals_gets_them_as_a_tensor_and_no_error(outputs: tuple[str, ...]) -> None:
    plug = TokenizerPlug(SlowForLongTexts(max_tokens=9), KEY, max_tokens=9)
    requests = [received({"text_input": text(word)}, outputs=list(outputs)) for word in ("a", "refuse me", "")]
    plug.execute([request for request, _ in requests])
    answers = [sender.wait_end()[0].arrays() for _, sender in requests]
    assert ("refusal" in answers[0]) is (outputs is handover.OUTPUTS), "the ensemble carries a tensor in any case"
    assert "rare_refusal" not in answers[0]
    refusals = [handover.unpack(answer).refusal for answer in answers]
    assert refusals[0] is None
    assert isinstance(refusals[1], InvalidRequest)
    assert str(refusals[1]) == "text_input: given 'refuse me', allowed: another text"
    assert "at least one character" in str(refusals[2])


def test_one_text_too_many_is_told_when_to_come_back_and_holds_up_neither_stop_nor_ids() -> None:
    tokenizer = SlowForLongTexts()
    plug = TokenizerPlug(tokenizer, KEY, max_waiting=3)
    long = [received({"text_input": text("x" * LONG)}) for _ in range(3)]
    late, late_sender = received({"text_input": text("ab")}, outputs=list(handover.OUTPUTS))
    ids, ids_sender = received({"input_ids": np.array([[4]], np.int32)})
    stop, stop_sender = received({"stop": one(True, np.bool_)})
    plug.execute([request for request, _ in long])
    plug.execute([late, ids, stop])
    words = "REJECTED_SATURATED: 2 texts are waiting for the tokenizer; retry after 1.0 s"
    assert long[2][1].wait_end()[0].error().message() == words
    refusal = handover.unpack(late_sender.wait_end()[0].arrays()).refusal
    assert refusal is not None
    assert refusal.public_message() == words
    assert (ids_of(ids_sender), ids_of(stop_sender)) == ([4], [0])
    tokenizer.finish_long_texts()
    assert len(ids_of(long[0][1])) == len(ids_of(long[1][1])) == LONG
    again, again_sender = received({"text_input": text("ab")})
    plug.execute([again])
    assert ids_of(again_sender) == [97, 98]


def test_an_unexpected_error_is_hidden_from_the_client_and_told_to_the_log() -> None:
    request, sender = received({"text_input": text("break")})
    TokenizerPlug(SlowForLongTexts(), KEY).execute([request])
    [response] = sender.wait_end()
    assert response.error().message().startswith("FAILED: internal error (MemoryError)")
    assert "secret" not in response.error().message()
    [(level, logged)] = pb_utils.Logger.lines
    assert (level, "secret" in logged) == ("error", True)
    pb_utils.Logger.lines.clear()


def test_ids_pass_through_and_a_stop_has_none_of_its_own() -> None:
    plug = TokenizerPlug(SlowForLongTexts(), KEY)
    request, sender = received({"input_ids": np.array([[4, 5, 6]], np.int32)})
    stop, stop_sender = received({"stop": one(True, np.bool_)})
    plug.execute([request, stop])
    assert ids_of(sender) == [4, 5, 6]
    assert ids_of(stop_sender) == [0]


def test_a_chat_arrives_as_a_parameter() -> None:
    messages = json.dumps([{"role": "user", "content": "a"}, {"role": "user", "content": "b"}])
    request, sender = received({"stream": one(True, np.bool_)}, {"messages": messages})
    TokenizerPlug(SlowForLongTexts(), KEY).execute([request])
    assert ids_of(sender) == [ord("a"), ord("|"), ord("b")]


def test_stamps_frame_the_encoding() -> None:
    request, sender = received({"text_input": text("a")})
    TokenizerPlug(SlowForLongTexts(), KEY).execute([request])
    [response] = sender.wait_end()
    [[arrived, ready, *_]] = response.arrays()["tokenized_ns"]
    assert 0 < arrived <= ready


def test_who_takes_the_text_of_ids_gets_it() -> None:
    plug = TokenizerPlug(SlowForLongTexts(), KEY)
    outputs = [*handover.OUTPUTS, "text_output"]
    request, sender = received({"input_ids": np.array([[104, 105]], np.int32)}, outputs=outputs)
    wrong, wrong_sender = received({"input_ids": np.array([[128]], np.int32)}, outputs=outputs)
    plain, plain_sender = received({"text_input": text("hi")}, outputs=outputs)
    plug.execute([request, wrong, plain])
    assert sender.wait_end()[0].arrays()["text_output"].tolist() == [[b"hi"]]
    assert plain_sender.wait_end()[0].arrays()["text_output"].tolist() == [[b""]]
    refusal = handover.unpack(wrong_sender.wait_end()[0].arrays()).refusal
    assert str(refusal) == "input_ids: given 128, allowed: ids in [0, 128)"
