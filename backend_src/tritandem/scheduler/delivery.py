"""From an engine's flat token rows to the desk: one detokenize call and one lock per flush.

One `TokenRouter` per engine, run by that engine's reader thread. Rows of sequences that are not (or no longer)
known are dropped. Knows nothing about sinks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..contracts.answers import TokenLogprob
from ..contracts.arrays import Int32Array
from ..contracts.errors import EngineFailed
from ..contracts.stream import FinishCode, TokenBatch, TokenScores
from .desk import Desk
from .lifecycle import STOP_WORD, STOP_WORD_AT_END, Ending, State, ended_by_engine, ended_by_error
from .messages import FirstToken, Tell
from .ports import TextStep, TextStreamsPort
from .ticket import Ticket

RUNNING = int(FinishCode.RUNNING)
STOP = int(FinishCode.STOP)


@dataclass(frozen=True, slots=True)
class _Broken:
    """Stands for a row whose tokens could not be turned into text."""

    error: str
    text: str = ""
    stopped: bool = False
    tokens_used: int = 0


class TokenRouter:
    """`routes` is shared by the engine's threads and the scheduling thread: single dict operations only."""

    def __init__(self, text: TextStreamsPort, desk: Desk, tell: Tell) -> None:
        self.routes: dict[int, Ticket] = {}
        self._text, self._desk, self._tell = text, desk, tell

    def deliver(self, batch: TokenBatch) -> None:
        routes = self.routes
        all_ids = batch.seq_ids.tolist()
        known = [routes.get(seq_id) for seq_id in all_ids]
        rows = [row for row, ticket in enumerate(known) if ticket is not None]
        if not rows:
            return
        tickets = [ticket for ticket in known if ticket is not None]
        tokens, text_counts = text_tokens(batch, rows)
        steps = self._push([ticket.text_state for ticket in tickets], tokens, text_counts)
        counts, finish = batch.token_counts.tolist(), batch.finish.tolist()
        desk = self._desk
        with desk.lock:
            for row, ticket, step in zip(rows, tickets, steps, strict=True):
                if ticket.seq_id != all_ids[row] or ticket.life.state is State.ENDED:
                    continue  # it ended or moved while its text was made
                code, used, text = finish[row], counts[row], step.text
                if code == RUNNING and not (
                    step.stopped or ticket.blank or ticket.wants_logprobs or type(step) is _Broken
                ):
                    desk.append(ticket, text, used)  # nearly every row
                    continue
                ending: Ending | None = None
                if step.stopped:
                    used = step.tokens_used
                    ending = STOP_WORD if code == RUNNING else STOP_WORD_AT_END
                    ticket.stop_reason = self._text.stop_word(ticket.text_state)
                elif isinstance(step, _Broken):
                    ending = ended_by_error(EngineFailed(step.error), engine_knows=code != RUNNING)
                elif code != RUNNING:
                    ending = ended_by_engine(code, batch.errors.get(row))
                    if code == STOP and ticket.request.named_stops and counts[row]:
                        ticket.stop_reason = dict(ticket.request.named_stops).get(last_token(batch, row))
                    if ending.reason is not None:
                        text += self._text.flush(ticket.text_state)
                if ticket.blank or ending is not None:
                    self._note(ticket, batch, row)
                logprobs: list[TokenLogprob] = []
                if ticket.wants_logprobs and batch.logprobs is not None:
                    logprobs = take_logprobs(ticket, batch, row, used)
                if text or used:
                    desk.append(ticket, text, used, logprobs)
                if ending is not None:  # still under the lock: text and end go out in one response
                    desk.end_locked(ticket, ending)
                    routes.pop(all_ids[row], None)

    def _note(self, ticket: Ticket, batch: TokenBatch, row: int) -> None:
        ticket.engine_stamps = batch.stamps_ns[row].copy()
        ticket.cached_tokens = int(batch.cached_tokens[row])
        if (scores := batch.prompts.get(row)) is not None:
            ticket.prompt_logprobs = prompt_logprobs(ticket, scores)
        if ticket.blank and batch.token_counts[row]:
            ticket.blank = False
            self._tell(FirstToken(ticket))

    def _push(self, states: list[Any], tokens: Int32Array, counts: Int32Array) -> Sequence[TextStep]:
        try:
            return self._text.push(states, tokens, counts)
        except Exception:
            return self._push_one_by_one(states, tokens, counts)

    def _push_one_by_one(self, states: list[Any], tokens: Int32Array, counts: Int32Array) -> list[TextStep]:
        """A row that cannot be detokenized must fail alone."""
        steps: list[TextStep] = []
        starts = np.cumsum(counts) - counts
        for state, start, count in zip(states, starts.tolist(), counts.tolist(), strict=True):
            try:
                one = np.array([count], dtype=np.int32)
                steps.extend(self._text.push([state], tokens[start : start + count], one))
            except Exception as error:
                steps.append(_Broken(f"its tokens could not be turned into text: {error}"))
        return steps


def text_tokens(batch: TokenBatch, rows: list[int]) -> tuple[Int32Array, Int32Array]:
    """Flat tokens and counts of `rows` that are text: the stop token that ended a sequence is none."""
    counts = batch.token_counts
    stop_rows = (batch.finish == STOP) & (counts > 0)
    if len(rows) == len(counts) and not stop_rows.any():
        return batch.tokens, counts
    keep_rows = np.zeros(len(counts), dtype=bool)
    keep_rows[rows] = True
    keep_tokens = np.repeat(keep_rows, counts)
    keep_tokens[np.cumsum(counts)[stop_rows] - 1] = False
    return batch.tokens[keep_tokens], (counts - stop_rows).astype(np.int32)[keep_rows]


def prompt_logprobs(ticket: Ticket, scores: TokenScores) -> tuple[TokenLogprob, ...]:
    """Of all tokens of the prompt; nothing comes before the first."""
    ids, alternatives = ticket.request.input_ids.tolist(), zip(scores.top_ids.tolist(), scores.top_logprobs.tolist())  # noqa: B905
    top = [tuple(zip(*pairs, strict=True)) for pairs in alternatives]
    rest = map(TokenLogprob, ids[1:], scores.logprobs.tolist(), top)
    return (TokenLogprob(ids[0], None), *rest)


def last_token(batch: TokenBatch, row: int) -> int:
    """Of a row that has any."""
    return int(batch.tokens[int(batch.token_counts[: row + 1].sum()) - 1])


def take_logprobs(ticket: Ticket, batch: TokenBatch, row: int, used: int) -> list[TokenLogprob]:
    """Log-probabilities of the first `used` tokens of a row, with alternatives where they came; none where only their
    sum was asked for, which is counted here."""
    assert batch.logprobs is not None
    start = int(batch.token_counts[:row].sum())
    chosen = batch.logprobs[start : start + used].tolist()
    ticket.cumulative_logprob += sum(chosen)
    if not ticket.request.output.logprobs:
        return []
    logprobs = []
    for i, logprob in enumerate(chosen, start):
        top: tuple[tuple[int, float], ...] = ()
        if batch.top_ids is not None and batch.top_logprobs is not None:
            pairs = zip(batch.top_ids[i].tolist(), batch.top_logprobs[i].tolist(), strict=True)
            top = tuple((token_id, value) for token_id, value in pairs if token_id >= 0)
        logprobs.append(TokenLogprob(int(batch.tokens[i]), logprob, top))
    return logprobs
