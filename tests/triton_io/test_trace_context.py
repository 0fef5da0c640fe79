"""A request joins the trace that it names, else the one that Triton has it in; a malformed name is refused."""

from __future__ import annotations

import json

import pytest
from tritandem.contracts.errors import InvalidRequest
from tritandem.triton_io.request.trace_context import check_trace_parent, read_trace_parent

from tests.fakes.triton_python_backend_utils import InferenceRequest, InferenceTrace

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
OURS, TRITONS = f"00-{TRACE}-{SPAN}-01", f"00-{TRACE[::-1]}-{SPAN}-00"


def traced(context: str | None) -> InferenceRequest:
    return InferenceRequest(trace=InferenceTrace(context))


def test_a_request_outside_any_trace_has_no_parent() -> None:
    assert read_trace_parent(traced(None), {}) == ""


def test_tritons_own_context_is_taken_when_the_client_names_none() -> None:
    context = json.dumps({"traceparent": TRITONS, "tracestate": "vendor=1"})
    assert read_trace_parent(traced(context), {}) == TRITONS
    assert read_trace_parent(traced(context), {"traceparent": OURS}) == OURS


@pytest.mark.parametrize("context", ["", "{}", "[]", "no json", '{"traceparent": "00-1-2-3"}'])
def test_what_triton_says_otherwise_is_no_reason_to_refuse(context: str) -> None:
    assert read_trace_parent(traced(context), {}) == ""


def test_fields_of_later_versions_are_let_through() -> None:
    assert check_trace_parent(f"01-{TRACE}-{SPAN}-01-more")


@pytest.mark.parametrize(
    "value",
    [
        "",
        "abc",
        OURS.upper(),
        OURS + "-more",
        OURS[:-1],
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"01-{TRACE}-{SPAN}-01-" + "x" * 300,
        1,
        None,
    ],
)
def test_a_malformed_parameter_is_refused_by_name(value: object) -> None:
    with pytest.raises(InvalidRequest, match="traceparent") as refused:
        read_trace_parent(traced(None), {"traceparent": value})
    assert "W3C trace context" in str(refused.value)
