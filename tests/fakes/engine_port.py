"""An engine without a model, behind the port the scheduler uses.

Token j of an answer is `first_prompt_id * 1000 + j`, so that a test can tell whose tokens it got and whether any
is missing. In automatic mode every pull of the stream is one step in which each sequence gets a token;
otherwise the test says what happens with `emit`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
from tritandem.contracts.errors import EngineFailed, TritandemError
from tritandem.contracts.requests import EngineRequest
from tritandem.contracts.stream import FinishCode, LoadSnapshot, TokenBatch

WAIT_S = 10.0


def answer_tokens(first_prompt_id: int, count: int) -> list[int]:
    return [first_prompt_id * 1000 + j for j in range(count)]


def token_batch(
    rows: Sequence[tuple[int, Sequence[int], FinishCode]],
    load: LoadSnapshot,
    errors: dict[int, str] | None = None,
    cached_tokens: int = 0,
) -> TokenBatch:
    """`rows`: sequence id, its new tokens, its finish code. Log-probabilities are minus the token's last digit."""
    tokens = [token for _, its, _ in rows for token in its]
    return TokenBatch(
        seq_ids=np.array([seq_id for seq_id, _, _ in rows], dtype=np.int64),
        token_counts=np.array([len(its) for _, its, _ in rows], dtype=np.int32),
        tokens=np.array(tokens, dtype=np.int32),
        finish=np.array([int(code) for _, _, code in rows], dtype=np.uint8),
        cached_tokens=np.full(len(rows), cached_tokens, dtype=np.int32),
        stamps_ns=np.tile(np.array([1, 2, 3, 4], dtype=np.int64), (len(rows), 1)),
        load=load,
        logprobs=np.array([-(token % 10) for token in tokens], dtype=np.float32),
        top_ids=np.array([[token, -1] for token in tokens], dtype=np.int32).reshape(-1, 2),
        top_logprobs=np.array([[-(token % 10), -9] for token in tokens], dtype=np.float32).reshape(-1, 2),
        errors=errors or {},
    )


class FakeEngine:
    def __init__(
        self,
        name: str = "engine",
        automatic: bool = True,
        load: LoadSnapshot | None = None,
        refuse: Callable[[EngineRequest], TritandemError | None] = lambda request: None,
    ) -> None:
        self.name = name
        self.submits: list[list[EngineRequest]] = []
        self.cancelled_ids: list[int] = []
        self.dead = False
        self.streams = 0
        self.hang: threading.Event | None = None  # calls block until it is set
        self.strand: threading.Event | None = None  # streams of a killed life block until it is set, and say nothing
        self.changed = threading.Condition()
        self._automatic, self._refuse = automatic, refuse
        self._load = load or LoadSnapshot(
            total_blocks=4096, free_blocks=4096, block_tokens=16, max_sequences=32, max_context_tokens=32768
        )
        self._live: dict[int, tuple[EngineRequest, int]] = {}  # request, tokens made
        self._outbox: deque[TokenBatch] = deque()
        self._lives = 0

    # The port -------------------------------------------------------------------------------------

    def submit(self, requests: Sequence[EngineRequest]) -> list[TritandemError | None]:
        self._called()
        with self.changed:
            answers = [self._refuse(request) for request in requests]
            self.submits.append(list(requests))
            for request, answer in zip(requests, answers, strict=True):
                if request.seq_id in self._live:
                    raise AssertionError(f"sequence {request.seq_id} was submitted twice")
                if answer is None:
                    self._live[request.seq_id] = (request, 0)
            self.changed.notify_all()
        return answers

    def cancel(self, seq_ids: Sequence[int]) -> None:
        self._called()
        with self.changed:
            self.cancelled_ids.extend(seq_ids)
            for seq_id in seq_ids:
                self._live.pop(seq_id, None)
            self.changed.notify_all()

    def load(self) -> LoadSnapshot:
        self._called()
        with self.changed:
            return self._now()

    def stream(self) -> Iterator[TokenBatch]:
        with self.changed:
            self.streams += 1
            life = self._lives
        while True:
            with self.changed:
                self.changed.wait_for(
                    lambda: self.dead or self._lives != life or self._outbox or not self._live or self._automatic,
                    timeout=WAIT_S,
                )
                stranded = self.strand if self._lives != life else None
            if stranded is not None:
                stranded.wait(WAIT_S)
                return
            with self.changed:
                if self.dead or self._lives != life:
                    raise EngineFailed(f"{self.name} is dead")
                if self._outbox:
                    batch = self._outbox.popleft()
                elif self._live and self._automatic:
                    batch = self._step()
                else:
                    return
            yield batch

    # The test's side ------------------------------------------------------------------------------

    def emit(self, rows: Sequence[tuple[int, Sequence[int], FinishCode]], errors: dict[int, str] | None = None) -> None:
        """Send one message; rows of sequences that are not live are allowed (they may come late)."""
        with self.changed:
            for seq_id, _, code in rows:
                if code is not FinishCode.RUNNING:
                    self._live.pop(seq_id, None)
            self._outbox.append(token_batch(rows, self._now(), errors, cached_tokens=2))
            self.changed.notify_all()

    def kill(self) -> None:
        """The process is gone: open streams break, and a revived one knows nothing of before."""
        with self.changed:
            self.dead = True
            self._lives += 1
            self.forget()

    def forget(self) -> None:
        """Lose every sequence without a word."""
        with self.changed:
            self._live.clear()
            self._outbox.clear()
            self._load = replace(self._load, steps=0)
            self.changed.notify_all()

    def revive(self) -> None:
        with self.changed:
            self.dead = False
            self.changed.notify_all()

    def set_load(self, **fields: int) -> None:
        with self.changed:
            self._load = replace(self._load, **fields)

    def live_ids(self) -> list[int]:
        with self.changed:
            return list(self._live)

    def wait_live(self, count: int, timeout_s: float = 5.0) -> list[int]:
        with self.changed:
            if not self.changed.wait_for(lambda: len(self._live) == count, timeout_s):
                raise AssertionError(f"{len(self._live)} sequences after {timeout_s} s, expected {count}")
            return list(self._live)

    # Inside ---------------------------------------------------------------------------------------

    def _called(self) -> None:
        if self.hang is not None and not self.hang.wait(WAIT_S):
            raise AssertionError("a hanging call was never released")
        if self.dead:
            raise EngineFailed(f"{self.name} is dead")

    def _now(self) -> LoadSnapshot:
        return replace(self._load, running=len(self._live))

    def _step(self) -> TokenBatch:
        rows = []
        for seq_id, (request, made) in list(self._live.items()):
            token = int(request.prompt_ids[0]) * 1000 + made
            done = made + 1 == request.sampling.max_tokens
            rows.append((seq_id, [token], FinishCode.LENGTH if done else FinishCode.RUNNING))
            if done:
                del self._live[seq_id]
            else:
                self._live[seq_id] = (request, made + 1)
        self._load = replace(self._load, steps=self._load.steps + 1)
        return token_batch(rows, self._now())
