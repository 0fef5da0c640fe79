"""Requests: admission, order, deadlines, dispatch, outcome, delivery of chunks. Knows neither torch nor Triton."""

from .ports import EngineStatus, FinishedRequest, Observer, SchedulerSnapshot, TextStep, TextStreamsPort
from .service import SchedulerService

__all__ = [
    "EngineStatus",
    "FinishedRequest",
    "Observer",
    "SchedulerService",
    "SchedulerSnapshot",
    "TextStep",
    "TextStreamsPort",
]
