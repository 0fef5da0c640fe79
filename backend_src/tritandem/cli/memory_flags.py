"""The flags that say in which types a model and its KV cache are held, shared by `serve` and `model show`."""

from __future__ import annotations

import argparse

from tritandem.config import EngineConfig, settings_of

_MEANING = {
    "quantization": "round whole weights while they are loaded (docs: quantized weights)",
    "kv_dtype": "type of the KV cache",
}


def add_memory_flags(parser: argparse.ArgumentParser, default: EngineConfig | None) -> None:
    """`default`: what holds without the flags; None: the configuration, which is asked later."""
    for name, meaning in _MEANING.items():
        setting = settings_of(EngineConfig)[name]
        told = getattr(EngineConfig(), name) if default is None else getattr(default, name)
        where = f"the setting engine.{name}, or {told}" if default is None else told
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            choices=setting.choices,
            default=None if default is None else told,
            help=f"{meaning} (default: {where})",
        )
