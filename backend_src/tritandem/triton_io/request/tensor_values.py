"""One numpy array of a request -> one checked Python value. Every complaint names the tensor.

Pure: knows the schema, not Triton and not what the values mean. BYTES elements may arrive as bytes or str.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...contracts.arrays import Int32Array
from ...contracts.errors import InvalidRequest
from .schema import INPUT_OF_NAME, PublicTensor

Array = NDArray[Any]

_NUMPY_OF_DTYPE: dict[str, type[Any]] = {
    "BOOL": np.bool_,
    "UINT8": np.uint8,
    "FP16": np.float16,
    "INT32": np.int32,
    "INT64": np.int64,
    "UINT32": np.uint32,
    "UINT64": np.uint64,
    "FP32": np.float32,
}


def check(tensor: PublicTensor, array: Array) -> Array:
    """The array without its batch dimension. Raises InvalidRequest for a wrong dtype or shape."""
    if not _fits(tensor.dtype, array):
        raise InvalidRequest(tensor.name, f"dtype {array.dtype}", tensor.dtype)
    expected = (1, *tensor.dims)
    same_rank = array.ndim == len(expected)
    if not same_rank or any(want not in (-1, have) for want, have in zip(expected, array.shape, strict=True)):
        shape = ", ".join("n" if d == -1 else str(d) for d in expected)
        raise InvalidRequest(tensor.name, f"shape {list(array.shape)}", f"shape [{shape}], batch size 1")
    flat: Array = array.reshape(-1)
    return flat


def _fits(dtype: str, array: Array) -> bool:
    if dtype == "BYTES":
        return array.dtype.kind in "OSU"
    return bool(array.dtype == _NUMPY_OF_DTYPE[dtype])


def text_of(name: str, element: object) -> str:
    """A BYTES element as text. Raises InvalidRequest for invalid UTF-8."""
    if isinstance(element, str):
        return element
    if not isinstance(element, bytes):
        raise InvalidRequest(name, type(element).__name__, "BYTES")
    try:
        return element.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequest(name, f"invalid UTF-8 at byte {error.start}", "valid UTF-8") from error


class Inputs(Mapping[str, Array]):
    """The tensors of one request by name; a name outside the schema is refused here."""

    def __init__(self, arrays: Mapping[str, Array]) -> None:
        """Raises InvalidRequest for a name that the schema does not have."""
        for name in arrays:
            if name not in INPUT_OF_NAME:
                raise InvalidRequest(name, "an unknown input", "the documented inputs")
        self._arrays = arrays

    def __getitem__(self, name: str) -> Array:
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def is_empty(self, name: str) -> bool:
        """Whether a tensor holds nothing: no element, or empty texts alone."""
        array = self._arrays[name]
        return array.dtype.kind in "OSU" and not any(array.flat) if array.size else True

    def flat(self, name: str) -> Array | None:
        """The checked values of a tensor, None when it was not sent. Raises InvalidRequest."""
        array = self._arrays.get(name)
        return None if array is None else check(INPUT_OF_NAME[name], array)

    def text(self, name: str) -> str | None:
        flat = self.flat(name)
        return None if flat is None else text_of(name, flat[0])

    def words(self, name: str) -> tuple[str, ...] | None:
        """The non-empty elements of a BYTES tensor."""
        flat = self.flat(name)
        return None if flat is None else tuple(word for word in (text_of(name, e) for e in flat) if word)

    def flag(self, name: str) -> bool | None:
        flat = self.flat(name)
        return None if flat is None else bool(flat[0])

    def number(self, name: str) -> int | float | None:
        """A Python int or float, whichever the dtype is; of a float32 the shortest decimal that it means: who sends
        0.01 means 0.01, which float32 does not have."""
        flat = self.flat(name)
        if flat is None:
            return None
        value: int | float = float(str(flat[0])) if flat.dtype == np.float32 else flat[0].item()
        return value

    def ids(self, name: str) -> Int32Array | None:
        """A private copy: the request's own memory goes back to Triton."""
        flat = self.flat(name)
        return None if flat is None else np.array(flat, dtype=np.int32)
