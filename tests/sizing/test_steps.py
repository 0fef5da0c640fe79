"""The model of steps gives back what was measured within 10 %, and says what does not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tritandem.cli.main import main
from tritandem.contracts.errors import ConfigError
from tritandem.sizing.gpu import H200, Gpu
from tritandem.sizing.steps import (
    DecoderShape,
    Layout,
    check_layout,
    decode_step,
    first_token,
    kv_tokens,
    products_s,
    sum_s,
    weight_bytes_a_gpu,
)
from tritandem_bench.shapes import SHAPES, write_shape

LLAMA_8B = DecoderShape.of(SHAPES["llama-3.1-8b"], "8B")
LLAMA_70B = DecoderShape.of(SHAPES["llama-3.1-70b"], "70B")
WITHIN = 0.1

# ms, on an H200. Decode steps: full ones, at 512 to 640 tokens of context (docs/benchmarks/engine.md).
DECODE_MS = {1: 4.07, 8: 4.46, 32: 5.10, 64: 5.73, 128: 7.35, 256: 11.48}
PROMPT_MS = {326: 10.5, 1000: 25.8}  # one captured pass, from launch to the token on the host
# The four products of 32 layers, in a graph, weights not in L2: (ranks whose width it is, bytes of a weight), by rows.
PRODUCTS_MS = {
    (1, 2): {1: 3.75, 64: 4.01, 256: 5.73, 2048: 42.1},
    (1, 1): {1: 2.08, 64: 2.26, 256: 3.38, 2048: 23.1},
    (2, 2): {1: 2.15, 64: 2.21, 256: 3.03},
}
SUMS_US = {1: 6.1, 8: 7.0, 64: 7.5, 256: 12.8, 2048: 57.5}  # two H200, 4,096 wide, the best of symmetric memory


@pytest.mark.parametrize(("rows", "ms"), DECODE_MS.items())
def test_decode_steps_come_out_as_measured(rows: int, ms: float) -> None:
    assert decode_step(LLAMA_8B, Layout(H200), rows, 576).total * 1e3 == pytest.approx(ms, rel=WITHIN)


@pytest.mark.parametrize(("tokens", "ms"), PROMPT_MS.items())
def test_prompts_come_out_as_measured(tokens: int, ms: float) -> None:
    assert first_token(LLAMA_8B, Layout(H200), tokens).total * 1e3 == pytest.approx(ms, rel=WITHIN)


@pytest.mark.parametrize(
    ("ranks", "weight_bytes", "rows", "ms"),
    [(*kind, rows, ms) for kind, measured in PRODUCTS_MS.items() for rows, ms in measured.items()],
)
def test_products_of_whole_and_half_width_come_out_as_measured(
    ranks: int, weight_bytes: int, rows: int, ms: float
) -> None:
    layer = products_s(H200, LLAMA_8B.layer_parameters / ranks, rows, 4, weight_bytes)
    assert 32 * layer * 1e3 == pytest.approx(ms, rel=WITHIN)


@pytest.mark.parametrize(("rows", "us"), SUMS_US.items())
def test_sums_over_two_come_out_as_measured(rows: int, us: float) -> None:
    assert sum_s(H200, 2, rows * 4096 * 2) * 1e6 == pytest.approx(us, rel=WITHIN)


def test_every_constant_says_how_it_was_measured() -> None:
    constants = [getattr(H200, name) for name in Gpu.__slots__ if name != "name"]
    assert all(constant.value > 0 and len(constant.measured) > 20 for constant in constants)


@given(st.integers(1, 512), st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2]))
def test_more_rows_take_longer_and_parts_add_up(rows: int, ranks: int, weight_bytes: int) -> None:
    layout = Layout(H200, ranks, 1, weight_bytes)
    less, more = (decode_step(LLAMA_70B, layout, count, 2000) for count in (rows, rows + 1))
    assert more.total >= less.total
    assert 0 < less.utilisation <= 1
    assert less.total == pytest.approx(less.products + less.attention + less.rowwise + less.sums + less.idle)


def test_the_published_target_is_met_by_eight_gpus_and_not_by_four() -> None:
    """70B, 16,000 tokens, 800 ms: four GPUs do not have the arithmetic for it, in bfloat16 nor in FP8."""
    first = {
        (ranks, stages, size): first_token(LLAMA_70B, Layout(H200, ranks, stages, size), 16_000)
        for ranks, stages in ((4, 1), (4, 2))
        for size in (1, 2)
    }
    assert first[4, 1, 2].products > 0.8
    assert first[4, 1, 1].total > 0.8
    assert first[4, 2, 2].total < 0.8
    assert first[4, 1, 2].utilisation > 0.95
    assert first[4, 2, 2].utilisation < 0.95  # a lone prompt leaves the stages bubbles


def test_kv_heads_that_are_fewer_than_ranks_are_held_several_times() -> None:
    sixteen, eight, one = (LLAMA_8B.kv_bytes(Layout(H200, ranks)) for ranks in (16, 8, 1))
    assert sixteen == eight == one // 8


def test_a_model_that_does_not_fit_has_no_room_for_keys_and_values() -> None:
    huge = DecoderShape(126, 16_384, 53_248, 128, 8, 128, 128_256)
    assert kv_tokens(huge, Layout(H200, 4)) == 0
    assert kv_tokens(huge, Layout(H200, 8)) > 100_000


@pytest.mark.parametrize(("layout", "named"), [((3, 1), "--ranks: given 3"), ((1, 3), "--stages: given 3")])
def test_ranks_and_stages_that_do_not_divide_the_model_are_refused(layout: tuple[int, int], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        check_layout(LLAMA_70B, Layout(H200, *layout))


def test_smaller_values_leave_room_and_time() -> None:
    whole, smaller = Layout(H200), Layout(H200, kv_value_bytes=1)
    assert kv_tokens(LLAMA_8B, smaller) == pytest.approx(2 * kv_tokens(LLAMA_8B, whole), rel=1e-5)
    step, faster = (decode_step(LLAMA_8B, layout, 256, 1500) for layout in (whole, smaller))
    assert faster.attention < 0.6 * step.attention
    assert faster.products == step.products
    four = Layout(H200, weight_bytes=4.25 / 8)
    assert weight_bytes_a_gpu(LLAMA_8B, four) < 0.4 * weight_bytes_a_gpu(LLAMA_8B, whole)
    assert decode_step(LLAMA_8B, four, 1, 500).products < 0.45 * decode_step(LLAMA_8B, whole, 1, 500).products


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"hidden_size": 0}, "hidden_size: given 0"),
        ({"num_experts": 8}, "mixture"),
        ({"vocab_size": "x"}, "vocab_size"),
    ],
)
def test_a_shape_that_is_not_stated_is_refused_by_name(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        DecoderShape.of({**SHAPES["llama-3.1-8b"], **change}, "config.json")


def test_the_command_tells_a_person_and_a_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(write_shape("llama-3.1-70b", tmp_path))
    words = ["size", "--gpus", "8", "--input-tokens", "16000", "--model", model, "--ranks", "4", "--stages", "2"]
    assert main([*words, "--json", "--weights", "int4", "--kv-dtype", "fp8_e4m3"]) == 0
    smaller = json.loads(capsys.readouterr().out)["steps"]
    assert main([*words, "--json"]) == 0
    steps = json.loads(capsys.readouterr().out)["steps"]
    assert smaller["kv_tokens"] > 2 * steps["kv_tokens"]
    assert steps["engines"] == 1
    assert steps["first_token"]["ms"] == pytest.approx(1e3 * first_token(LLAMA_70B, Layout(H200, 4, 2), 16_000).total)
    assert main(words) == 0
    told = capsys.readouterr().out
    assert "first token of a lone prompt: " in told
    assert "decode, 256 rows: " in told
    assert main([*words[:2], "6", *words[3:]]) != 0
    assert "--gpus: given 6" in capsys.readouterr().err
