"""The measurements behind `tritandem calibrate`, kept short: that they measure, not how fast this machine is."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tritandem.config import TokenizerConfig
from tritandem.contracts.arrays import Int32Array
from tritandem.contracts.errors import ConfigError
from tritandem.sizing import load_coefficients
from tritandem.sizing.calibrate import MEASURED, encode_rate, machine_name, prompt_text
from tritandem.sizing.command import add_command
from tritandem.sizing.engine_cost import engine_cost
from tritandem.sizing.scheduler_cost import LONG_TOKENS, STREAMS, Deliveries, run, scheduler_cost, solve
from tritandem.tokenizer import load_tokenizer

SHORT_S = 0.05


class LetterStep(NamedTuple):
    text: str
    stopped: bool
    tokens_used: int


class LetterText:
    """Every token is one letter."""

    def open(self, prompt_ids: Int32Array, stop_words: tuple[str, ...]) -> None:
        return None

    def push(self, states: list[Any], tokens: Int32Array, counts: Int32Array) -> list[LetterStep]:
        return [LetterStep("x" * count, False, count) for count in counts.tolist()]

    def flush(self, state: Any) -> str:
        return ""


def calibrate(*words: str) -> int:
    parser = argparse.ArgumentParser(prog="tritandem")
    add_command(parser.add_subparsers(required=True))
    args = parser.parse_args(["calibrate", *words])
    code: int = args.run(args)
    return code


def test_two_runs_give_both_costs_of_the_scheduler() -> None:
    per_request, per_response = 0.0003, 0.00007
    runs = [(n, n * k, n * per_request + n * k * per_response) for n, k in ((500, 1), (40, 64))]
    assert solve(runs[0], runs[1]) == pytest.approx((per_request, per_response))


def test_noise_never_makes_a_cost_negative() -> None:
    assert solve((100, 100, 0.001), (10, 640, 0.5)) == (0.0, pytest.approx(0.501 / 740))
    assert solve((100, 100, 1.0), (100, 6400, 0.5))[1] == 0.0


def test_every_token_of_the_scheduler_run_is_a_response_of_its_own() -> None:
    requests, responses, cpu_s = run(LetterText(), 5000, LONG_TOKENS, SHORT_S)
    assert requests % STREAMS == 0
    assert responses == requests * LONG_TOKENS
    assert cpu_s > 0


def test_the_scheduler_and_the_engine_cost_something_and_not_a_second() -> None:
    per_request, per_response = scheduler_cost(LetterText(), 5000, 2 * SHORT_S)
    assert 0 <= per_request < 0.1
    assert 0 < per_response < 0.1
    assert 0 < engine_cost(SHORT_S) < 0.1


def test_the_engine_is_measured_for_as_long_as_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tritandem.sizing.engine_cost.VOCAB_SIZE", 10)  # fewer than sequences
    assert engine_cost(SHORT_S) > 0


def test_deliveries_that_do_not_come_are_counted_in_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tritandem.sizing.scheduler_cost.PATIENCE_S", 0.01)
    deliveries = Deliveries()
    deliveries.add(ended=False)
    with pytest.raises(Exception, match="1 of 2 responses"):
        deliveries.wait_for_responses(2)
    with pytest.raises(Exception, match="0 of 1 answers"):
        deliveries.wait_for_ends(1)


def test_the_text_has_the_asked_length_and_does_not_repeat_itself() -> None:
    text = prompt_text(30_000)
    assert len(text) == 30_000
    pieces = [text[i : i + 200] for i in range(0, 30_000, 200)]
    assert len(set(pieces)) == len(pieces)


def test_the_machine_is_named_by_processor_and_cores(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nmodel name\t: Abacus 9000\n")
    assert machine_name(cpuinfo).startswith("Abacus 9000, ")
    assert machine_name(tmp_path / "absent").startswith("unknown CPU, ")


@pytest.fixture
def byte_model(tmp_path: Path) -> Path:
    """A model folder whose tokenizer knows bytes and no words: loaded in no time."""
    folder = tmp_path / "model"
    folder.mkdir()
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": len(letters)}))
    return folder


def test_calibrate_writes_a_file_that_size_reads(
    byte_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "costs.json"
    assert calibrate("--model", str(byte_model), "--seconds", str(SHORT_S), "--output", str(output)) == 0
    assert "tokens per core-second" in capsys.readouterr().out
    read = load_coefficients(output)
    assert read.sources["tokenizer_slow_tokens_per_core_s"] == MEASURED
    assert read.sources["triton_cpu_s_per_response"] == load_coefficients().sources["triton_cpu_s_per_response"]
    assert json.loads(output.read_text())["machine"] == machine_name()


def test_the_tokenizer_rate_is_tokens_over_cpu_time(byte_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = load_tokenizer(byte_model, TokenizerConfig(fast=False))
    clock = iter(float(second) for second in range(100))
    monkeypatch.setattr("tritandem.sizing.calibrate.time.process_time", lambda: next(clock))
    # Looked at after 1, 2, 3 and 4 seconds, with a text of ten bytes encoded in between: three texts, four seconds.
    assert encode_rate(tokenizer, "ten bytes!", 4.0) == pytest.approx(3 * 10 / 4)
    tokenizer.close()


def test_a_model_that_does_not_exist_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--model"):
        calibrate("--model", str(tmp_path / "absent"), "--output", str(tmp_path / "costs.json"))


def test_an_output_file_in_a_folder_that_does_not_exist_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--output"):
        calibrate("--model", str(tmp_path), "--output", str(tmp_path / "absent" / "costs.json"))
