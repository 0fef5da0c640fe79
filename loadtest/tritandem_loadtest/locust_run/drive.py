"""One load-generating process of a headless run: `python -m tritandem_loadtest.locust_run.drive SHARD SHARDS OUT`.

Reads a RunConfig as a JSON line from stdin, says {"ready": true} on stdout, reads the start time (monotonic ns), then
writes one JSON line a second about its progress. Locust runs here as a library, so gevent stays in this process.
SIGTERM ends the run early, with its record written; SIGINT is left to whoever started it.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import signal
import sys
import time
from pathlib import Path

from locust.env import Environment  # patches the standard library: must come first

import gevent  # isort: skip

from ..config import LoadTestError, RunConfig
from .session import LoadSession
from .user import SESSION_ATTRIBUTE, StreamUser


def main(argv: list[str]) -> int:
    """Exit code 0 when the schedule was sent and drained, 3 when the run was cut, 2 for a bad configuration."""
    told_to_stop: list[int] = []
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: told_to_stop.append(number))
    shard, shards, out = int(argv[0]), int(argv[1]), Path(argv[2])
    config = RunConfig.from_json(sys.stdin.readline())
    try:
        session = LoadSession(config, shard, shards, out)
    except (LoadTestError, ValueError, OSError) as error:
        _say({"error": str(error)})
        return 2
    environment = Environment(user_classes=[StreamUser], host=config.url)
    setattr(environment, SESSION_ATTRIBUTE, session)
    # Locust warns of users that all start at once, and again when it stops users that have ended by themselves.
    logging.getLogger("locust.runners").setLevel(logging.CRITICAL)
    runner = environment.create_local_runner()
    users = max(1, config.user_count // shards)
    runner.start(users, spawn_rate=users)
    runner.spawning_greenlet.join()
    gevent.sleep(0)  # every user has its first prompt now
    gc.collect()
    gc.freeze()
    _say({"ready": True})
    start_line = sys.stdin.readline()
    if not start_line:  # nobody is there to start it
        return 3
    start_ns = int(start_line)
    session.start(start_ns)
    drained = _watch(session, start_ns + round((config.duration_s + config.drain_s) * 1e9), told_to_stop)
    runner.quit()
    session.close()
    if session.failure:
        return 2
    return 0 if drained else 3


def _watch(session: LoadSession, give_up_ns: int, told_to_stop: list[int]) -> bool:
    """Report progress until every request has ended (True), patience has or somebody says so (False)."""
    next_ns = time.monotonic_ns()
    while not session.finished:
        if told_to_stop:
            return False
        if session.failure:
            _say({"error": session.failure})
            return False
        if time.monotonic_ns() > give_up_ns:
            return False
        if time.monotonic_ns() >= next_ns:
            _say({"sent": session.sent, "done": session.done, "failed": session.failed, "tokens": session.tokens})
            next_ns += 1_000_000_000
        gevent.sleep(0.05)
    _say({"sent": session.sent, "done": session.done, "failed": session.failed, "tokens": session.tokens})
    return True


def _say(values: dict[str, object]) -> None:
    try:
        sys.stdout.write(json.dumps(values) + "\n")
        sys.stdout.flush()
    except BrokenPipeError:  # whoever started this is gone: nobody will read a word of it any more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
