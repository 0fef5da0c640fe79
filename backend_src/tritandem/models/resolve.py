"""What `--model` may say: a folder, a GGUF file, a name of the catalog, or a hub id."""

from __future__ import annotations

import re
from pathlib import Path

from ..host import Refusal
from .catalog import CATALOG
from .fetch import fetch, fetch_gguf
from .hub import download_snapshot
from .store import Say

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def resolve_model(spec: str, say: Say) -> Path:
    """The model's folder, fetched or converted when needed. Raises Refusal.

    A path wins over a name, and a name over a hub id; something that looks like a path is never asked of a hub.
    """
    if not spec.strip():
        raise Refusal("model '' is empty", "give a folder, a .gguf file, a name of `tritandem model list`, or a hub id")
    path = Path(spec).expanduser()
    if path.is_dir():
        return path.resolve()
    if path.is_file():
        if path.suffix != ".gguf":
            raise Refusal(f"{path} is neither a folder nor a .gguf file", "give the model's folder")
        return fetch_gguf(path.resolve(), say)
    if spec in CATALOG:
        return fetch(spec, say)
    if spec.endswith(".gguf") or spec.startswith(("/", ".", "~")):
        raise Refusal(f"model {spec} does not exist", "give an existing folder or .gguf file")
    if _HUB_ID.fullmatch(spec):
        return download_snapshot(spec, say)
    raise Refusal(
        f"unknown model {spec!r}",
        f"known names: {', '.join(sorted(CATALOG))}; or give a folder, a .gguf file, or a hub id like ORG/NAME",
    )
