"""Errors on their way from one process to another: a JSON list of the class and what it was made of.

Knows nothing about how the list travels. What arrives is the error that was sent, with the same words.
"""

from __future__ import annotations

from typing import Any

from .errors import (
    DeadlineExpired,
    EngineFailed,
    InvalidRequest,
    RequestCancelled,
    RequestStopped,
    Saturated,
    TritandemError,
)
from .printable import Shown

_PLAIN: dict[str, type[TritandemError]] = {
    cls.__name__: cls for cls in (DeadlineExpired, EngineFailed, RequestCancelled, RequestStopped)
}


def pack(error: TritandemError) -> list[Any]:
    if isinstance(error, InvalidRequest):
        return ["InvalidRequest", error.field_name, error.given, error.allowed]
    if isinstance(error, Saturated):
        return ["Saturated", error.reason, error.retry_after_s]
    kind = type(error).__name__
    return [kind if kind in _PLAIN else "EngineFailed", str(error)]


def unpack(fields: list[Any]) -> TritandemError:
    """Of a process of ours: anything malformed is a bug and raises whatever it raises."""
    kind, *arguments = fields
    if kind == "InvalidRequest":
        name, given, allowed = arguments
        return InvalidRequest(name, Shown(given), allowed)
    if kind == "Saturated":
        return Saturated(*arguments)
    return _PLAIN[kind](*arguments)
