"""What replaces Triton's own Python functions gives what they give."""

from __future__ import annotations

import importlib.util
import struct
from types import ModuleType

import numpy as np
import pytest
from tritandem.server.locate import find_install
from tritandem.triton_io.stub_2_51 import quick_tensors

TEXTS = [[b"x"], ["\u00e4 x"], [b""], [b"a\0b", b"\0"], [b"ab", "\U0001f600", b"\xff"], [7], []]


@pytest.fixture
def modules() -> tuple[ModuleType, ModuleType]:
    """Triton's, and one that was made faster."""
    path = find_install().backends / "python" / "triton_python_backend_utils.py"
    both = []
    for _ in range(2):
        spec = importlib.util.spec_from_file_location("backend_utils_for_a_test", path)
        assert spec is not None
        assert spec.loader is not None
        both.append(importlib.util.module_from_spec(spec))
        spec.loader.exec_module(both[-1])
    quick_tensors.install(both[1])
    assert both[0].serialize_byte_tensor.__code__ is not both[1].serialize_byte_tensor.__code__
    return both[0], both[1]


def test_every_dtype_is_triton_s(modules) -> None:
    slow, quick = modules
    for dtype in ("?", "u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f2", "f4", "f8", "O", "S3", "U2", ">i4", "c8"):
        assert quick.numpy_to_triton_type(np.dtype(dtype)) == slow.numpy_to_triton_type(np.dtype(dtype)), dtype
    assert quick.numpy_to_triton_type(np.int32) == slow.numpy_to_triton_type(np.int32)


@pytest.mark.parametrize("texts", TEXTS)
def test_every_text_is_written_as_triton_writes_it(modules, texts) -> None:
    slow, quick = modules
    array = np.array(texts, dtype=np.object_)
    shapes = [array, array.reshape(1, -1), np.asfortranarray(np.array([texts, texts], dtype=np.object_))]
    for shaped in shapes:
        assert quick.serialize_byte_tensor(shaped) == slow.serialize_byte_tensor(shaped)
        encoded = np.frombuffer(slow.serialize_byte_tensor(shaped) or b"", np.uint8)
        read = quick.deserialize_bytes_tensor(encoded)
        assert read.dtype == object
        assert read.tolist() == slow.deserialize_bytes_tensor(encoded).tolist()
    fixed = np.array([b"abc", b"d"], dtype=np.bytes_)
    assert quick.serialize_byte_tensor(fixed) == slow.serialize_byte_tensor(fixed)
    assert quick.serialize_byte_tensor(np.array([1])) is slow.serialize_byte_tensor(np.array([1])) is None


@pytest.mark.parametrize("cut", [1, 4, 6])
def test_what_is_cut_short_is_refused_as_triton_refuses_it(modules, cut) -> None:
    cut_short = np.frombuffer(b"\3\0\0\0abc\3\0\0\0abc"[: 7 + cut], np.uint8)
    for module in modules:
        with pytest.raises(struct.error):
            module.deserialize_bytes_tensor(cut_short)
