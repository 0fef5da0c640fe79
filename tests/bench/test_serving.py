"""Two doors of one server, measured in turns: who is first, and what is told of them."""

from __future__ import annotations

from tritandem_bench.serving import GRPC, OPENAI, compared, in_turns


def test_who_was_last_is_first_in_the_next_round() -> None:
    assert list(in_turns([GRPC, OPENAI], 3)) == [GRPC, OPENAI, OPENAI, GRPC, GRPC, OPENAI]
    assert list(in_turns([GRPC], 2)) == [GRPC, GRPC]


def test_the_api_is_compared_with_grpc_by_medians_of_the_same_load() -> None:
    def row(load: str, door: str, tokens: float, ttft: float) -> dict[str, object]:
        figures = {"output_tokens_per_s": tokens, "ttft_ms_p50": ttft, "itl_chunk_ms_p99": 5.0, "pause_ms_max": 9.0}
        return {"load": load, "door": door, **figures}

    rows = [row("1 streams", GRPC, 100, 10), row("1 streams", OPENAI, 90, 12)]
    rows += [row("2 streams", GRPC, n, 10) for n in (90, 200, 1000)]
    rows += [row("2 streams", OPENAI, n, 10) for n in (1, 150, 160)]
    first, second = compared(rows)
    assert (first["load"], first["tokens_share"], first["ttft_more_ms"]) == ("1 streams", 0.9, 2)
    assert (second["load"], second["tokens_share"], second["pause_max_more_ms"]) == ("2 streams", 0.75, 0)
