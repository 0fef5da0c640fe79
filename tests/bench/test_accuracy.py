"""The benchmark of what rounding costs: figures of a model against itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tritandem_bench.accuracy import ROWS_TOO, compare, log_probs, main, rounded_model

from tests.engine.quantized_folders import tiny_model

IDS = (torch.arange(64) * 31 % 97).tolist()


def test_finer_formats_are_nearer_to_the_whole_model_and_bits_are_counted() -> None:
    model = tiny_model()
    whole = log_probs(model, IDS, 16)
    rows = {}
    for name in ("FP8 a row", ROWS_TOO, "INT4 g32", "INT4 g32 zero points"):
        made, bits = rounded_model(model, name)
        rows[name] = compare(name, bits, log_probs(made, IDS, 16), whole, IDS, 16)
    assert 0 < rows["FP8 a row"].kl < rows[ROWS_TOO].kl < rows["INT4 g32"].kl
    assert rows["INT4 g32"].bits == 4.5
    assert rows["INT4 g32 zero points"].bits == 4.75
    assert 8 < rows["FP8 a row"].bits < 9
    itself = compare("whole", 32, whole, whole, IDS, 16)
    assert (itself.kl, itself.same_greedy) == (0.0, 1.0)
    told = torch.cat(
        [whole[i : i + 15].gather(1, torch.tensor(IDS[i + 1 : i + 16])[:, None]) for i in range(0, 64, 16)]
    )
    assert itself.perplexity == pytest.approx(float((-told).mean().exp()), rel=1e-5)


def test_a_group_that_does_not_divide_the_inputs_is_named() -> None:
    with pytest.raises(ValueError, match="64 inputs"):
        rounded_model(tiny_model(), "INT4 g128")


def test_what_is_not_there_is_named_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=r"--model: given .*tokenizer.json, allowed: a file"):
        main(["--model", str(tmp_path)])
    (tmp_path / "tokenizer.json").touch()
    with pytest.raises(SystemExit, match=r"--text: given docs/scheduling\.md, allowed: a file"):
        main(["--model", str(tmp_path)])
