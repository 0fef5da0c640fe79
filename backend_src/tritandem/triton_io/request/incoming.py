"""What Triton hands a plug of one request, as Python sees it. Every complaint names the part that is wrong.

Triton passes texts on as bytes without looking at them; its Python module makes `str` of them when they are asked for,
and raises where they are none. Knows nothing about what the parts mean.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...contracts.errors import InvalidRequest

MAX_ID_CHARS = 256


def read_id(request: Any) -> str:
    """The id that the protocol carries; "": none. Raises InvalidRequest."""
    return check_id("request_id", _text("request_id", request.request_id))


def check_id(name: str, value: object) -> str:
    """Ids are remembered and logged. Raises InvalidRequest."""
    if not isinstance(value, str) or len(value) > MAX_ID_CHARS:
        raise InvalidRequest(name, value, f"a text of at most {MAX_ID_CHARS} characters")
    return value


def read_parameters_text(request: Any) -> str:
    """Triton's JSON of the custom parameters. Raises InvalidRequest."""
    return _text("parameters", request.parameters)


def read_arrays(request: Any) -> dict[str, Any]:
    """By tensor name; the memory is Triton's. Raises InvalidRequest."""
    arrays = {}
    for tensor in request.inputs():
        name = tensor.name()
        try:
            arrays[name] = tensor.as_numpy()
        except Exception as error:
            raise InvalidRequest(
                name, f"bytes that are no valid tensor ({type(error).__name__})", "a tensor"
            ) from error
    return arrays


def _text(name: str, read: Callable[[], str]) -> str:
    try:
        return read()
    except UnicodeDecodeError as error:
        raise InvalidRequest(name, f"invalid UTF-8 at byte {error.start}", "valid UTF-8") from error
