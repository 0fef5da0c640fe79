"""Errors as Triton responses and as words of the log: the one way in which a plug refuses.

Clients see an outcome word and a sentence, never a traceback; the traceback goes to the log. Owns the mapping from
outcome to Triton's error code.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import triton_python_backend_utils as pb_utils

from ...contracts.errors import EngineFailed, Outcome, TritandemError, told
from ...contracts.printable import MAX_TRACEBACK_CHARS, printable

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL

# `infer` over HTTP makes 400, 503, 400 and 500 of these, and gRPC its own statuses. `generate` and `generate_stream`
# answer every error with 400: Triton, 2.51 and newer, frees the error before it looks up its status. The outcome word
# in front of the message says which it is, on every way.
_CODE_OF_OUTCOME = {
    Outcome.REJECTED_INVALID: pb_utils.TritonError.INVALID_ARG,
    Outcome.REJECTED_SATURATED: pb_utils.TritonError.UNAVAILABLE,
    Outcome.CANCELLED: pb_utils.TritonError.CANCELLED,
}


def answer_each(
    requests: Sequence[Any],
    answer: Callable[[Any, Any], None],
    refuse: Callable[[Any, Any, BaseException], None] | None = None,
) -> None:
    """`answer(request, sender)` for each one. What it raises is that request's own last response, sent here or by
    `refuse(request, sender, error)`; nothing is raised, which would end the whole batch and show the server's insides.
    """
    for request in requests:
        try:
            sender = request.get_response_sender()
        except Exception as error:  # nobody to tell
            log_failure(error)
            continue
        try:
            answer(request, sender)
        except Exception as error:
            # Not in here: a local name would tie the error's traceback, and with it the request and its shared
            # memory, into a cycle.
            _refuse(refuse, request, sender, error)


def _refuse(refuse: Callable[..., None] | None, request: Any, sender: Any, error: BaseException) -> None:
    if refuse is None:
        send_error(sender, error)
        return
    try:
        refuse(request, sender, error)
    except Exception as failure:
        log_failure(failure)


def send_error(sender: Any, error: BaseException) -> None:
    """The last response, an error. Never raises."""
    try:
        response = error_response(error)
    except Exception as failure:
        log_failure(failure)
        response = pb_utils.InferenceResponse(output_tensors=[], error=pb_utils.TritonError("FAILED: internal error"))
    send_last(sender, response)


def send_last(sender: Any, response: Any) -> None:
    """Never raises: a sender that takes nothing any more has sent its last response."""
    try:
        sender.send(response, flags=FINAL)
    except Exception as failure:
        log_failure(failure)


def log_failure(error: BaseException) -> None:
    """An exception that no client sees, in full. Never raises."""
    with contextlib.suppress(Exception):
        text = "".join(traceback.format_exception(error))
        pb_utils.Logger.log_error(printable(text, MAX_TRACEBACK_CHARS, lines=True))


def public_error(error: BaseException) -> TritandemError:
    """What a client may see of an exception; an unexpected one is logged in full."""
    if isinstance(error, TritandemError):
        return error
    log_failure(error)
    return EngineFailed(f"{told(error)}; the server's log has the details")


def error_response(error: BaseException) -> Any:
    """The InferenceResponse that carries an error and no tensor."""
    public = public_error(error)
    code = _CODE_OF_OUTCOME.get(public.outcome, pb_utils.TritonError.INTERNAL)
    return pb_utils.InferenceResponse(output_tensors=[], error=pb_utils.TritonError(public.public_message(), code))
