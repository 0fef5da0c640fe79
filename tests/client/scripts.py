"""Models for the fake servers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from tests.fakes.triton_protocol import Model, Outputs, Received


def chunk(text: str, tokens: int = 1, **more: tuple[str, list[Any]]) -> Outputs:
    return {
        "text_output": ("BYTES", [text]),
        "num_input_tokens": ("UINT32", [5]),
        "num_output_tokens": ("UINT32", [tokens]),
        **more,
    }


def last(text: str = "", tokens: int = 0, reason: str = "stop", outcome: str = "COMPLETED") -> Outputs:
    return chunk(
        text,
        tokens,
        finish_reason=("BYTES", [reason]),
        outcome=("BYTES", [outcome]),
        cached_tokens=("UINT32", [3]),
        stamps=("INT64", [10, 20, 30, 40, 50, 60, 70, 80, 90]),
    )


def saying(*said: Outputs | Exception | None) -> Model:
    """The same responses to everybody, and a plain end to a stop."""

    def model(request: Received) -> Iterator[Outputs | Exception | None]:
        if request.is_stop:
            yield last()
            return
        yield from said

    return model


def streaming(pieces: Sequence[str] = ("Par", "is", ".")) -> Model:
    """The pieces as a stream, or in one response when the request does not stream."""

    def model(request: Received) -> Iterator[Outputs | Exception | None]:
        if request.is_stop or "stream" not in request.inputs:
            yield last("".join(pieces), len(pieces))
            return
        yield from (chunk(piece) for piece in pieces)
        yield last()

    return model


def hanging(*first: Outputs, until_s: float = 20.0) -> Model:
    """Some chunks, then nothing until the client has gone. A stop is answered at once."""

    def model(request: Received) -> Iterator[Outputs | Exception | None]:
        if request.is_stop:
            yield last()
            return
        yield from first
        assert request.gone.wait(until_s), "nobody cancelled"

    return model
