"""Errors as Triton responses and as words of the log. Owns the mapping from outcome to Triton's status code.

Clients see an outcome word and a sentence, never a traceback; the traceback goes to the log.
"""

from __future__ import annotations

import traceback
from typing import Any

import triton_python_backend_utils as pb_utils

from ..contracts import EngineFailed, Outcome, TritandemError

# HTTP clients see 400, 503, 499 and 500 for these; an EXPIRED request is the client's own limit.
_CODE_OF_OUTCOME = {
    Outcome.REJECTED_INVALID: pb_utils.TritonError.INVALID_ARG,
    Outcome.REJECTED_SATURATED: pb_utils.TritonError.UNAVAILABLE,
    Outcome.CANCELLED: pb_utils.TritonError.CANCELLED,
}


def public_error(error: BaseException) -> TritandemError:
    """What a client may see of an exception; an unexpected one is logged in full."""
    if isinstance(error, TritandemError):
        return error
    pb_utils.Logger.log_error("".join(traceback.format_exception(error)))
    return EngineFailed(f"internal error ({type(error).__name__}); the server's log has the details")


def error_response(error: BaseException) -> Any:
    """The InferenceResponse that carries an error and no tensor."""
    public = public_error(error)
    code = _CODE_OF_OUTCOME.get(public.outcome, pb_utils.TritonError.INTERNAL)
    return pb_utils.InferenceResponse(output_tensors=[], error=pb_utils.TritonError(public.public_message(), code))
