"""Tensors, error texts, addresses and event streams, without a server."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tritandem_client
from hypothesis import given, settings
from hypothesis import strategies as st
from tritandem.triton_io.request import schema
from tritandem_client import Client, InvalidRequest, Saturated, ServerNotReady
from tritandem_client.errors import error_from_server
from tritandem_client.tensors import INPUT_TYPES, decode, encode, input_tensor
from tritandem_client.transports import parse_url
from tritandem_client.transports.http_wire import EventDecoder

from tests.fakes.triton_protocol import PARAMETERS

NUMPY_TYPES = {"INT32": np.int32, "UINT32": np.uint32, "INT64": np.int64, "UINT64": np.uint64, "FP32": np.float32}


@settings(max_examples=40, deadline=None)
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"])), min_size=1))
def test_texts_survive_the_wire(texts: list[str]) -> None:
    assert decode("BYTES", encode(input_tensor("stop_words", texts))) == texts


@pytest.mark.parametrize("datatype", NUMPY_TYPES)
def test_numbers_are_laid_out_as_numpy_does(datatype: str) -> None:
    values = np.array([0, 1, 100], dtype=NUMPY_TYPES[datatype])
    assert decode(datatype, values.tobytes()) == values.tolist()


@pytest.mark.parametrize(
    "ids",
    [[3, 1, 2], (3, 1, 2), np.array([3, 1, 2]), np.array([[3, 1, 2]], np.int64), [np.int32(3), 1, 2]],
    ids=["list", "tuple", "array", "batch of one", "numpy scalars"],
)
def test_token_ids_may_come_in_any_container(ids: object) -> None:
    tensor = input_tensor("input_ids", ids)
    assert tensor.shape == (1, 3)
    assert encode(tensor) == np.array([3, 1, 2], np.int32).tobytes()


def test_broken_utf8_from_a_server_is_shown_not_raised() -> None:
    assert decode("BYTES", b"\x02\x00\x00\x00a\xff") == ["a\ufffd"]


def test_a_prefix_of_tritons_own_does_not_hide_the_outcome() -> None:
    text = "in ensemble 'ensemble', REJECTED_SATURATED: 64 waiting; retry after 1.5 s"
    error = error_from_server(text)
    assert isinstance(error, Saturated)
    assert (str(error), error.retry_after_s) == ("64 waiting; retry after 1.5 s", 1.5)


def test_an_invalid_field_is_taken_apart() -> None:
    error = error_from_server("REJECTED_INVALID: stop_words: given 'a: b, c', allowed: at most 64: short ones")
    assert isinstance(error, InvalidRequest)
    assert (error.field, error.given, error.allowed) == ("stop_words", "'a: b, c'", "at most 64: short ones")


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("Request for unknown model: 'x' is not found", ServerNotReady),
        ("Request for unknown model: 'x' has no available versions", ServerNotReady),
        ("unexpected inference input 'min_p' for model 'vllm'", InvalidRequest),
        ("[request id: r1] Exceeds maximum queue size", tritandem_client.Saturated),
        ("something else", tritandem_client.Failed),
        ("the word FAILED alone is no outcome", tritandem_client.Failed),
    ],
)
def test_tritons_own_sentences_are_sorted(text: str, kind: type[Exception]) -> None:
    assert type(error_from_server(text)) is kind
    assert str(error_from_server(text)) == text


@pytest.mark.parametrize(
    ("url", "protocol", "expected"),
    [
        (None, None, ("grpc", "127.0.0.1:8001", False)),
        (None, "http", ("http", "127.0.0.1:8000", False)),
        ("triton", None, ("grpc", "triton:8001", False)),
        ("triton:9", "http", ("http", "triton:9", False)),
        ("https://triton/", None, ("http", "triton:8000", True)),
        ("grpcs://triton:443", "grpc", ("grpc", "triton:443", True)),
        ("[::1]", None, ("grpc", "[::1]:8001", False)),
        ("[::1]:7", None, ("grpc", "[::1]:7", False)),
    ],
)
def test_addresses_are_read_as_written(url: str | None, protocol: object, expected: object) -> None:
    assert parse_url(url, protocol) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(("url", "protocol"), [("ftp://x", None), ("http://x", "grpc"), ("x", "smtp")])
def test_a_wrong_address_is_refused_at_once(url: str, protocol: object) -> None:
    with pytest.raises(ValueError):
        Client(url, protocol=protocol)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.dictionaries(st.text(), st.text()), max_size=5),
    st.lists(st.integers(1, 40), min_size=1, max_size=40),
)
def test_events_do_not_depend_on_how_their_bytes_are_cut(events: list[dict[str, str]], sizes: list[int]) -> None:
    data = b"".join(b"data: " + json.dumps(e, ensure_ascii=False).encode() + b"\n\n" for e in events)
    decoder, seen = EventDecoder(), []
    at = i = 0
    while at < len(data):
        size = sizes[i % len(sizes)]
        seen += decoder.feed(data[at : at + size])
        at, i = at + size, i + 1
    assert seen == events


def test_what_the_client_can_send_is_what_the_server_takes() -> None:
    """The fake servers take what the real one does; the client's table is one of its own."""
    real = {tensor.name: tensor.dtype for tensor in schema.INPUTS}
    assert {name: real.get(name) for name in INPUT_TYPES} == INPUT_TYPES
    assert {*PARAMETERS, "request_id", "id"} == set(schema.PARAMETERS), "ids are read apart from the others"


def test_importing_the_package_loads_no_heavy_library() -> None:
    code = "import sys, tritandem_client; print(*sorted({m.split('.')[0] for m in sys.modules}))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"numpy", "grpc", "tritonclient", "httpx", "torch", "transformers", "tritandem"} & set(loaded)


def test_the_package_never_imports_the_server() -> None:
    for path in Path(tritandem_client.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {"tritandem", "torch", "transformers"} & {name.split(".")[0] for name in names}, path
