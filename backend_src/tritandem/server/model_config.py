"""A model's config.pbtxt as a message of Triton's own, by way of protobuf's text format."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from runpy import run_path
from typing import Any

import tritonclient
from google.protobuf import text_format

from ..host import Refusal


def read_config(model: Path) -> Any:
    """The message `inference.ModelConfig` of the folder `model`. Raises Refusal for a file that is none."""
    path = model / "config.pbtxt"
    try:
        return text_format.Parse(path.read_bytes(), _messages()["ModelConfig"]())
    except (text_format.ParseError, UnicodeDecodeError) as error:
        raise Refusal(f"{path}: {error}", "give the models of the repository a valid configuration") from error


def write_config(model: Path, config: Any) -> None:
    """Replaces the file; its comments are lost."""
    (model / "config.pbtxt").write_text(text_format.MessageToString(config))


def set_instances(config: Any, count: int) -> None:
    """One CPU group of `count` instances in place of whatever there was."""
    del config.instance_group[:]
    config.instance_group.add(count=count, kind=_messages()["ModelInstanceGroup"].KIND_CPU)


@cache
def _messages() -> Mapping[str, Any]:
    """tritonclient's messages without its package, which brings grpc and numpy: 28 MB of every launcher."""
    return run_path(str(Path(tritonclient.__file__).with_name("grpc") / "model_config_pb2.py"))
