"""The engine's core: carries out the batcher's decisions and applies what the runner found.

Keep this file minimal: every step passes through it. Owns the sequences; where they live is `residency.py`'s. One
thread calls everything here. A round is plan -> launch -> collect -> apply; with launch-ahead, results come some
rounds after their launch. Knows nothing about mailboxes, text or the device.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ...contracts.requests import EngineRequest
from ...contracts.stream import FinishCode, LoadSnapshot
from ...grammar import Matcher
from ...telemetry.step_meter import StepMeter
from ..step import Runner, StepFailed, StepPlan, StepResult, output_budget
from ..structure.tables import Walker
from . import batcher
from .batcher import BatchState, Budget, Decision
from .forcing import Forcing
from .masks import Lost, MaskServer
from .outbox import Outbox
from .pace import Pace
from .residency import Residency
from .sequence import NO_SLOT, SequenceState, features_of

_NOT_ALLOWED = "a token was chosen that the structure does not allow"


@dataclass(frozen=True, slots=True)
class _Launched:
    """A step in flight."""

    rows: list[SequenceState]  # of its results, in order
    prefilling: list[SequenceState]  # whose prompt goes on: without a result
    scored: list[tuple[SequenceState, int]]  # whose prompt's tokens are scored, and from which position on
    prefill_tokens: int
    launched_ns: int
    step_id: int


class EngineCore:
    def __init__(
        self,
        runner: Runner,
        outbox: Outbox,
        prefix_cache: bool = True,
        meter: StepMeter | None = None,
        now_ns: Callable[[], int] = time.monotonic_ns,
        forcing: Forcing = Forcing(),  # noqa: B008  (it has no state)
    ) -> None:
        """No meter, no metrics. `now_ns`: a simulation has a clock of its own."""
        spec = runner.spec
        self.spec, self.runner, self.outbox = spec, runner, outbox
        self.residency = Residency(spec, prefix_cache)
        self.budget = Budget.of(spec)
        self.waiting: deque[SequenceState] = deque()
        self.running: list[SequenceState] = []  # in order of admission
        self._live: dict[int, SequenceState] = {}
        self._in_flight: deque[_Launched] = deque()
        self._suspects: deque[SequenceState] = deque()  # of a failed step; tried again one by one
        self._waiting_tokens = 0
        self._pace = Pace()
        self._meter, self._now_ns = meter, now_ns
        self._masks, self._forcing = MaskServer(runner, meter), forcing
        self._arrivals = self._steps = self._preemptions = 0
        self._prompt_tokens = self._output_tokens = 0

    # -- requests ------------------------------------------------------------------------------------

    def add(self, request: EngineRequest, accepted_ns: int, structure: Matcher | Walker | None = None) -> None:
        """Queue a sequence that the service has found valid; `structure` is its own, at its beginning."""
        assert request.seq_id not in self._live, "an id that is in use"
        limit = output_budget(request.sampling.max_tokens, len(request.prompt_ids), self.spec.max_context_tokens)
        sequence = SequenceState(request, limit, accepted_ns, arrival=self._arrivals, structure=structure)
        self._arrivals += 1
        self._live[request.seq_id] = sequence
        self.residency.join(sequence)
        self._forcing.begin(sequence)
        self._waiting_tokens += sequence.known_tokens
        self._output_tokens += len(sequence.output_ids)
        self.waiting.append(sequence)

    def refuse(self, request: EngineRequest, accepted_ns: int, message: str) -> None:
        """A sequence that cannot begin ends with this error."""
        self.add(request, accepted_ns)
        self._end_all([self._live[request.seq_id]], FinishCode.ERROR, message)

    def cancel(self, seq_ids: Iterable[int]) -> None:
        """End sequences early; unknown ids are ignored."""
        self._end_all([self._live[i] for i in set(seq_ids) if i in self._live], FinishCode.CANCELLED)

    def fail_all(self, message: str) -> None:
        """End every sequence: the runner or the core itself broke."""
        self._masks.give_up()
        self._end_all(list(self._live.values()), FinishCode.ERROR, message)

    def live_ids(self) -> list[int]:
        return list(self._live)

    def idle(self) -> bool:
        return not self._live and not self._in_flight

    # -- one round -----------------------------------------------------------------------------------

    def step(self) -> None:
        """One round. Never raises for what a single step or sequence does wrong."""
        ahead = self._pace.steps_ahead(self.spec.launch_ahead_steps)
        launched = self.runner.pending() <= ahead and self._launch_next()
        wait = not launched or self.runner.pending() > ahead
        while (result := self._collect(wait)) is not None:
            self._apply(result, applied := self._in_flight.popleft())
            self._serve_masks()
            self._force(applied.rows)
            wait = False

    def prepare(self) -> bool:
        """Between two steps of nobody: the runner makes ready what later ones run faster with; whether there is more
        of it. Sizes of the cache stay as they are, what is efficient may become known."""
        more = self.runner.prepare()
        if self.runner.spec is not self.spec:
            self.spec = self.runner.spec
            self.budget = Budget.of(self.spec)
        return more

    def launch_due_ns(self, arrivals: bool) -> int:
        """Until when (monotonic ns) the next round may wait for sequences that then join its step; 0: not at all.
        `arrivals`: there are some already. Only long steps are worth it: of short ones, several are in flight."""
        if len(self._in_flight) != 1 or self._pace.steps_ahead(self.spec.launch_ahead_steps) != 1:
            return 0
        prefills = arrivals or bool(self.waiting) or any(s.stored < s.prefill_tokens for s in self.running)
        running = self._in_flight[0]
        return self._pace.launch_due_ns(running.launched_ns, running.prefill_tokens, prefills)

    def _launch_next(self) -> bool:
        """Plan and launch one step; False when nothing can be launched before results are read."""
        if self._masks.waited_for:
            return False
        decision = batcher.plan(self._batch_state(), self.budget)
        while decision.preempt is not None:
            self._preempt(decision.preempt)
            decision = batcher.plan(self._batch_state(), self.budget)
        step = None if decision.drain else self._build(decision)
        if step is None:
            return False
        launched_ns = self._now_ns()
        behind = bool(self._in_flight)
        try:
            lost = self._masks.before_launch(step, self.running, behind)
            self.runner.launch(step)
        except Exception as error:  # whatever broke, it must cost the sequences of this step at most
            self._step_failed(step, error)
            return True
        taken_ns = self._now_ns() - launched_ns
        prefill_tokens = sum(len(chunk.ids) for chunk in step.prefill)
        self._pace.note_launch(taken_ns, bool(step.prefill))
        self._pace.note_backlog(launched_ns, decision.behind)
        if self._meter is not None:
            self._meter.launched(taken_ns, bool(step.prefill))
        self._step_launched(decision, step, prefill_tokens, launched_ns)
        self._masks.launched(step, behind)
        self._lose(lost)
        return True

    def _batch_state(self) -> BatchState:
        in_flight, free_blocks = bool(self._in_flight), self.residency.pool.free_blocks
        while self._suspects:
            suspect = self._suspects[0]
            if suspect.prefill_left or suspect.decodable:
                return BatchState([suspect], (), free_blocks, 0, in_flight)
            self._suspects.popleft()
        return BatchState(
            self.running,
            self.residency.candidates(self.waiting),
            free_blocks,
            self.residency.free_slots,
            in_flight,
            self._waiting_tokens,
            self._pace.prompt_share,
            self._pace.behind_s,
            self._pace.pause_tokens,
        )

    def _build(self, decision: Decision) -> StepPlan | None:
        """Take blocks and slots for a decision and describe the step; None when it has no work."""
        self.residency.take(decision.grow, decision.admit)
        chunks = list(decision.prefill)
        for admission in decision.admit:
            sequence = self.waiting.popleft()
            assert sequence is admission.candidate.sequence
            if not sequence.prefill_start_ns:
                self._prompt_tokens += sequence.prompt_tokens
            self._waiting_tokens -= sequence.known_tokens
            self.running.append(sequence)
            chunks.append((sequence, admission.chunk_tokens))
        if not chunks and not decision.decode:
            return None
        prefill = [s.chunk(count) for s, count in chunks]
        sampling = [s for s, count in chunks if count == s.prefill_left] + list(decision.decode)
        self._steps += 1
        changes = self.residency.changes
        return StepPlan(
            step_id=self._steps,
            releases=tuple(changes.releases),
            inits=tuple(changes.inits.values()),
            block_updates=changes.block_updates(),
            copies=[(source, block) for block, source in changes.copies.items()],
            prefill=prefill,
            decode_slots=[s.slot for s in decision.decode],
            features=features_of(sampling),
            tables=[(place, table.words) for place, table in self.residency.shelf.fresh.items()],
        )

    def _step_launched(self, decision: Decision, step: StepPlan, prefill_tokens: int, launched_ns: int) -> None:
        self.residency.changes.clear()
        self.residency.shelf.fresh.clear()
        by_slot = {sequence.slot: sequence for sequence in self.running} if step.prefill else {}
        rows: list[SequenceState] = []
        prefilling: list[SequenceState] = []
        scored = []
        for chunk in step.prefill:
            sequence = by_slot[chunk.slot]
            sequence.prefill_start_ns = sequence.prefill_start_ns or launched_ns
            sequence.stored += len(chunk.ids)
            sequence.promised += int(chunk.last)
            (rows if chunk.last else prefilling).append(sequence)
            if chunk.targets is not None:
                scored.append((sequence, chunk.start))
            self.residency.register_blocks(sequence)
        for sequence in decision.decode:
            sequence.stored += 1
            sequence.promised += 1
        self.residency.drop_unseen(decision.decode)
        rows += decision.decode
        self._in_flight.append(_Launched(rows, prefilling, scored, prefill_tokens, launched_ns, step.step_id))
        if self._suspects:
            self._suspects.popleft()

    def _preempt(self, sequence: SequenceState) -> None:
        """Give way: blocks and slot go back, the sequence waits at the head of the line with its output."""
        self._preemptions += 1
        self._release(sequence)
        self._waiting_tokens += sequence.known_tokens
        self.waiting.appendleft(sequence)

    # -- results -------------------------------------------------------------------------------------

    def _collect(self, wait: bool) -> StepResult | None:
        while self._in_flight:
            try:
                return self.runner.collect(wait)
            except Exception as error:
                # A step broke on the device. What it was to store is not there; steps behind it may have read that.
                lost = [s for step in self._in_flight for s in (*step.rows, *step.prefilling)]
                self._in_flight.popleft()
                self.residency.pool.forget_all()
                self._end_all(lost, FinishCode.ERROR, str(error))
                self._serve_masks()
        return None

    def _serve_masks(self) -> None:
        if self._in_flight and self._masks.waited_for:
            self._lose(self._masks.serve(self._in_flight[0].step_id, self.running))

    def _force(self, decoded: list[SequenceState]) -> None:
        ready = self._forcing.ready(decoded, len(self.running))
        forced = [sequence for sequence, run in ready if self.residency.force(sequence, run)]
        if forced:
            self._output_tokens += sum(len(sequence.forced) for sequence in forced)
            with self.outbox.lock:
                self.outbox.publish([sequence for sequence in forced if sequence.take_forced()], self.load())

    def _lose(self, lost: Lost) -> None:
        for sequence, message in lost:
            self._end_all([sequence], FinishCode.ERROR, message)

    def _apply(self, result: StepResult, launched: _Launched) -> None:
        """Hand new tokens to their sequences and end those that finished."""
        taken_ns = self._pace.note(result, launched.prefill_tokens)
        if self._meter is not None and not launched.prefill_tokens:
            self._meter.decode_step.note(taken_ns)
        changed, ended, broken = [], [], []
        block_tokens = self.spec.block_tokens
        with self.outbox.lock:
            for (sequence, start), scores in zip(launched.scored, result.scores, strict=True):
                sequence.keep_scores(start, scores)
            rows = zip(launched.rows, result.tokens.tolist(), result.finish.tolist(), strict=True)
            for row, (sequence, token, code) in enumerate(rows):
                if token < 0 or sequence.finish:
                    continue
                if code == FinishCode.ERROR:
                    broken.append(sequence)
                    continue
                sequence.output_ids.append(token)
                sequence.latest_token_ns = result.finished_ns
                sequence.first_token_ns = sequence.first_token_ns or result.finished_ns
                if not sequence.plain:
                    sequence.keep_logprobs(result, row)
                    code = sequence.follow(token, code)
                if sequence.stored >= (sequence.registered_blocks + 1) * block_tokens:
                    self.residency.register_blocks(sequence)
                changed.append(sequence)
                if code:
                    ended.append((sequence, FinishCode(code)))
            self._output_tokens += len(changed)
            for sequence, finish in ended:
                self._end(sequence, finish, _NOT_ALLOWED if finish == FinishCode.ERROR else "")
            self.outbox.publish([*changed, *self._end_broken(broken)], self.load())

    def _end_broken(self, broken: list[SequenceState]) -> list[SequenceState]:
        """Their logits were not finite. Whoever read cached blocks may have got that from another's, and is tried once
        more on blocks of its own; the others end. Returns those; the caller holds the outbox's lock and publishes."""
        self.residency.distrust(broken, self.running)
        ended = [sequence for sequence in broken if sequence.forced or not sequence.reused_tokens]
        for sequence in ended:
            self._end(sequence, FinishCode.ERROR, sequence.why_no_choice())
        for sequence in (sequence for sequence in broken if not sequence.finish):
            sequence.takes_cached = False
            self._preempt(sequence)
        return ended

    def _end_all(self, sequences: list[SequenceState], finish: FinishCode, error: str = "") -> None:
        with self.outbox.lock:
            live = list(dict.fromkeys(sequence for sequence in sequences if not sequence.finish))
            if finish == FinishCode.ERROR:
                self.residency.distrust(live, self.running)
            for sequence in live:
                self._end(sequence, finish, error)
            self.outbox.publish(live, self.load())

    def _end(self, sequence: SequenceState, finish: FinishCode, error: str = "") -> None:
        """Once per sequence; the caller holds the outbox's lock and publishes."""
        self._pace.note_end(sequence.prompt_tokens - sequence.cached_tokens, len(sequence.output_ids))
        del self._live[sequence.seq_id]
        self.residency.leave(sequence)
        if self._meter is not None and not self._live:
            self._meter.busy = False  # from here on nobody waits for the device
        if sequence.slot == NO_SLOT:
            self.waiting.remove(sequence)
            self._waiting_tokens -= sequence.known_tokens
        else:
            self._release(sequence)
        sequence.end(finish, error)

    def _release(self, sequence: SequenceState) -> None:
        self.residency.release(sequence)
        self.running.remove(sequence)
        if sequence in self._suspects:
            self._suspects.remove(sequence)

    def _step_failed(self, step: StepPlan, error: Exception) -> None:
        """The step did not happen, or not all of it. A single concerned sequence fails; several are tried again one by
        one, where a prompt ended with a new row: a first token that was chosen already must not count. Of a stateful
        model all get one, with what they have come to: some layers may have taken this step's tokens in."""
        while self.spec.stateful and (result := self._collect(wait=True)) is not None:
            self._apply(result, self._in_flight.popleft())
        slots = set(error.slots) if isinstance(error, StepFailed) else set()
        slots = slots or {chunk.slot for chunk in step.prefill} | set(step.decode_slots)
        concerned = [sequence for sequence in self.running if sequence.slot in slots]
        if len(concerned) > 1:
            anew = slots if self.spec.stateful else {chunk.slot for chunk in step.prefill if chunk.last}
            for sequence in concerned:
                if sequence.slot in anew:
                    self.residency.rewind(sequence)
            self._suspects = deque(concerned)
        else:
            self._end_all(concerned, FinishCode.ERROR, f"{type(error).__name__}: {error}")

    # -- views ---------------------------------------------------------------------------------------

    def load(self) -> LoadSnapshot:
        prefilling = [s.prefill_tokens - s.stored for s in self.running if s.stored < s.prefill_tokens]
        return LoadSnapshot(
            running=len(self.running) - len(prefilling),
            waiting=len(self.waiting) + len(prefilling),
            waiting_tokens=self._waiting_tokens + sum(prefilling),
            free_blocks=self.residency.pool.free_blocks,
            total_blocks=self.residency.pool.total_blocks,
            block_tokens=self.spec.block_tokens,
            max_sequences=self.spec.num_slots,
            max_context_tokens=self.spec.max_context_tokens,
            decode_step_ns=self._pace.decode_step_ns,
            prefill_token_ns=self._pace.prefill_token_ns,
            steps=self._steps,
            preemptions=self._preemptions,
            prefix_hit_tokens=self.residency.hit_tokens,
            prompt_tokens=self._prompt_tokens,
            output_tokens=self._output_tokens,
        )

    def check_integrity(self) -> None:
        """Sequences, slots and blocks are each in one place. Raises AssertionError."""
        self.residency.check_integrity(self.running)
        assert all(not sequence.blocks for sequence in self.waiting), "a waiting sequence holds blocks"
        assert set(self._live.values()) == {*self.running, *self.waiting}, "a sequence was lost"
        assert self._waiting_tokens == sum(s.known_tokens for s in self.waiting), "waiting tokens are miscounted"
