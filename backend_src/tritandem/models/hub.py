"""A model by hub id, through huggingface_hub and its own cache."""

from __future__ import annotations

from pathlib import Path

from ..host import Refusal
from .store import Say

# Weights once (not the same ones again in another library's format), everything the tokenizer needs.
WANTED_FILES = ["*.json", "*.safetensors", "tokenizer.model", "*.jinja", "*.txt"]
UNWANTED_FILES = [
    "consolidated*",
    "original/*",
]  # the same weights once more, under the names of their authors' own code


def download_snapshot(hub_id: str, say: Say) -> Path:
    """The snapshot's folder in the hub's cache; files already there are not fetched again. Raises Refusal."""
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
