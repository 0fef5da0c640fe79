"""Numbers that clients wrote, as JSON numbers or as texts: one strict reader of each kind.

Python's own readers take more than a client can mean: "1_0", digits of other scripts, blanks. Pure.
"""

from __future__ import annotations

import re

from ...contracts.errors import InvalidRequest

MAX_CHARS = 300  # a few more digits no float could hold
_WHOLE = re.compile(r"[+-]?[0-9]{1,300}")
_REAL = re.compile(r"[+-]?([0-9]{1,300}(\.[0-9]{0,300})?|\.[0-9]{1,300})([eE][+-]?[0-9]{1,4})?")


def read_whole(name: str, value: object, allowed: str = "a whole number") -> int:
    """Raises InvalidRequest. 2.0 is whole."""
    if isinstance(value, str) and len(value) <= MAX_CHARS and _WHOLE.fullmatch(value):
        return int(value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(name, value, allowed)
    return value


def read_real(name: str, value: object, allowed: str = "a number") -> float:
    """Raises InvalidRequest for what is no number; NaN is one to JSON, and refused where its range is checked."""
    if isinstance(value, str) and len(value) <= MAX_CHARS and _REAL.fullmatch(value):
        return float(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidRequest(name, value, allowed)
    return float(value)
