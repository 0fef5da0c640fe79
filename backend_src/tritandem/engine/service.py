"""The engine as other threads see it: a mailbox in, an outbox out, one core thread between them.

Owns that thread and the set of live ids. Callers may use any thread; only the core's thread touches core
and runner. Knows nothing about Triton.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path

from ..config import EngineConfig
from ..contracts.errors import EngineFailed, InvalidRequest, Saturated, TritandemError
from ..contracts.requests import EngineRequest
from ..contracts.stream import FinishCode, LoadSnapshot, TokenBatch
from ..telemetry.step_meter import StepMeter
from .host.core import EngineCore
from .host.forcing import Forcing
from .host.outbox import Outbox
from .host.validation import validate
from .step import Runner
from .structure.preparing import OpenVocabulary, Prepared, Preparer

MAX_LIVE_SEQUENCES = 16384
LONGEST_LOOK_S = 0.001  # between looks at a device that may be done before it is expected to
# Without work, before the runner prepares: whoever comes right behind another shall not wait for it, nor who waited for
# the engine to be ready.
QUIET_S, FIRST_QUIET_S = 0.5, 3.0
CORE_THREAD = "engine-core"  # launches steps; may be given a core of its own

log = logging.getLogger(__name__)


class EngineService:
    """Starts its thread at once; `close` ends it and the runner. `in_step` is entered for as long as a step is launched
    or waited for."""

    def __init__(
        self,
        runner: Runner,
        prefix_cache: bool = True,
        meter: StepMeter | None = None,
        in_step: AbstractContextManager[object] = nullcontext(),  # noqa: B008  (it has no state)
        preparer: Preparer | None = None,
        forcing: Forcing = Forcing(),  # noqa: B008  (it has no state)
    ) -> None:
        """`preparer`: of structured answers; None: there are none. It is closed here."""
        self._in_step, self._preparer, self._meter = in_step, preparer, meter
        self.spec = runner.spec
        self._outbox = Outbox()
        self._core = EngineCore(runner, self._outbox, prefix_cache, meter, forcing=forcing)
        self._mail = threading.Condition()
        self._added: list[tuple[EngineRequest, int, Prepared | None]] = []
        self._preparing: set[int] = set()  # whose grammar is being compiled
        self._cancelled_early: set[int] = set()  # of these
        self._cancelled: list[int] = []
        self._live_ids: set[int] = set()
        self._load = self._core.load()
        self._closing = False
        self._unprepared = True  # as far as is known
        self._thread = threading.Thread(target=self._run, name=CORE_THREAD, daemon=True)
        self._thread.start()

    # -- any thread ----------------------------------------------------------------------------------

    def submit(self, requests: Sequence[EngineRequest]) -> list[TritandemError | None]:
        """Take sequences; one entry each: None, or why it was refused. Tokens come through `next_batch`."""
        accepted_ns = time.monotonic_ns()
        with self._mail:
            answers = [self._take_in(request, accepted_ns) for request in requests]
            self._mail.notify_all()
        return answers

    def cancel(self, seq_ids: Sequence[int]) -> None:
        """Ask for an early end; the sequence's last row says CANCELLED. Unknown ids are ignored."""
        with self._mail:
            for seq_id in seq_ids:
                if seq_id in self._preparing:
                    self._cancelled_early.add(seq_id)
                else:
                    self._cancelled.append(seq_id)
            self._mail.notify_all()

    def load(self) -> LoadSnapshot:
        """As of the last step."""
        return self._load

    def live(self) -> int:
        """Sequences accepted whose end `next_batch` has not handed out."""
        with self._mail:
            return len(self._live_ids)

    def next_batch(self, timeout_s: float) -> TokenBatch | None:
        """Everything since the last call as one message; waits for news, None after `timeout_s` without."""
        batch = self._outbox.take(timeout_s)
        if batch is not None:
            ended = batch.seq_ids[batch.finish != FinishCode.RUNNING].tolist()
            with self._mail:
                self._live_ids.difference_update(ended)
        return batch

    def close(self) -> None:
        """Cancel what lives, end the thread, free the device."""
        with self._mail:
            self._closing = True
            self._mail.notify_all()
        self._thread.join()
        self._outbox.close()

    def _take_in(self, request: EngineRequest, accepted_ns: int) -> TritandemError | None:
        """Queue one sequence or say why not. The caller holds `_mail`."""
        if self._closing:
            return EngineFailed("the engine is shutting down")
        if len(self._live_ids) >= MAX_LIVE_SEQUENCES:
            return Saturated(f"the engine holds {MAX_LIVE_SEQUENCES} sequences", retry_after_s=1.0)
        if request.seq_id in self._live_ids:
            return InvalidRequest("seq_id", request.seq_id, "an id that is not in use")
        try:
            validate(request, self.spec)
        except InvalidRequest as error:
            return error
        if request.grammar is not None and self._preparer is None:
            return InvalidRequest("structured_outputs", "a grammar", "none: this engine has no structured output")
        self._live_ids.add(request.seq_id)
        if request.grammar is None or self._preparer is None:
            self._added.append((request, accepted_ns, None))
        else:
            self._preparing.add(request.seq_id)
            self._preparer.prepare(request.grammar, partial(self._prepared, request, accepted_ns))
        return None

    def _prepared(self, request: EngineRequest, accepted_ns: int, prepared: Prepared) -> None:
        """The core hears of a structured answer once its grammar is compiled, or could not be. Any thread."""
        with self._mail:
            self._preparing.remove(request.seq_id)
            self._added.append((request, accepted_ns, prepared))
            if request.seq_id in self._cancelled_early:
                self._cancelled_early.remove(request.seq_id)
                self._cancelled.append(request.seq_id)
            self._mail.notify_all()

    # -- the core's thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        core = self._core
        while self._wait_for_work():
            try:
                self._wait_for_company()
                self._read_mail()
                with self._in_step:
                    core.step()
            except Exception as error:  # a defect of ours: these requests fail, the process lives
                log.exception("the engine's step failed")
                core.fail_all(f"{type(error).__name__}: {error}")
            self._load = core.load()
        if self._preparer is not None:
            self._preparer.close()
        self._read_mail()  # whatever was accepted gets its end
        core.cancel(core.live_ids())
        core.runner.close()

    def _wait_for_work(self) -> bool:
        """In quiet moments the runner prepares what later steps run faster with. False when closing."""
        quiet_s = QUIET_S if self._load.steps else FIRST_QUIET_S
        wait_s: float | None = quiet_s if self._unprepared else None
        while True:
            with self._mail:
                if self._mail.wait_for(self._has_work, wait_s):
                    return not self._closing
                quiet = not self._live_ids
            if quiet:
                self._unprepared = self._prepare()
            wait_s = (0.0 if quiet else quiet_s) if self._unprepared else None

    def _prepare(self) -> bool:
        try:
            with self._in_step:
                return self._core.prepare()
        except Exception:  # steps go on with what there is
            log.exception("nothing more is prepared")
            return False

    def _wait_for_company(self) -> None:
        """A launch is not made before it is due: whoever arrives until then is in its step."""
        with self._mail:
            while not self._closing:
                left_s = (self._core.launch_due_ns(bool(self._added)) - time.monotonic_ns()) / 1e9
                if left_s <= 0 or not self._core.runner.busy():
                    return
                self._mail.wait(min(left_s, LONGEST_LOOK_S))

    def _read_mail(self) -> None:
        with self._mail:
            added, self._added = self._added, []
            cancelled, self._cancelled = self._cancelled, []
        for request, accepted_ns, prepared in added:
            if prepared is None:
                self._core.add(request, accepted_ns)
            elif prepared.error is not None:
                self._core.refuse(request, accepted_ns, str(prepared.error))
            else:
                if self._meter is not None and prepared.compile_ns:
                    self._meter.grammar_compile.note(prepared.compile_ns)
                self._core.add(request, accepted_ns, prepared.structure)
        self._core.cancel(cancelled)

    def _has_work(self) -> bool:
        return bool(self._added or self._cancelled or self._closing or not self._core.idle())


def build_engine(
    model: Path,
    config: EngineConfig,
    on_progress: Callable[[str], None],
    meter: StepMeter | None = None,
    in_step: AbstractContextManager[object] = nullcontext(),  # noqa: B008  (it has no state)
    open_vocabulary: OpenVocabulary | None = None,
    on_broken: Callable[[str], None] = lambda reason: None,
) -> EngineService:
    """Load a model and start its engine, which notes its steps in `meter`. `open_vocabulary` reads the model's
    tokenizer for structured answers. `on_broken` hears, once and in a thread of the engine's, that no step can run any
    more and why: every sequence ends. Raises ConfigError with the reason."""
    # Imported here: the service itself needs no torch.
    from .model.loader import load_model, resolve_devices
    from .runners.cpu_threads import limit_threads

    devices = resolve_devices(config.device)
    on_cuda = devices[0].type == "cuda"
    if not on_cuda:
        on_progress(f"computing with {limit_threads(config.threads, len(devices))} threads")
    runner: Runner
    preparer: Preparer | None = None
    if len(devices) > 1:
        from .runners.ranks import build_ranks

        runner = build_ranks(model, config, devices, on_progress, meter, on_broken)
    elif on_cuda:
        from .runners.cuda import CudaRunner

        loaded = load_model(model, config, on_progress)
        if open_vocabulary is not None:
            preparer = Preparer(open_vocabulary, loaded.vocab_size)
            preparer.warm()  # a second of a core, which the first request would miss
        runner = CudaRunner(loaded, config, on_progress, meter)
    else:
        from .runners.cpu import CpuRunner

        runner = CpuRunner(load_model(model, config, on_progress), config, meter)
        if config.kv_dtype != "auto":
            kept = f"keys and values are kept as {config.kv_dtype}"
            on_progress(f"{kept}: more blocks in the same memory, and every step converts what it reads")
    if on_cuda:
        limit_threads(config.threads)  # loading may use every core, steps need none
    if open_vocabulary is not None and preparer is None:
        preparer = Preparer(open_vocabulary, runner.spec.vocab_size)
        if on_cuda:
            preparer.warm()
    forcing = Forcing.of(config.forced_run_tokens, runner.spec)
    return EngineService(runner, config.prefix_cache, meter, in_step, preparer, forcing)
