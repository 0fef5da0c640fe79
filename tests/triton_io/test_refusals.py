"""Refusals leave `execute` at once, each is sent once, and none is lost."""

from __future__ import annotations

import threading
from typing import Any

import triton_python_backend_utils as pb_utils
from tritandem.contracts.errors import Saturated
from tritandem.triton_io.answer.refusals import THREADS, Refusals


class SlowSender(pb_utils.ResponseSender):
    def __init__(self, go: threading.Event) -> None:
        super().__init__()
        self._go = go

    def send(self, response: Any = None, flags: int = 0) -> None:
        self._go.wait(10)
        super().send(response, flags)


def test_who_refuses_does_not_wait_for_triton_and_close_waits_for_all() -> None:
    go, refusals = threading.Event(), Refusals()
    senders = [SlowSender(go) for _ in range(5 * THREADS)]
    for i, sender in enumerate(senders):
        refusals.send(sender, Saturated(f"{i} requests are waiting", 2.5))
    assert not any(sender.responses for sender in senders)
    go.set()
    refusals.close()
    for i, sender in enumerate(senders):
        [response] = sender.responses
        assert response.error().message() == f"REJECTED_SATURATED: {i} requests are waiting; retry after 2.5 s"


def test_a_sender_that_fails_holds_up_no_other() -> None:
    class Broken(pb_utils.ResponseSender):
        def send(self, response: Any = None, flags: int = 0) -> None:
            raise RuntimeError("gone")

    refusals, sender = Refusals(threads=1), pb_utils.ResponseSender()
    refusals.send(Broken(), Saturated("full", 1.0))
    refusals.send(sender, Saturated("full", 1.0))
    refusals.close()
    assert len(sender.responses) == 1
    [(_, logged)] = pb_utils.Logger.lines
    assert "gone" in logged
    pb_utils.Logger.lines.clear()
