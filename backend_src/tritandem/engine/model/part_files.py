"""One rank's part of a model from safetensors files, of which only that part is read, or from random numbers, which are
the same however many ranks there are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from ...config import EngineConfig
from ...contracts.errors import ConfigError
from ...model_facts.weight_files import weight_files
from .share import Share
from .weight_names import refuse_report


class _Unread:
    """What a rank has of a weight, read when it is indexed by whoever loads it."""

    def __init__(self, share: Share, name: str, weight: Any) -> None:
        self._share, self._name, self._weight = share, name, weight

    def __getitem__(self, _: Any) -> torch.Tensor:
        part = self._share.part(self._name, self._weight)
        assert part is not None
        return part


def load_part(
    share: Share, path: Path, config: PreTrainedConfig, device: torch.device, settings: EngineConfig, options: Any
) -> PreTrainedModel:
    """`options` are transformers'. Raises ConfigError."""
    with torch.device("meta"):
        whole = type(AutoModelForCausalLM.from_config(config, **options))
    random = settings.random_weights
    state = {} if random else _state(share, path)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else [], enabled=random):
        if random:
            torch.manual_seed(settings.random_weights_seed)
        model, report = share.model_class(whole, random).from_pretrained(
            None,
            config=config,
            state_dict=state,
            device_map={"": device},
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # to name them
            **options,
        )
    if not random:
        refuse_report(path, report)
    return model


def _state(share: Share, folder: Path) -> dict[str, _Unread]:
    files = weight_files(folder) if folder.is_dir() else []
    if not files:
        raise ConfigError(f"{folder}: several ranks read a folder of safetensors files or a GGUF file")
    state: dict[str, _Unread] = {}
    for file in files:
        opened: Any = safe_open(folder / file, framework="pt", device="cpu")
        for name in opened.keys():  # noqa: SIM118  (it is no dictionary)
            if share.holds(name):
                state[name] = _Unread(share, name, opened.get_slice(name))
    return state
