"""What a client of another server would send: tritonclient's streams with hand-made tensors."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient
from tritandem.config import INNER_KEY_ENV
from tritandem.contracts.stream import LoadSnapshot
from tritandem.triton_io.hops import engine_wire
from tritandem.triton_io.hops.inner_key import InnerKey
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

TIMEOUT_S = 180.0
KEY_NAME = INNER_KEY_ENV.encode()


def tensor(name: str, array: Any) -> grpcclient.InferInput:
    made = grpcclient.InferInput(name, array.shape, np_to_triton_dtype(array.dtype))
    made.set_data_from_numpy(array)
    return made


def text(*words: str | bytes) -> Any:
    """BYTES [1, n]"""
    return np.array([[word.encode() if isinstance(word, str) else word for word in words]], dtype=np.object_)


def number(value: Any, dtype: Any) -> Any:
    """[1, 1]"""
    return np.array([[value]], dtype=dtype)


class RawStream:
    """The responses of one request, in order; closing it cancels."""

    def __init__(
        self,
        url: str,
        model: str,
        arrays: dict[str, Any],
        request_id: str = "",
        parameters: dict[str, Any] | None = None,
        outputs: list[str] | None = None,
    ) -> None:
        self._client = grpcclient.InferenceServerClient(url)
        self._responses: queue.Queue[Any] = queue.Queue()
        self._client.start_stream(lambda result, error: self._responses.put(error or result))
        self._client.async_stream_infer(
            model,
            [tensor(name, array) for name, array in arrays.items()],
            request_id=request_id,
            parameters=parameters,
            outputs=[grpcclient.InferRequestedOutput(name) for name in outputs] if outputs else None,
            enable_empty_final_response=True,
        )

    def __iter__(self) -> Iterator[Any]:
        """Results until the final one. Raises InferenceServerException for an error response."""
        while True:
            result = self._responses.get(timeout=TIMEOUT_S)
            if isinstance(result, Exception):
                raise result
            response = result.get_response()
            if response.outputs:
                yield result
            if response.parameters["triton_final_response"].bool_param:
                return

    def close(self, cancel: bool = False) -> None:
        self._client.stop_stream(cancel_requests=cancel)
        self._client.close()


class RawClient:
    """Fresh connections per request, as independent clients have them. `server_pid`: for what needs the server's own
    key, which a client has not."""

    def __init__(self, url: str, server_pid: int = 0) -> None:
        self.url, self._server_pid = url, server_pid

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def stream(self, model: str, arrays: dict[str, Any], **options: Any) -> RawStream:
        return RawStream(self.url, model, arrays, **options)

    def results(self, model: str, arrays: dict[str, Any], **options: Any) -> list[Any]:
        stream = self.stream(model, arrays, **options)
        try:
            return list(stream)
        finally:
            stream.close(cancel=True)  # a stream that is not over would be waited for

    def answer(self, model: str, arrays: dict[str, Any], **options: Any) -> str:
        """The texts of all responses, joined, read as the samples of other backends read them."""
        results = self.results(model, arrays, **options)
        return "".join(result.as_numpy("text_output")[0].decode() for result in results)

    def error(self, model: str, arrays: dict[str, Any], **options: Any) -> str:
        """The message of the one error response."""
        try:
            results = self.results(model, arrays, **options)
        except InferenceServerException as error:
            return error.message() or ""
        raise AssertionError(f"answered instead of refused: {[r.as_numpy('text_output') for r in results]}")

    def engine_load(self) -> LoadSnapshot:
        variables = Path(f"/proc/{self._server_pid}/environ").read_bytes().split(b"\0")
        [secret] = [value for name, _, value in (one.partition(b"=") for one in variables) if name == KEY_NAME]
        call = InnerKey(secret).lock(engine_wire.pack_call(engine_wire.Op.LOAD))
        [result] = self.results("engine", {"header": call})
        return engine_wire.unpack_load(result.as_numpy("header"))


def in_background(work: Any, *arguments: Any) -> tuple[threading.Thread, list[Any]]:
    """Run `work` on a thread; its result, or the exception it raised, is put into the list."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(work(*arguments))
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, outcome
