"""The public tensors: names, wire types, and their bytes in both directions.

Owns the table of inputs and the binary layout of the KServe v2 protocol. Knows nothing about transports
or meaning. Pure functions.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

from tritandem_client.errors import InvalidRequest

INPUT_TYPES: dict[str, str] = {
    "text_input": "BYTES",
    "input_ids": "INT32",
    "max_tokens": "INT32",
    "min_tokens": "INT32",
    "temperature": "FP32",
    "top_k": "INT32",
    "top_p": "FP32",
    "min_p": "FP32",
    "repetition_penalty": "FP32",
    "presence_penalty": "FP32",
    "frequency_penalty": "FP32",
    "seed": "UINT64",
    "stop_words": "BYTES",
    "bad_words": "BYTES",
    "logit_bias": "BYTES",
    "allowed_token_ids": "INT32",
    "end_id": "INT32",
    "n": "INT32",
    "sampling_parameters": "BYTES",
    "stream": "BOOL",
    "stop": "BOOL",
    "exclude_input_in_output": "BOOL",
    "return_finish_reason": "BOOL",
    "return_stop_reason": "BOOL",
    "return_num_input_tokens": "BOOL",
    "return_num_output_tokens": "BOOL",
    "return_cumulative_logprob": "BOOL",
    "return_logprobs": "BOOL",
    "return_prompt_logprobs": "BOOL",
    "return_seed": "BOOL",
}

# struct's letter of each fixed-size type, little-endian.
_LETTERS: dict[str, str] = {
    "BOOL": "?",
    "INT8": "b",
    "INT16": "h",
    "INT32": "i",
    "INT64": "q",
    "UINT8": "B",
    "UINT16": "H",
    "UINT32": "I",
    "UINT64": "Q",
    "FP16": "e",
    "FP32": "f",
    "FP64": "d",
}
_FP32_MAX = 3.4028234663852886e38
_INTEGER_RANGES = {"INT32": (-(2**31), 2**31 - 1), "UINT64": (0, 2**64 - 1)}


@dataclass(frozen=True, slots=True)
class InputTensor:
    """One tensor of shape [1, len(values)]; values are plain Python objects checked against the type."""

    name: str
    datatype: str
    values: tuple[Any, ...]

    @property
    def shape(self) -> tuple[int, int]:
        return 1, len(self.values)


def input_tensor(name: str, value: Any) -> InputTensor:
    """One value, or a sequence of them, as a [1, n] tensor. Raises InvalidRequest when the wire type cannot hold it."""
    datatype = INPUT_TYPES[name]
    if hasattr(value, "tolist"):  # a numpy array of any shape, a torch tensor
        value = value.reshape(-1).tolist()
    values = tuple(value) if isinstance(value, (list, tuple, range)) else (value,)
    if not values:
        raise InvalidRequest(name, value, "at least one value")
    return InputTensor(name, datatype, tuple(_checked(name, datatype, v) for v in values))


def encode(tensor: InputTensor) -> bytes:
    """The raw little-endian contents; BYTES elements are preceded by their length as uint32."""
    if tensor.datatype != "BYTES":
        return struct.pack(f"<{len(tensor.values)}{_LETTERS[tensor.datatype]}", *tensor.values)
    parts: list[bytes] = []
    for text in tensor.values:
        data = text.encode()
        parts += (len(data).to_bytes(4, "little"), data)
    return b"".join(parts)


def decode(datatype: str, raw: bytes) -> list[Any]:
    """The elements of a raw tensor in order, as Python objects; BYTES as text (bad UTF-8 is replaced, never raised)."""
    if datatype != "BYTES":
        letter = _LETTERS[datatype]
        return list(struct.unpack(f"<{len(raw) // struct.calcsize(letter)}{letter}", raw))
    texts: list[str] = []
    at = 0
    while at < len(raw):
        end = at + 4 + int.from_bytes(raw[at : at + 4], "little")
        texts.append(raw[at + 4 : end].decode(errors="replace"))
        at = end
    return texts


def _checked(name: str, datatype: str, value: object) -> Any:
    if hasattr(value, "item"):  # a numpy scalar
        value = value.item()
    if datatype == "BYTES":
        if not isinstance(value, str):
            raise InvalidRequest(name, value, "text")
        try:
            value.encode()
        except UnicodeEncodeError:
            raise InvalidRequest(name, value, "text without lone surrogates") from None
        return value
    if datatype == "BOOL":
        if not isinstance(value, bool):
            raise InvalidRequest(name, value, "true or false")
        return value
    if datatype == "FP32":
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= _FP32_MAX:
            raise InvalidRequest(name, value, "a finite number")
        return float(value)
    low, high = _INTEGER_RANGES[datatype]
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidRequest(name, value, f"a whole number in [{low}, {high}]")
    return value
