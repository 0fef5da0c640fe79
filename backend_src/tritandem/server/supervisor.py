"""Keeps one server running in the foreground: signals, health, restarts with back-off.

The first SIGINT or SIGTERM drains, a second one kills. Runs in the main thread and starts no other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from ..config import RELAY_SUFFIX
from ..contracts.errors import ConfigError
from .backoff import RestartPolicy, delay_s, restarts_in_a_row
from .front_workers import FrontWorkers
from .health import stub_models
from .launcher import ServerDied, TritonServer
from .logfile import describe_end, progress
from .repository import SCHEDULER_MODEL, TOKENIZER_MODEL
from .stop_signals import StopSignals

WATCH_S = 0.25
READY_CHECK_EVERY_S = 2.0
# How long a stub may be missing, and how long readiness may be false.
STUB_GRACE_S = 1.0
UNREADY_GRACE_S = 20.0
# For what is left to finish of a server that does not answer any more.
SICK_STOP_S = 5.0
# For the last lines of its log, once the last request has ended: nothing of it needs a clean end.
SICK_UNLOAD_S = 3.0
# What hung while it loaded may load the next time; what was refused will be refused again.
HUNG_FIRST_STARTS = 3
# For running answers, while nothing new is served.
NOTHING_NEW_S = 5.0

EXIT_OK, EXIT_FAILED, EXIT_KILLED = 0, 1, 130


@dataclass(frozen=True, slots=True)
class Trouble:
    """What went wrong, and for how long what still runs may go on before the server is started afresh."""

    what: str
    patience_s: float


def lost_stubs(lost: Sequence[str], all_models: Collection[str], drain_timeout_s: float) -> Trouble:
    """Without the scheduler, which sends the answers, Triton would hold its requests open for ever: they end with their
    connections, now. Without another one, running answers end by themselves, well or with an error, but not for as long
    as a stop grants them while nothing new is served: without the tokenizer, or without any engine's relay."""
    names = ", ".join(name for name in lost if name)
    what = f"{len(lost)} of {len(all_models)} model processes have died" + (f": {names}" if names else "")
    if SCHEDULER_MODEL in lost:
        return Trouble(what, 0.0)
    relays = {model for model in all_models if model.endswith(RELAY_SUFFIX)}
    nothing_new = TOKENIZER_MODEL in lost or (relays and relays <= set(lost))
    return Trouble(what, min(NOTHING_NEW_S, drain_timeout_s) if nothing_new else drain_timeout_s)


class Supervisor:
    """`run()` serves until a signal and returns the exit code: 0 after a clean stop, 1 when the server could not be
    kept up, 130 when a second signal cut the drain short."""

    def __init__(
        self,
        make_server: Callable[[], TritonServer],
        policy: RestartPolicy,
        say: Callable[[str], None],
        front: FrontWorkers | None = None,
    ) -> None:
        self._make_server, self._policy, self._say, self._front = make_server, policy, say, front
        self._signals = StopSignals()

    def run(self, on_ready: Callable[[TritonServer], None]) -> int:
        """Raises Refusal when the first start is refused."""
        failures, was_ready = 0, False
        with self._signals:
            while True:
                server = self._make_server()
                try:
                    server.start()
                    code, ready_s, trouble = self._one_run(server, on_ready)
                except (ConfigError, OSError) as error:
                    if not was_ready:
                        raise
                    code, ready_s, trouble = None, 0.0, str(error)  # it may pass, as another's hold on a port does
                if code is not None:
                    return code
                was_ready = was_ready or ready_s > 0
                if trouble:
                    self._say(trouble)
                if not was_ready and not (server.had_hung and failures < HUNG_FIRST_STARTS):
                    self._say(f"the server never became ready; its log: {server.log_path}")
                    return EXIT_FAILED
                failures = restarts_in_a_row(self._policy, failures, ready_s)
                delay = delay_s(self._policy, failures)
                if delay is None:
                    self._say(f"giving up after {failures - 1} restarts in a row; the log: {server.log_path}")
                    return EXIT_FAILED
                limit = "" if self._policy.max_restarts is None else f" of {self._policy.max_restarts}"
                self._say(f"restart {failures}{limit} in {delay:.0f} s")
                if self._signals.wait(delay):
                    return EXIT_OK

    def _one_run(self, server: TritonServer, on_ready: Callable[[TritonServer], None]) -> tuple[int | None, float, str]:
        """(exit code, or None to consider a restart; seconds it was ready; what went wrong)."""
        ready_at: float | None = None
        try:
            if not server.wait_ready(on_line=self._show_progress, interrupted=self._signals.wait):
                self._say("stopped while loading")
                return EXIT_OK, 0.0, ""
            ready_at, stubs = time.monotonic(), stub_models(server.pid)
            if self._front:
                self._front.start(server.options, server.log_path, server.cpus)
            on_ready(server)
            trouble = self._watch(server, stubs)
            if trouble is None:
                return self._stop(server), 0.0, ""
            self._say(trouble.what)
            ready_s = time.monotonic() - ready_at
            server.stop(trouble.patience_s, interrupted=self._signals.pending, unload_s=SICK_UNLOAD_S)
            return None, ready_s, ""
        except ServerDied as error:
            return None, 0.0, str(error)
        finally:
            if self._front:
                self._front.kill()
            server.kill()

    def _show_progress(self, line: str) -> None:
        if text := progress(line):
            self._say(text)

    def _watch(self, server: TritonServer, stubs: dict[int, str]) -> Trouble | None:
        """Returns what went wrong with a ready server of these stubs; None when a signal asks to stop."""
        complete_at = ready_at = checked_at = time.monotonic()
        while not self._signals.wait(WATCH_S):
            server.look_after()
            if self._front:
                self._front.look_after()
            if (code := server.poll()) is not None:
                return Trouble(describe_end(code, server.log()), 0.0)
            now = time.monotonic()
            alive = stub_models(server.pid)
            complete_at = now if len(alive) >= len(stubs) else complete_at
            if now - complete_at > STUB_GRACE_S:
                lost = [model for pid, model in stubs.items() if pid not in alive]
                return lost_stubs(lost, stubs.values(), server.options.drain_timeout_s)
            if now - checked_at >= READY_CHECK_EVERY_S and not server.any_stopped():
                checked_at = now
                ready_at = now if server.is_ready() else ready_at
                if now - ready_at > UNREADY_GRACE_S:
                    return Trouble(f"the server has not been ready for {now - ready_at:.0f} s", SICK_STOP_S)
        return None

    def _stop(self, server: TritonServer) -> int:
        self._say("draining: running requests finish, new ones are refused (a second Ctrl-C ends it now)")
        asked_again = False

        def second_signal() -> bool:
            nonlocal asked_again
            asked_again = asked_again or self._signals.wait()
            return asked_again

        if self._front:
            self._front.drain()
        code = server.stop(interrupted=second_signal)
        if self._front:
            self._front.stop()
        if asked_again:
            return EXIT_KILLED
        self._say("stopped" if code == 0 else f"tritonserver ended with exit code {code}; its log: {server.log_path}")
        return EXIT_OK if code == 0 else EXIT_FAILED
