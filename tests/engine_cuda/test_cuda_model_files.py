"""A folder and a GGUF file are served on CUDA in each dtype that can be asked for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tritandem.config import EngineConfig
from tritandem.engine.model.loader import load_model

from tests.engine.engine_rig import Rig, prompts, request
from tests.engine.tiny_gguf import write_gguf
from tests.engine_cuda.test_cuda_engine import reference_model

pytestmark = pytest.mark.gpu

# How far a chosen token may lie behind the best one of float32, in standard deviations of its logits.
TOLERANCE = {"float32": 1e-4, "float16": 0.02, "bfloat16": 0.15}


@pytest.mark.parametrize("dtype", sorted(TOLERANCE))
@pytest.mark.parametrize("kind", ["folder", "gguf"])
def test_files_give_transformers_tokens(cuda_device: torch.device, kind: str, dtype: str, tmp_path: Path) -> None:
    from tritandem.engine.runners.cuda import CudaRunner

    model = reference_model("llama")
    if kind == "gguf":
        path = tmp_path / "tiny.gguf"
        write_gguf(path, model)
    else:
        path = tmp_path
        model.save_pretrained(path)
    config = EngineConfig(device="cuda", dtype=dtype, num_blocks=64, max_sequences=4, prefill_tokens_per_step=64)
    loaded = load_model(path, config, lambda note: None)
    assert loaded.model.dtype == getattr(torch, dtype)
    runner = CudaRunner(loaded, config, lambda note: None)
    assert runner.device.forward.fused
    texts = prompts(6, seed=4, high=60)
    try:
        answers = Rig(runner).run([request(i, ids, max_tokens=16) for i, ids in enumerate(texts)])
    finally:
        runner.close()
    for i, ids in enumerate(texts):
        chosen_ids = torch.tensor(answers[i].tokens)
        assert len(chosen_ids) == 16
        with torch.no_grad():
            logits = model(torch.tensor([*ids.tolist(), *answers[i].tokens])[None]).logits[0, len(ids) - 1 : -1]
        chosen = logits.gather(1, chosen_ids[:, None])[:, 0]
        behind = (logits.amax(dim=1) - chosen) / logits.std(dim=1)
        assert float(behind.max()) < TOLERANCE[dtype], f"sequence {i}: {answers[i].tokens}"
