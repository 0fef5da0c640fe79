"""Which trace a request belongs to: the W3C `traceparent` of the span above it.

A request parameter of that name says it; otherwise Triton itself does, when it runs with
`--trace-config=mode=opentelemetry` and has joined the caller's header to its own trace.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from ...contracts.errors import InvalidRequest

PARAMETER = "traceparent"
ALLOWED = "a W3C trace context: 00-<32 hex digits>-<16 hex digits>-<2 hex digits>, lower case, ids not all zero"
_FORM = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}(-.*)?", re.ASCII)
MAX_CHARS = 256


def read_trace_parent(request: Any, parameters: Mapping[str, Any]) -> str:
    """`request` is Triton's; "": the request belongs to no trace. Raises InvalidRequest for a malformed parameter."""
    if PARAMETER in parameters:
        return check_trace_parent(parameters[PARAMETER])
    return _of_triton(request)


def check_trace_parent(value: object) -> str:
    """Later versions may carry more fields behind the four that are known. Raises InvalidRequest."""
    if isinstance(value, str) and len(value) <= MAX_CHARS and (match := _FORM.fullmatch(value)):
        version, trace_id, span_id, more = match.groups()
        known = version == "00" and more is None
        if (known or version not in ("00", "ff")) and int(trace_id, 16) and int(span_id, 16):
            return value
    raise InvalidRequest(PARAMETER, value, ALLOWED)


def _of_triton(request: Any) -> str:
    """Triton hands out a JSON object, or None when it does not trace this request. Its text is not a client's: what
    cannot be read means no trace, not a refusal."""
    context = request.trace().get_context()
    if not context:
        return ""
    try:
        return check_trace_parent(json.loads(context).get(PARAMETER))
    except (ValueError, AttributeError, InvalidRequest):
        return ""
