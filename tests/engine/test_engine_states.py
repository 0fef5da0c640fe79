"""Layers with a state: no row reads another's, nothing is taken in twice, and what is not known is refused."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3_5ForConditionalGeneration
from tritandem.config import EngineConfig
from tritandem.contracts.stream import FinishCode
from tritandem.engine.host.forcing import Forcing
from tritandem.engine.model.loader import check_model, load_model
from tritandem.engine.model.states import layers
from tritandem.engine.model.states.cache import StateCache
from tritandem.engine.model.states.interface import DeltaInputs
from tritandem.engine.model.support import UnsupportedModel, inspect_model
from tritandem.engine.runners.cpu import CpuRunner

from tests.engine.engine_rig import (
    Rig,
    generate,
    loaded_model,
    make_runner,
    prompts,
    reference_model,
    request,
    tokens_of,
)
from tests.engine.structured_rig import begun, regex, structured
from tests.fakes.delayed_runner import DelayedRunner
from tools.pages.families import tiny_config

KIND = "qwen3_next"
TOKENS = 14


def test_a_short_prompt_after_a_long_one_begins_with_nothing() -> None:
    rig = Rig(make_runner(KIND, max_sequences=1))
    for number, ids in enumerate(prompts(5, seed=4, low=1, high=30)):
        rig.run([request(number, ids, max_tokens=TOKENS)])
        assert rig.answers[number].tokens == generate(KIND, ids, TOKENS)


def test_choices_of_one_prompt_are_each_computed_whole() -> None:
    ids = prompts(1, seed=9, low=30, high=31)[0]
    family = [dataclasses.replace(request(i, ids, max_tokens=TOKENS), family=3) for i in range(3)]
    rig = Rig(make_runner(KIND, max_sequences=2, prefill_tokens_per_step=8))
    answers = rig.run(family)
    assert tokens_of(answers) == dict.fromkeys(range(3), generate(KIND, ids, TOKENS))
    assert rig.core.load().prefix_hit_tokens == 0
    seeded = [dataclasses.replace(one, seq_id=10 + one.seq_id) for one in family]
    seeded = [
        dataclasses.replace(one, sampling=dataclasses.replace(one.sampling, temperature=1.0, seed=one.seq_id))
        for one in seeded
    ]
    together = tokens_of(Rig(make_runner(KIND)).run(seeded))
    alone = {}
    for one in seeded:
        alone |= tokens_of(Rig(make_runner(KIND)).run([dataclasses.replace(one, family=0)]))
    assert together == alone
    assert len({tuple(tokens) for tokens in together.values()}) > 1


class HalfAStep:
    """The `number`-th pass of a real runner breaks once its layers have taken the tokens in."""

    def __init__(self, runner: CpuRunner, number: int) -> None:
        self.passes, self.number, self._logits = 0, number, runner._forward.logits
        runner._forward.logits = self  # type: ignore[method-assign,assignment]

    def __call__(self, *args: Any) -> torch.Tensor:
        self.passes += 1
        logits = self._logits(*args)
        if self.passes == self.number:
            raise RuntimeError("half-way")
        return logits


@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize("number", [1, 2, 3, 4, 6, 9, 15])
def test_a_step_that_broke_half_way_is_not_taken_in_twice(number: int, ahead: int) -> None:
    asked = prompts(4, seed=2, low=9, high=40)
    runner = make_runner(KIND, max_sequences=3, prefill_tokens_per_step=16)
    broken = HalfAStep(runner, number)
    rig = Rig(DelayedRunner(runner, ahead) if ahead else runner)
    answers = rig.run([request(i, ids, max_tokens=TOKENS) for i, ids in enumerate(asked)])
    assert broken.passes > number
    for i, ids in enumerate(asked):
        if answers[i].finish == FinishCode.ERROR:  # it was alone in the step
            assert number <= 2
            assert "half-way" in answers[i].error
        else:
            assert answers[i].tokens == generate(KIND, ids, TOKENS)


@pytest.mark.parametrize("number", range(2, 7))
def test_a_forced_run_that_broke_half_way_is_not_taken_in_twice(number: int) -> None:
    requests = [
        structured(i, ids, regex("[a-z]{2}mmmmmm[a-z]{9}"), temperature=1.0, seed=i, max_tokens=30)
        for i, ids in enumerate(prompts(2, seed=2, low=9))
    ]
    right = tokens_of(begun(Rig(make_runner(KIND), forcing=Forcing(least_run=0)), requests).run(()))
    runner = make_runner(KIND)
    broken = HalfAStep(runner, number)
    assert tokens_of(begun(Rig(runner, forcing=Forcing()), requests).run(())) == right
    assert broken.passes > number


def test_states_have_the_size_that_is_told() -> None:
    loaded = loaded_model(KIND)
    cache = StateCache.allocate(loaded.model, slots=1)
    tensors = [*cache.conv.values(), *cache.recurrent.values()]
    assert sum(tensor.numel() * tensor.element_size() for tensor in tensors) == 2 * loaded.state_bytes > 0
    assert [layer.number for layer in loaded.layers] == [1]
    assert loaded_model("llama").state_bytes == 0


def _swapped(module: Any, shape: Any, hidden: torch.Tensor) -> DeltaInputs:
    inputs = layers._by_groups(module, shape, hidden)
    return dataclasses.replace(inputs, query=inputs.key, key=inputs.query)


def test_a_layer_that_is_read_wrong_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(layers.READERS, "Qwen3NextGatedDeltaNet", _swapped)
    with pytest.raises(UnsupportedModel, match=r"logits through paged attention differ from the model's own"):
        inspect_model(copy.deepcopy(reference_model(KIND)))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            lambda layer: setattr(layer, "activation", "gelu"),
            r"the activations \['gelu', 'silu'\]; only silu is served",
        ),
        (lambda layer: setattr(layer, "conv1d", torch.nn.Conv1d(80, 80, 4, groups=80)), "a convolution with a bias"),
        (lambda layer: delattr(layer, "A_log"), "is not the one that is known: .*A_log"),
    ],
)
def test_a_layer_that_is_not_the_known_one_is_refused(change: Any, reason: str) -> None:
    model = copy.deepcopy(reference_model(KIND))
    change(model.model.layers[2].linear_attn)
    with pytest.raises(UnsupportedModel, match=f"^qwen3_next_text: its Qwen3NextGatedDeltaNet .*{reason}|{reason}"):
        inspect_model(model)


def test_of_a_published_qwen3_5_with_images_the_text_part_is_served(tmp_path: Path) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        theirs = Qwen3_5ForConditionalGeneration(tiny_config("qwen3_5")).to(torch.float32).eval()
    theirs.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file(load_file(file) | {"mtp.norm.weight": torch.ones(64)}, file, {"format": "pt"})
    check_model(tmp_path)
    loaded = load_model(tmp_path, EngineConfig(device="cpu"), lambda message: None)
    ids = torch.arange(20)[None] * 7 % 131
    with torch.no_grad():
        want = theirs(input_ids=ids).logits
    config = EngineConfig(num_blocks=32, max_sequences=2, block_tokens=4, prefill_tokens_per_step=8)
    answer = Rig(CpuRunner(loaded, config)).run([request(0, ids[0].numpy(), max_tokens=1)])[0]
    assert answer.tokens == [int(want[0, -1].argmax())]
