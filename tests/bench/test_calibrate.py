"""The measurements behind `tritandem size`, kept short: that they measure, not how fast this machine is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tritandem.config import TokenizerConfig
from tritandem.sizing import load_coefficients
from tritandem.tokenizer import load_tokenizer
from tritandem_bench import calibrate
from tritandem_bench.calibrate import MEASURED, encode_rate, engine_cost, machine_name, solve
from tritandem_bench.scheduler import measure
from tritandem_bench.stand_ins import FIRST_ID, IDS, TableText

SHORT_S = 0.05


def test_two_runs_give_both_costs_of_the_scheduler() -> None:
    per_request, per_response = 0.0003, 0.00007
    runs = [(n, n * k, n * per_request + n * k * per_response) for n, k in ((500, 1), (40, 64))]
    assert solve(runs[0], runs[1]) == pytest.approx((per_request, per_response))


def test_noise_never_makes_a_cost_negative_and_a_response_never_free() -> None:
    assert solve((100, 100, 0.001), (10, 640, 0.5)) == (0.0, pytest.approx(0.501 / 740))
    assert solve((100, 100, 1.0), (100, 6400, 0.5)) == (0.0, pytest.approx(1.5 / 6500))
    assert solve((100, 100, 0.5), (100, 6400, 0.5)) == (0.0, pytest.approx(1.0 / 6500))


def test_the_scheduler_delivers_every_token_that_is_offered() -> None:
    row = measure(streams=4, rate=400.0, tokens_each=8, trip_s=0.0001, threads=2, text=TableText())
    assert 4 <= row["responses"] <= 4 * 8
    assert row["responses"] * row["tokens_per_response"] == pytest.approx(4 * 8, rel=0.01)
    assert row["cpu_us_per_response"] > 0


def test_the_engine_costs_something_and_not_a_second() -> None:
    assert 0 < engine_cost(SHORT_S) < 0.1


def test_the_machine_is_named_by_processor_and_cores(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nmodel name\t: Abacus 9000\n")
    assert machine_name(cpuinfo).startswith("Abacus 9000, ")
    assert machine_name(tmp_path / "absent").startswith("unknown CPU, ")


@pytest.fixture
def byte_model(tmp_path: Path) -> Path:
    """A model folder whose tokenizer knows bytes, and as many words as the stand-in for the engine says."""
    folder = tmp_path / "model"
    folder.mkdir()
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*letters, *(f"word{i}" for i in range(FIRST_ID + IDS - len(letters)))]
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": len(words)}))
    return folder


def test_calibrate_writes_a_file_that_size_reads(
    byte_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "costs.json"
    calibrate.main(["--model", str(byte_model), "--seconds", str(SHORT_S), "--output", str(output)])
    assert "tokens per core-second" in capsys.readouterr().out
    read, shipped = load_coefficients(output), load_coefficients()
    assert read.sources["tokenizer_slow_tokens_per_core_s"] == MEASURED
    assert read.sources["triton_cpu_s_per_response"] == shipped.sources["triton_cpu_s_per_response"]
    assert 0 < read.values.scheduler_cpu_s_per_response < 0.1
    assert read.machine == machine_name()


def test_the_tokenizer_rate_is_tokens_over_cpu_time(byte_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = load_tokenizer(byte_model, TokenizerConfig(fast=False))
    clock = iter(float(second) for second in range(100))
    monkeypatch.setattr("tritandem_bench.calibrate.time.process_time", lambda: next(clock))
    # Looked at after 1, 2, 3 and 4 seconds, with a text of ten bytes encoded in between: three texts, four seconds.
    assert encode_rate(tokenizer, "ten bytes!", 4.0) == pytest.approx(3 * 10 / 4)
    tokenizer.close()
