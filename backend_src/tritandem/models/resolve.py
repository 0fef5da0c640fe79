"""What `--model` may say: a folder, a GGUF file, a name of the catalog, or a hub id."""

from __future__ import annotations

import re
from pathlib import Path

from ..host import Refusal
from .catalog import CATALOG
from .fetch import fetch, fetch_gguf
from .store import Say

# Weights once (not the same ones again in another library's format), everything the tokenizer needs.
WANTED_FILES = ["*.json", "*.safetensors", "tokenizer.model", "*.jinja", "*.txt"]
# The same weights once more, under the names of their authors' own code.
UNWANTED_FILES = ["consolidated*", "original/*"]
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


def download_snapshot(hub_id: str, say: Say) -> Path:
    """The folder in the cache of huggingface_hub; files already there are not fetched again. Raises Refusal."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    say(f"looking for {hub_id} in the local hub cache and on the hub")
    try:
        return Path(snapshot_download(hub_id, allow_patterns=WANTED_FILES, ignore_patterns=UNWANTED_FILES))
    except HfHubHTTPError as error:
        reason = str(error).strip().splitlines()[0]
    except HFValidationError as error:
        reason = str(error)
    except LocalEntryNotFoundError:
        reason = "the hub cannot be reached and the model is not in its local cache"
    except OSError as error:
        raise Refusal(
            f"model {hub_id} could not be kept ({error.strerror or error})",
            "free some space, or set HF_HOME to a folder that can be written",
        ) from error
    raise Refusal(
        f"model {hub_id} could not be fetched ({reason})", "give --model a local folder, or check the network"
    )
