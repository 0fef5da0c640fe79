"""Hooks this project into a `locust` process: flags, one LoadSession per test and process, shards, web page, exit code.

Importing it registers the listeners, as a locustfile does. Runs on local, master and worker processes.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import gevent
from locust import events
from locust.runners import STATE_RUNNING, STATE_SPAWNING, MasterRunner, WorkerRunner

from ..config import LoadTestError, RunConfig
from ..workload import Workload
from . import options, web
from .live import LiveFigures
from .session import LoadSession
from .user import SESSION_ATTRIBUTE

_log = logging.getLogger("tritandem_loadtest")
_SHARD_MESSAGE = "tritandem_shard"
_DEFAULT_USERS = 200
_DRAIN_S = 20.0
_SPAWN_NS = 1_000_000_000
_START_S = 30.0


def _on_parser(parser: Any, **_: Any) -> None:
    options.add_arguments(parser)


def _on_init(environment: Any, runner: Any = None, web_ui: Any = None, **_: Any) -> None:
    Plug(environment, runner, web_ui)


events.init_command_line_parser.add_listener(_on_parser)
events.init.add_listener(_on_init)


class Plug:
    """The state of one Locust process: its shard, its live figures and the session of the test that runs."""

    def __init__(self, environment: Any, runner: Any, web_ui: Any) -> None:
        self._environment = environment
        self._live = LiveFigures()
        self._shard = (0, 1)
        self._session: LoadSession | None = None
        parsed = environment.parsed_options
        # Users are permits here: a slow ramp of them would only delay the schedule.
        parsed.num_users = parsed.num_users or _DEFAULT_USERS
        if not parsed.spawn_rate or parsed.spawn_rate <= 1:
            parsed.spawn_rate = parsed.num_users
        environment.stop_timeout = environment.stop_timeout or _DRAIN_S
        if web_ui is not None:
            web.extend(web_ui, self._live)
        hooks = environment.events
        hooks.test_start.add_listener(self._on_test_start)
        hooks.spawning_complete.add_listener(self._on_spawned)
        hooks.test_stopping.add_listener(self._on_test_stopping)
        hooks.test_stop.add_listener(self._on_test_stop)
        if not isinstance(runner, MasterRunner):
            gevent.spawn(self._close_seconds)
        if isinstance(runner, WorkerRunner):
            runner.register_message(_SHARD_MESSAGE, self._on_shard)
            hooks.report_to_master.add_listener(self._on_report)
            return
        hooks.worker_report.add_listener(self._on_worker_report)
        hooks.reset_stats.add_listener(lambda **_: self._live.clear())
        hooks.quitting.add_listener(self._on_quitting)
        hooks.quit.add_listener(self._on_quit)

    def _on_shard(self, msg: Any, **_: Any) -> None:
        self._shard = (msg.data["shard"], msg.data["shards"])

    def _on_test_start(self, **_: Any) -> None:
        """On the master: deal out shards. Elsewhere: make the session that users will take arrivals from."""
        self._live.clear()
        setattr(self._environment, SESSION_ATTRIBUTE, None)
        runner = self._environment.runner
        try:
            if isinstance(runner, MasterRunner):
                Workload(self._config())  # refused here, a wrong setting costs no worker
                self._deal_shards(runner)
            else:
                self._session = self._new_session()
        except (LoadTestError, ValueError, OSError) as error:
            self._refuse(error)
            return
        self._environment.process_exit_code = None  # an earlier test of this page may have had a wrong field
        setattr(self._environment, SESSION_ATTRIBUTE, self._session)
        if isinstance(runner, WorkerRunner) and self._session is not None:
            # The master's word that all users are there comes seconds late: give them one second instead.
            self._session.start(time.monotonic_ns() + _SPAWN_NS)

    @staticmethod
    def _deal_shards(runner: Any) -> None:
        workers = sorted(runner.clients)
        for shard, client_id in enumerate(workers):
            runner.send_message(_SHARD_MESSAGE, {"shard": shard, "shards": len(workers)}, client_id)

    def _refuse(self, error: Exception) -> None:
        """The test cannot start: say so, and end it; without a page end the process too."""
        _log.error("the load test cannot start: %s", error)
        self._environment.process_exit_code = 2
        runner = self._environment.runner
        if isinstance(runner, MasterRunner):
            runner.log_exception("master", str(error), "")
        else:  # this way the word of a worker reaches the page of its master
            self._environment.events.user_error.fire(user_instance=None, exception=error, tb=None)
        if not isinstance(runner, WorkerRunner):
            gevent.spawn(self._end_refused_test)

    def _end_refused_test(self) -> None:
        """A master that is stopped while it starts forgets its workers: not before it has started."""
        runner = self._environment.runner
        with gevent.Timeout(_START_S, False):
            while runner.state != STATE_RUNNING:
                gevent.sleep(0.1)
        if self._environment.parsed_options.headless:
            runner.quit()
        else:
            runner.stop()

    def _config(self) -> RunConfig:
        return options.run_config(self._environment.parsed_options, self._environment.host)

    def _new_session(self) -> LoadSession:
        parsed = self._environment.parsed_options
        config = self._config()
        out = None
        if parsed.stamps_dir:
            directory = Path(parsed.stamps_dir)
            directory.mkdir(parents=True, exist_ok=True)
            (directory / "config.json").write_text(config.to_json(), encoding="utf-8")
            out = directory / f"stamps-{self._shard[0]}.jsonl"
        return LoadSession(config, *self._shard, out, self._live.take)

    def _on_spawned(self, **_: Any) -> None:
        if self._session is not None and not self._session.start_ns:
            self._session.start(time.monotonic_ns())

    def _on_test_stopping(self, **_: Any) -> None:
        if self._session is not None:
            self._session.stop()

    def _on_test_stop(self, **_: Any) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None

    def _on_report(self, data: dict[str, Any], **_: Any) -> None:
        data["tritandem"] = self._live.drain()

    def _on_worker_report(self, data: dict[str, Any], **_: Any) -> None:
        self._live.merge(data["tritandem"])

    def _on_quitting(self, **_: Any) -> None:
        """Print the token-level table and fail the process when an SLO was missed."""
        for row in self._live.table():
            print("  ".join(f"{text:<28}" if name == "metric" else f"{text:>10}" for name, text in row.items()))
        try:
            config = self._config()
        except LoadTestError:  # the last test was refused for it
            return
        for name, limit_ms in config.slo.items():
            value_ms = self._live.total[name].percentile(config.slo_percentile)
            if not value_ms <= limit_ms:
                _log.error("SLO missed: %s p%g is %.1f ms, limit %g", name, config.slo_percentile, value_ms, limit_ms)
                self._environment.process_exit_code = 1

    def _on_quit(self, **_: Any) -> None:
        """Locust has written its report by now, unless a signal ended it."""
        written = self._environment.parsed_options.html_file
        if written and Path(written).is_file():
            web.complete_report(Path(written), self._live)

    def _close_seconds(self) -> None:
        while True:
            gevent.sleep(1.0)
            if self._environment.runner.state in (STATE_SPAWNING, STATE_RUNNING):
                self._live.close_second()
