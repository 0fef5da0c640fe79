"""How many cores: the published rule, the measured model, the file of costs and the command."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tritandem.cli.size import add_parser
from tritandem.contracts.errors import ConfigError
from tritandem.sizing import Coefficients, Workload, core_need, load_coefficients, rule_cores
from tritandem.sizing.coefficients import parse_coefficients
from tritandem.sizing.model import SCHEDULER_BUSY_LIMIT, tokens_per_response

COSTS = Coefficients(
    tokenizer_fast_tokens_per_core_s=10_000_000.0,
    tokenizer_slow_tokens_per_core_s=500_000.0,
    scheduler_cpu_s_per_request=0.0002,
    scheduler_cpu_s_per_response=0.00005,
    triton_cpu_s_per_response=0.0001,
    engine_host_s_per_step=0.0005,
)


def costs_document(values: Coefficients, machine: str) -> dict[str, Any]:
    """What a file of costs holds."""
    costs = {key: {"value": value, "source": "a test"} for key, value in dataclasses.asdict(values).items()}
    return {"measured_on": "2026-12-01", "machine": machine, "coefficients": costs}


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    """Exit code and standard output of the command, as the program `tritandem` would run it."""
    parser = argparse.ArgumentParser(prog="tritandem")
    add_parser(parser.add_subparsers(required=True))
    args = parser.parse_args(words)
    return args.run(args), capsys.readouterr().out


def size_json(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    code, out = run(capsys, "size", *words, "--json")
    assert code == 0
    document: dict[str, Any] = json.loads(out)
    return document


@pytest.mark.parametrize(
    ("gpus", "input_tokens", "cores"),
    [(4, 8192, 20), (8, 131072, 72), (1, 1024, 4), (4, 1024, 8), (1, 100, 4), (2, 1500, 6), (3, 2048, 9)],
)
def test_the_rule_gives_the_published_numbers(gpus: int, input_tokens: float, cores: int) -> None:
    assert rule_cores(gpus, input_tokens) == cores


@given(st.integers(1, 512), st.floats(1, 1e7), st.floats(1, 1e4))
def test_the_rule_never_falls_with_gpus_or_length(gpus: int, tokens: float, more: float) -> None:
    assert rule_cores(gpus, tokens * more) >= rule_cores(gpus, tokens)
    if tokens >= 256:  # below, the formula is negative for each GPU and the floor of four cores holds
        assert rule_cores(gpus + 1, tokens) >= rule_cores(gpus, tokens)


def test_the_model_adds_up_what_each_component_costs() -> None:
    need = core_need(Workload(gpus=1, input_tokens=1000, output_tokens=100, requests_per_s=50), COSTS)
    assert need.tokenizer == pytest.approx(50 * 1000 / 10_000_000)
    assert need.scheduler == pytest.approx(50 * 0.0002 + 5000 * 0.00005)
    assert need.triton == pytest.approx(5000 * 0.0001)
    assert need.tokens_per_response == 1
    assert need.cores == 1 + 2  # one of the engine's own; 0.765 busy cores at 70 % are two more
    assert need.limits == ()


def test_without_the_fast_tokenizer_long_prompts_need_more_cores() -> None:
    long = Workload(gpus=1, input_tokens=100_000, output_tokens=10, requests_per_s=20)
    slow = core_need(dataclasses.replace(long, fast_tokenizer=False), COSTS)
    assert slow.cores - core_need(long, COSTS).cores >= 5
    not_installed = dataclasses.replace(COSTS, tokenizer_fast_tokens_per_core_s=0.0)
    assert core_need(long, not_installed) == slow


def test_more_tokens_than_the_scheduler_can_send_singly_travel_together() -> None:
    need = core_need(Workload(gpus=4, input_tokens=100, output_tokens=200, requests_per_s=200), COSTS)
    assert need.tokens_per_response > 1
    assert need.scheduler == pytest.approx(SCHEDULER_BUSY_LIMIT)
    assert any("a response carries" in limit for limit in need.limits)


def test_more_requests_than_one_scheduler_can_take_are_said_to_need_more_servers() -> None:
    need = core_need(Workload(gpus=8, input_tokens=10, output_tokens=10, requests_per_s=5000), COSTS)
    assert any("run more servers" in limit for limit in need.limits)


def test_an_engine_whose_host_is_slower_than_its_device_is_not_helped_by_cores() -> None:
    need = core_need(Workload(1, 100, 100, 1, decode_step_s=0.0004), COSTS)
    assert any("more cores do not help" in limit for limit in need.limits)


@given(st.floats(0.01, 2000), st.floats(1, 5000), st.floats(1.01, 10))
def test_a_higher_rate_never_needs_fewer_tokens_in_a_response(rate: float, tokens: float, more: float) -> None:
    assert tokens_per_response(rate * more, tokens, COSTS) >= tokens_per_response(rate, tokens, COSTS)


def test_the_command_prints_the_rule_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    shown = size_json(capsys, "--gpus", "4", "--input-tokens", "8192")
    assert shown["rule_cores"] == 20
    assert shown["measured"] is None
    assert size_json(capsys, "--gpus", "8", "--input-tokens", "131072")["rule_cores"] == 72


def test_the_command_reckons_with_a_rate_and_a_file_of_costs(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "costs.json"
    file.write_text(json.dumps(costs_document(COSTS, "mine")))
    words = ["--gpus", "1", "--input-tokens", "1000", "--output-tokens", "100", "--rps", "50"]
    shown = size_json(capsys, *words, "--coefficients", str(file))
    assert shown["measured"]["cores"] == 3
    assert shown["measured"]["coefficients_machine"] == "mine"


def test_for_a_person_the_same_figures_are_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    code, out = run(capsys, "size", "--gpus", "4", "--input-tokens", "8192", "--rps", "10")
    assert code == 0
    assert "published rule: 20 cores for 4 GPUs" in out
    assert "measured model: " in out
    assert load_coefficients().machine in out


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--gpus", "0", "--input-tokens", "10"), "--gpus: given '0'"),
        (("--gpus", "1.5", "--input-tokens", "10"), "--gpus: given '1.5'"),
        (("--gpus", "-1", "--input-tokens", "10"), "--gpus"),
        (("--gpus", "1", "--input-tokens", "0"), "--input-tokens: given '0'"),
        (("--gpus", "1", "--input-tokens", "nan"), "--input-tokens: given 'nan'"),
        (("--gpus", "1", "--input-tokens", "ten"), "--input-tokens: given 'ten'"),
        (("--gpus", "1", "--input-tokens", "10", "--rps", "inf"), "--rps: given 'inf'"),
        (("--gpus", "1", "--input-tokens", "10", "--output-tokens", "-3"), "--output-tokens"),
        (("--gpus", "1", "--input-tokens", "10", "--decode-step-ms", "0"), "--decode-step-ms: given '0'"),
        (("--input-tokens", "10"), "--gpus"),
    ],
)
def test_bad_arguments_are_refused_by_name(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], named: str
) -> None:
    with pytest.raises(SystemExit) as refused:
        run(capsys, "size", *words)
    assert refused.value.code == 2
    assert named in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"scheduler_cpu_s_per_response": {"value": 0}}, "scheduler_cpu_s_per_response.value: given 0"),
        ({"engine_host_s_per_step": {"value": "fast"}}, "engine_host_s_per_step.value: given 'fast'"),
        ({"engine_host_s_per_step": {"value": True}}, "engine_host_s_per_step"),
        ({"triton_cpu_s_per_response": None}, "triton_cpu_s_per_response"),
        ({"speed_of_light": {"value": 1}}, "speed_of_light: unknown key"),
    ],
)
def test_a_file_of_costs_with_a_wrong_key_is_refused_by_name(change: dict[str, Any], named: str) -> None:
    document = costs_document(COSTS, "mine")
    document["coefficients"].update(change)
    with pytest.raises(ConfigError, match=named):
        parse_coefficients(document, "costs.json")


def test_files_that_cannot_be_read_are_refused_by_name(tmp_path: Path) -> None:
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    with pytest.raises(ConfigError, match=r"absent\.json: cannot be read"):
        load_coefficients(tmp_path / "absent.json")
    with pytest.raises(ConfigError, match=r"broken\.json"):
        load_coefficients(broken)
    broken.write_text("[]")
    with pytest.raises(ConfigError, match="coefficients: missing"):
        load_coefficients(broken)


def test_the_shipped_file_is_dated_and_says_where_figures_come_from() -> None:
    costs = load_coefficients()
    assert costs.measured_on.startswith("20")
    assert all(len(source) > 10 for source in costs.sources.values())
