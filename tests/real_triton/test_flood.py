"""A flood of one tenant: each of its requests ends once, and everybody else gets an answer."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from tritandem.server import TritonServer

from tests.real_triton.flood import COMPLETED, STREAMS, Flood, Honest
from tests.real_triton.started import demo_model, start_server
from tests.soak.tiny_model import write_tiny_model

pytestmark = pytest.mark.triton

PLACES = 200
REQUESTS = 2_000
SATURATED = re.compile(r"REJECTED_SATURATED: .* are waiting.*; retry after [\d.]+ s")


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """A server with few waiting places, and a model that costs next to nothing."""
    folder = tmp_path_factory.mktemp("narrow")
    settings = folder / "tritandem.toml"
    settings.write_text(f"[engine]\nrandom_weights = true\n[scheduler]\nmax_queued_requests = {PLACES}\n")
    with start_server(write_tiny_model(demo_model(), folder / "tiny"), engine_config=settings) as running:
        yield running


def test_a_flood_is_refused_request_by_request_and_others_are_answered(narrow: TritonServer) -> None:
    with Honest(narrow.grpc_url) as honest, Flood(narrow.grpc_url, REQUESTS, 8) as flood:
        pass
    assert len(flood.sent_s) == REQUESTS // STREAMS * STREAMS
    assert flood.ends == dict.fromkeys(flood.sent_s, 1)
    assert set(flood.waits_s) == {COMPLETED, "REJECTED_SATURATED"}
    assert len(flood.waits_s[COMPLETED]) > PLACES  # while some are refused, others are served
    assert all(SATURATED.fullmatch(words) for words in flood.words), flood.words
    answered = {kind: len(waits) for kind, waits in honest.waits_s.items()}
    assert answered["stop"] == answered["deadline of 1 s"] == answered["first token"] > 0
    assert "refusal" not in answered  # the places that one tenant may not hold
