"""A model's process from its first moment: watched from outside, ended with its server, its log in Triton's.

What all plugs share when they start, on the stub's main thread. Made before a plug is imported: that takes a while, and
exit handlers are registered after this one. A model is ready, and with it the server, when its plug's `start` returns.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import triton_python_backend_utils as pb_utils

from ...config import config_from_environment, heartbeat_from_environment
from ...contracts.printable import MAX_TRACEBACK_CHARS, printable
from ...telemetry.heartbeat import Busy, Heartbeat
from ..stub_2_51 import quick_tensors
from ..stub_2_51.leaving import leave_without_teardown


class Plug(Protocol):
    def execute(self, requests: Sequence[Any]) -> None: ...

    def close(self) -> None: ...


class WatchedPlug:
    """`in_call` is entered for as long as the plug has Triton's thread: a call that never comes back is seen."""

    def __init__(self, plug: Plug, in_call: AbstractContextManager[object]) -> None:
        self._plug, self._in_call = plug, in_call
        self.close = plug.close

    def execute(self, requests: Sequence[Any]) -> None:
        with self._in_call:
            self._plug.execute(requests)


class Process:
    """`args`: those of Triton's `initialize`. Raises ConfigError."""

    def __init__(self, args: Mapping[str, str]) -> None:
        leave_without_teardown()
        quick_tensors.install(pb_utils)
        self._heartbeat = Heartbeat(heartbeat_from_environment())
        log_to_triton()
        self.args, self.config = args, config_from_environment()

    def parameter(self, name: str) -> str:
        """A parameter of config.pbtxt, "" when it is not there."""
        parameters = json.loads(self.args["model_config"]).get("parameters", {})
        value: str = parameters.get(name, {}).get("string_value", "")
        return value

    def busy(self, what: str, limit_s: float | None = None) -> Busy:
        """A kind of work that is watched: by default it may take as long as a call of Triton's."""
        return self._heartbeat.busy(what, self.config.watch.call_s if limit_s is None else limit_s)

    def loading(self) -> Busy:
        """Around a load, its imports included."""
        return self.busy("loading", self.config.watch.load_s)

    def watched(self, plug: Plug) -> WatchedPlug:
        return WatchedPlug(plug, self.busy("a call of Triton's"))


class _TritonHandler(logging.Handler):
    """Python's log records into Triton's log."""

    def emit(self, record: logging.LogRecord) -> None:
        text = printable(self.format(record), MAX_TRACEBACK_CHARS, lines=True)
        if record.levelno >= logging.ERROR:
            pb_utils.Logger.log_error(text)
        elif record.levelno >= logging.WARNING:
            pb_utils.Logger.log_warn(text)
        else:
            pb_utils.Logger.log_info(text)


def log_to_triton() -> None:
    """Everything that the rooms log, from INFO on, appears in the server's log."""
    logger = logging.getLogger("tritandem")
    if not logger.handlers:
        handler = _TritonHandler()
        handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False
