"""What is quantized is found before anything is loaded, without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tritandem.contracts.errors import ConfigError
from tritandem.model_facts import check_folder
from tritandem.model_facts.quantization import Quantization, quantization_of, stored_layers
from tritandem.model_facts.weight_files import Weight


def test_layers_and_whole_weights_are_told_apart_by_their_tensors() -> None:
    weights = {
        "a.weight": Weight((128, 256), "F8_E4M3", 0),
        "a.weight_scale": Weight((128, 1), "BF16", 0),
        "a.input_scale": Weight((), "F32", 0),
        "b.weight_packed": Weight((128, 32), "I32", 0),
        "b.weight_scale": Weight((128, 2), "BF16", 0),
        "b.weight_shape": Weight((2,), "I64", 0),
        "norm.weight": Weight((256,), "BF16", 0),
        "norm.bias": Weight((256,), "BF16", 0),
    }
    layers, plain = stored_layers(weights, Quantization("compressed-tensors"), "here")
    assert plain == ["norm.weight", "norm.bias"]
    assert {name: (layer.layout, layer.shape, layer.group) for name, layer in layers.items()} == {
        "a": ("fp8", (128, 256), 256),
        "b": ("compressed", (128, 256), 128),
    }
    assert [layer.words for layer in layers.values()] == ["FP8, one scale a row", "INT4, groups of 128"]


@pytest.mark.parametrize(("stated", "shift"), [({}, 1), ({"checkpoint_format": "gptq_v2"}, 0)])
def test_the_first_convention_of_gptq_stores_zero_points_less_one(stated: dict[str, str], shift: int) -> None:
    assert quantization_of({"quant_method": "gptq", "bits": 4, **stated}, "here").zero_shift == shift


def test_a_folder_is_refused_before_torch_is_there(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "hqq"}}))
    with pytest.raises(ConfigError, match="'hqq', which is not served"):
        check_folder(tmp_path)
    check_folder(tmp_path, weights=False)
    code = "import sys, tritandem.model_facts.quantization; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["False"], done.stderr
